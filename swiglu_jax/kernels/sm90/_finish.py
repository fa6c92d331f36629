"""How a warpgroup works an epilogue off: from held registers through shared memory to outputs.

A warp handles its own 16 rows alone, TMA stores included, so nothing here waits for more than a
warp, and nothing touches the accumulator: a step can run while ``wgmma`` is under way.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from swiglu_jax.kernels.sm90._plan import Plan
from swiglu_jax.kernels.sm90._tile import GROUP_COLUMNS, STEP_COLUMNS, STEPS, WARP_ROWS

MATRICES = STEP_COLUMNS // 4
"""8 x 8 matrices of one ``stmatrix`` or ``ldmatrix``: 16 rows of a step's columns."""
WORDS = STEP_COLUMNS // 4
"""Registers of two elements that a thread has of a step's columns."""


class Finisher(NamedTuple):
    """A thread's views for the epilogue; made once, used in every step."""

    to_shared: Any
    """Tiled copy of a step's registers to shared memory."""
    targets: Any
    """Its shared-memory side: (values, 1, step of a group, output)."""
    stores: Any
    """A TMA store for each output of each problem: (atom, shared side, global side)."""
    pipe: Any
    """Pipeline of the epilogue's inputs; None if it reads none."""
    from_shared: Any
    """Tiled copy of the inputs to registers, and its shared-memory side; or None."""
    sources: Any


@cute.jit
def make_finisher(
    plan: cutlass.Constexpr[Plan],
    tiled_mma: cute.TiledMma,
    thread: Int32,
    warp_index: Int32,
    pipe: cutlass.Constexpr,
    inputs: cutlass.Constexpr,
    outputs: cute.Tensor,
    out_atoms: cutlass.Constexpr,
    out_tensors: cutlass.Constexpr,
):
    """Views of ``inputs`` and ``outputs`` (shared memory) for a thread of the warpgroups."""
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, MATRICES), plan.dtype)
    accumulator = cute.make_tiled_copy_C_atom(store, tiled_mma)
    to_shared = cute.make_tiled_copy_S(store, accumulator)
    from_shared, sources = None, None
    if const_expr(inputs is not None):
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, MATRICES), plan.dtype)
        from_shared = cute.make_tiled_copy_S(load, accumulator)
        sources = from_shared.get_slice(thread).partition_S(inputs)
    shape = (WARP_ROWS, GROUP_COLUMNS)
    stores = []
    for atom, tensor in zip(out_atoms, out_tensors, strict=True):
        shared, target = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.local_tile(outputs, shape, (warp_index, 0, None)), 0, 2),
            cute.group_modes(cute.local_tile(tensor, shape, (None, None)), 0, 2),
        )
        stores.append((atom, shared, target))
    return Finisher(
        to_shared,
        to_shared.get_slice(thread).partition_D(outputs),
        tuple(stores),
        pipe,
        from_shared,
        sources,
    )


@cute.jit
def finish_step(
    plan: cutlass.Constexpr[Plan],
    finisher: cutlass.Constexpr[Finisher],
    step: cutlass.Constexpr[int],
    held: cute.Tensor,
    state,
    problem: Int32,
    row: Int32,
    column: Int32,
) -> None:
    """Step ``step`` of a tile's epilogue; a group's last step stores the group.

    ``row`` counts in the 16 rows of a warp, ``column`` in groups; ``state`` is of the inputs.
    """
    part = const_expr(step % STEPS)
    count = const_expr(len(plan.epilogue.aux))
    in_place = const_expr(plan.tile.in_place and count > 0)
    inputs = []
    if const_expr(count > 0):
        if const_expr(part == 0):
            finisher.pipe.consumer_wait(state)
        for i in cutlass.range_constexpr(count):
            source = finisher.sources[(None, None, part, state.index * count + i)]
            words = cute.make_rmem_tensor(WORDS, Uint32)
            halves = cute.recast_ptr(words.iterator, dtype=plan.dtype)
            view = cute.make_tensor(halves, cute.make_layout(source.shape))
            cute.copy(finisher.from_shared, source, view)
            inputs.append(words)
    results = [cute.make_rmem_tensor((WORDS, 1), Uint32) for _ in plan.epilogue.outputs]
    plan.epilogue.chunk(step, held, inputs, results, plan.dtype)
    if const_expr(in_place):
        # Every lane has read these columns before any lane writes over them.
        cute.arch.sync_warp()
    elif const_expr(part == 0):
        # The group before must have left shared memory before it is written again.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
    for i in cutlass.range_constexpr(len(results)):
        target = finisher.targets[(None, None, part, i)]
        cute.copy(finisher.to_shared, cute.recast_tensor(results[i], plan.dtype), target)
    if const_expr(part == STEPS - 1 and count > 0 and not in_place):
        # Not earlier: an arrival overtakes loads from shared memory that are still under way (the
        # memory pipe may be full of stores), and the next group would be loaded over what they have
        # not read. What was just written depends on all of them.
        finisher.pipe.consumer_release(state)
    if const_expr(part == STEPS - 1):
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        at = (row, column + step // STEPS)
        if const_expr(plan.problems == 1):
            _store(finisher.stores, at)
        else:
            for p in cutlass.range_constexpr(plan.problems):
                if problem == p:
                    _store(finisher.stores[p * len(results) : (p + 1) * len(results)], at)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store(stores: cutlass.Constexpr, at) -> None:
    """A staged group of every output of a tile to its place (16 rows, 32 columns)."""
    for i in cutlass.range_constexpr(len(stores)):
        atom, shared, output = stores[i]
        cute.copy(atom, shared[(None, i)], output[(None, *at)])


@cute.jit
def release_in_place(finisher: cutlass.Constexpr[Finisher], state) -> None:
    """Give a staged group back once this warp's stores have read it."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
    finisher.pipe.consumer_release(state)

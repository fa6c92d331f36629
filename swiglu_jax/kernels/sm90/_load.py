"""The two loading warps: operands for the main loop, inputs for the epilogue; both by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from swiglu_jax.kernels.sm90._plan import Plan
from swiglu_jax.kernels.sm90._schedule import Schedule, tile_coordinate, tile_count
from swiglu_jax.kernels.sm90._tile import GROUP_COLUMNS


def load_atom(plan: Plan, shared_by: int, tensor: cute.Tensor, box, shape):
    """A TMA load of ``shape``, multicast if ``shared_by`` blocks of a cluster want it."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    if shared_by > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(op, tensor, box, shape)


@cute.jit
def load_operands(
    plan: cutlass.Constexpr[Plan],
    schedule: Schedule,
    pipe: pipeline.PipelineTmaAsync,
    products: cutlass.Constexpr,
    sa: cute.Tensor,
    sb: cute.Tensor,
) -> None:
    """Every stage of every tile: each block of a cluster loads its slice for all that share it.

    ``products`` are the terms of the one problem, or the problems of one term: (A's TMA atom and
    tensor, those of each B).
    """
    tile = plan.tile
    cluster_m, cluster_n = tile.cluster
    rank_m, rank_n = schedule.rank_m, schedule.rank_n
    ranks = cute.make_layout(tile.cluster)
    # A is shared by the blocks of one row of the cluster, B by those of one column.
    a_mask = {}
    if const_expr(cluster_n > 1):
        a_mask = {"mcast_mask": cute.make_layout_image_mask(ranks, (rank_m, rank_n), mode=1)}
    b_mask = {}
    if const_expr(cluster_m > 1):
        b_mask = {"mcast_mask": cute.make_layout_image_mask(ranks, (rank_m, rank_n), mode=0)}

    a_place = (0, rank_n, None) if plan.a_mn else (rank_n, 0, None)
    a_part = cute.local_tile(sa, plan.a_slice, a_place)
    b_parts = []
    for i in cutlass.range_constexpr(plan.epilogue.operands):
        place = (i, rank_m, None) if plan.b_mn else (i * cluster_m + rank_m, 0, None)
        b_parts.append(cute.local_tile(sb, plan.b_slice, place))
    # (atom, shared side, global side, multicast) of every operand of every product.
    copies = []
    for (a_atom, a_tensor), *bs in products:
        both = [(a_atom, *_partition(a_atom, a_tensor, plan.a_slice, a_part), a_mask)]
        for (b_atom, b_tensor), part in zip(bs, b_parts, strict=True):
            both.append((b_atom, *_partition(b_atom, b_tensor, plan.b_slice, part), b_mask))
        copies.append(both)

    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, tile.stages)
    index = Int32(schedule.first)
    while index < tile_count(schedule.grids):
        problem, m, n = tile_coordinate(schedule, index, tile.cluster, tile.raster)
        for p in cutlass.range_constexpr(len(products)):
            if const_expr(plan.problems == 1):  # noqa: SIM114 - one is the device's
                state = _load_tile(plan, schedule, pipe, state, copies[p], m, n)
            elif problem == p:
                state = _load_tile(plan, schedule, pipe, state, copies[p], m, n)
        index += schedule.step
    # A block must outlive its peers' multicasts into it and their arrivals at its barriers.
    pipe.producer_tail(state)


@cute.jit
def _load_tile(
    plan: cutlass.Constexpr[Plan],
    schedule: Schedule,
    pipe: pipeline.PipelineTmaAsync,
    state,
    copies: cutlass.Constexpr,
    m: Int32,
    n: Int32,
):
    """Every stage of one term of a tile: ``copies`` of A, then of each B."""
    cluster_m, cluster_n = plan.tile.cluster
    rank_m, rank_n = schedule.rank_m, schedule.rank_n
    for k in cutlass.range(schedule.k_tiles, unroll=1):
        a_from = (m, k * cluster_n + rank_n) if plan.a_mn else (m * cluster_n + rank_n, k)
        b_from = (n, k * cluster_m + rank_m) if plan.b_mn else (n * cluster_m + rank_m, k)
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        for i in cutlass.range_constexpr(len(copies)):
            atom, to, source, mask = copies[i]
            place = a_from if i == 0 else b_from
            cute.copy(
                atom, source[(None, *place)], to[(None, state.index)], tma_bar_ptr=barrier, **mask
            )
        pipe.producer_commit(state)
        state.advance()
    return state


@cute.jit
def load_inputs(
    plan: cutlass.Constexpr[Plan],
    schedule: Schedule,
    pipe: pipeline.PipelineTmaAsync,
    atoms: cutlass.Constexpr,
    tensors: cutlass.Constexpr,
    staged: cute.Tensor,
) -> None:
    """The epilogue's inputs, a group of columns of each at a time, as far ahead as stages allow."""
    tile = plan.tile
    shape = (tile.m, GROUP_COLUMNS)
    count = const_expr(len(atoms))
    parts = [_partition(atoms[i], tensors[i], shape, staged) for i in range(count)]
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, tile.input_stages)
    index = Int32(schedule.first)
    while index < tile_count(schedule.grids):
        _, m, n = tile_coordinate(schedule, index, tile.cluster, tile.raster)
        for group in cutlass.range(plan.groups, unroll=1):
            pipe.producer_acquire(state)
            for i in cutlass.range_constexpr(count):
                to, source = parts[i]
                cute.copy(
                    atoms[i],
                    source[(None, m, n * plan.groups + group)],
                    to[(None, state.index * count + i)],
                    tma_bar_ptr=pipe.producer_get_barrier(state),
                )
            pipe.producer_commit(state)
            state.advance()
        index += schedule.step
    pipe.producer_tail(state)


def _partition(atom: cute.CopyAtom, tensor: cute.Tensor, shape: tuple[int, int], shared):
    """(shared, global) sides of a TMA copy, its box as their first mode."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(cute.local_tile(tensor, shape, (None, None)), 0, 2),
    )

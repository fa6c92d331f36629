"""The multiplying warpgroups: main loops, and inside each the epilogue of the tile before it."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from swiglu_jax.kernels.sm90._finish import Finisher, finish_step, release_in_place
from swiglu_jax.kernels.sm90._plan import Plan
from swiglu_jax.kernels.sm90._schedule import Schedule, tile_coordinate, tile_count
from swiglu_jax.kernels.sm90._tile import STEPS, WARP_ROWS


@cute.jit
def multiply(
    plan: cutlass.Constexpr[Plan],
    schedule: Schedule,
    tiled_mma: cute.TiledMma,
    thread: Int32,
    warp_index: Int32,
    pipe: pipeline.PipelineTmaAsync,
    sa: cute.Tensor,
    sb: cute.Tensor,
    finisher: cutlass.Constexpr[Finisher],
) -> None:
    """Every tile of this block, from its stages to its outputs."""
    tile = plan.tile
    group = cute.arch.make_warp_uniform(thread // 128)
    thr_mma = tiled_mma.get_slice(cute.make_layout(tile.warpgroups, stride=128)(group))
    fa = tiled_mma.make_fragment_A(thr_mma.partition_A(sa))
    fb = tiled_mma.make_fragment_B(thr_mma.partition_B(sb))
    acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile.m, tile.n)), cutlass.Float32)
    held = plan.epilogue.held(acc)

    consumer = pipeline.PipelineUserType.Consumer
    state = pipeline.make_pipeline_state(consumer, tile.stages)
    done = pipeline.make_pipeline_state(consumer, tile.stages)
    inputs = pipeline.make_pipeline_state(consumer, tile.input_stages)
    in_place = const_expr(tile.in_place and len(plan.epilogue.aux) > 0)
    # In place, the groups are spread over the main loop; a group is given back a stage after its
    # stores, which have left by then, and the next is there when its turn comes.
    k_tiles = schedule.k_tiles * plan.terms
    after_stores = Int32(0)
    before_next = Int32(0)
    if const_expr(in_place):
        spare = k_tiles // plan.groups - STEPS
        if spare > 0:
            after_stores = Int32(1)
        before_next = spare - after_stores
    rest = k_tiles - plan.groups * (STEPS + after_stores + before_next)

    index = Int32(schedule.first)
    problem = Int32(0)
    row = Int32(0)
    column = Int32(0)
    first = Boolean(True)
    while index < tile_count(schedule.grids):
        # The first stage clears the accumulator; plan.steps of them carry the epilogue.
        for step in cutlass.range_constexpr(plan.steps):
            pipe.consumer_wait(state)
            _issue(tiled_mma, acc, fa, fb, state.index, step > 0)
            state.advance()
            if const_expr(step > 0):
                warpgroup.wait_group(1)
                pipe.consumer_release(done)
                done.advance()
            ends_group = const_expr(step % STEPS == STEPS - 1)
            if not first:
                finish_step(plan, finisher, step, held, inputs, problem, row, column)
                if const_expr(ends_group and not in_place):
                    inputs.advance()
            if const_expr(ends_group and in_place):
                for _ in cutlass.range(after_stores, unroll=1):
                    _stage(tiled_mma, pipe, acc, fa, fb, state, done)
                    state.advance()
                    done.advance()
                if not first:
                    release_in_place(finisher, inputs)
                    inputs.advance()
                for _ in cutlass.range(before_next, unroll=1):
                    _stage(tiled_mma, pipe, acc, fa, fb, state, done)
                    state.advance()
                    done.advance()
        for _ in cutlass.range(rest, unroll=1):
            _stage(tiled_mma, pipe, acc, fa, fb, state, done)
            state.advance()
            done.advance()
        warpgroup.wait_group(0)
        pipe.consumer_release(done)
        done.advance()
        plan.epilogue.hold(acc, held, plan.dtype)
        problem, m, n = tile_coordinate(schedule, index, tile.cluster, tile.raster)
        row = m * (tile.m // WARP_ROWS) + warp_index
        column = n * plan.groups
        first = Boolean(False)
        index += schedule.step
    for step in cutlass.range_constexpr(plan.steps):
        finish_step(plan, finisher, step, held, inputs, problem, row, column)
        if const_expr(step % STEPS == STEPS - 1):
            if const_expr(in_place):
                release_in_place(finisher, inputs)
            inputs.advance()
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _stage(tiled_mma, pipe, acc, fa, fb, state, done) -> None:
    """One stage of a main loop; the stage before it goes back to the loading warp."""
    pipe.consumer_wait(state)
    _issue(tiled_mma, acc, fa, fb, state.index, True)
    warpgroup.wait_group(1)
    pipe.consumer_release(done)


@cute.jit
def _issue(tiled_mma, acc, fa, fb, stage, accumulate: cutlass.Constexpr[bool]) -> None:
    """Start the products of one stage, as one wgmma group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(fa, mode=[2])):
        cute.gemm(atom, acc, fa[(None, None, k, stage)], fb[(None, None, k, stage)], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()

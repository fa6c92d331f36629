"""The GEMM: a persistent, warp-specialized main loop that finishes one tile inside the next.

Three warpgroups: in the first, one warp feeds the operand pipeline by TMA and one the epilogue's
inputs; the other two multiply, 64 rows of the tile each. When a tile's accumulator is complete, a
warpgroup moves what the epilogue needs of it to other registers, starts to multiply the next tile
at once, and works the epilogue off in steps of 16 columns between that tile's ``wgmma`` groups.
The tensor cores never wait for an epilogue, as with ping-pong consumers, but both warpgroups share
one B tile, which can be 256 columns wide: fewer bytes from L2 and from shared memory for each
multiplication than ping-pong's 128 x 192, and the GPU is power-limited.

One accumulator can sum several products (``Plan.terms``), and one list of tiles can hold several
problems (``Plan.problems``), so that a launch has one last, thin wave and not one for each.
"""

# The DSL reads a struct's annotations as values.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# A kernel's call is not of its annotated type: it is launched.
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.utils import SmemAllocator, hopper_helpers

from swiglu_jax.kernels.sm90._finish import make_finisher
from swiglu_jax.kernels.sm90._load import load_atom, load_inputs, load_operands
from swiglu_jax.kernels.sm90._multiply import multiply
from swiglu_jax.kernels.sm90._plan import Plan
from swiglu_jax.kernels.sm90._schedule import Schedule, tile_count
from swiglu_jax.kernels.sm90._tile import GROUP_COLUMNS, WARP_ROWS, WARPGROUP_ROWS

SMS = 132
"""Multiprocessors of an H100 or H200 (SXM), one block each. Fewer or more only cost balance."""
LOADER_REGISTERS = 24
MULTIPLIER_REGISTERS = 240
"""setmaxnreg's share of the 65536 for two multiplying warpgroups and the loading one."""
OPERAND_WARP = 0
INPUT_WARP = 1


@dataclass(frozen=True)
class Gemm:
    """The kernel of a plan and its launch."""

    plan: Plan

    @cute.jit
    def __call__(
        self,
        products: cutlass.Constexpr,
        aux: cutlass.Constexpr,
        outputs: cutlass.Constexpr,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on tensors as they are stored.

        Args:
            products: (A, B, ...) of each term or of each problem.
            aux: the epilogue's inputs, [M, N].
            outputs: of each problem, [M, N].
            stream: where to launch.
        """
        plan = self.plan
        tile = plan.tile
        cluster_m, cluster_n = tile.cluster
        loads = []
        for a, *bs in products:
            a_mk = _contraction_last(a, plan.a_mn)
            loads.append([load_atom(plan, cluster_n, a_mk, plan.a_box(), plan.a_slice)])
            for b in bs:
                b_nk = _contraction_last(b, plan.b_mn)
                loads[-1].append(load_atom(plan, cluster_m, b_nk, plan.b_box(), plan.b_slice))
        group = (tile.m, GROUP_COLUMNS)
        aux_tma = [load_atom(plan, 1, t, plan.input_box(), group) for t in aux]
        store = cpasync.CopyBulkTensorTileS2GOp()
        piece = (WARP_ROWS, GROUP_COLUMNS)
        out_tma = [cpasync.make_tiled_tma_atom(store, t, plan.output_box(), piece) for t in outputs]

        grids = []
        for output in outputs[:: len(plan.epilogue.outputs)]:
            m, n = output.shape
            tiles_m = cute.ceil_div(m, tile.m * cluster_m)
            tiles_n = cute.ceil_div(n, plan.part_n * cluster_n)
            grids.append((Int32(tiles_m), Int32(tiles_n)))
        # An epilogue's steps ride on the next tile's stages; a contraction with fewer is extended
        # with the zeros that TMA reads beyond a tensor's end.
        k_tiles = cute.ceil_div(products[0][0].shape[0 if plan.a_mn else 1], tile.k)
        least = plan.steps // plan.terms
        if k_tiles < least:
            k_tiles = least
        clusters = tile_count(grids)
        resident = SMS // (cluster_m * cluster_n)
        if clusters > resident:
            clusters = resident

        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            plan.dtype,
            plan.dtype,
            OperandMajorMode.MN if plan.a_mn else OperandMajorMode.K,
            OperandMajorMode.MN if plan.b_mn else OperandMajorMode.K,
            cutlass.Float32,
            (tile.warpgroups, 1, 1),
            tiler_mn=(WARPGROUP_ROWS, tile.n),
        )
        self.kernel(
            tiled_mma,
            tuple(tuple((t[0], t[1]) for t in product) for product in loads),
            tuple(t[0] for t in aux_tma),
            tuple(t[1] for t in aux_tma),
            tuple(t[0] for t in out_tma),
            tuple(t[1] for t in out_tma),
            tuple(grids),
            Int32(k_tiles),
        ).launch(
            grid=(cluster_m, cluster_n, clusters),
            block=((tile.warpgroups + 1) * 128, 1, 1),
            cluster=(cluster_m, cluster_n, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        products: tuple,
        aux_atoms: tuple,
        aux_tensors: tuple,
        out_atoms: tuple,
        out_tensors: tuple,
        grids: tuple,
        k_tiles: Int32,
    ) -> None:
        """The device side: shared memory and barriers, then one branch for each role."""
        plan = self.plan
        tile = plan.tile
        cluster_m, cluster_n = tile.cluster
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        if warp_index == OPERAND_WARP:
            operand_atoms = [atom for product in products for atom, _ in product]
            for atom in (*operand_atoms, *aux_atoms, *out_atoms):
                cpasync.prefetch_descriptor(atom)

        reads = const_expr(len(aux_atoms) > 0)
        in_place = const_expr(reads and tile.in_place)
        a_layout, b_layout = plan.a_layout(), plan.b_layout()
        out_layout = plan.group_layout(len(plan.epilogue.outputs))
        in_layout = plan.group_layout(max(tile.input_stages * len(aux_atoms), 1))
        in_size = cute.cosize(in_layout) if reads and not in_place else 0

        @cute.struct
        class Shared:
            operand_barriers: cute.struct.MemRange[cutlass.Int64, tile.stages * 2]
            input_barriers: cute.struct.MemRange[cutlass.Int64, tile.input_stages * 2]
            a: cute.struct.Align[cute.struct.MemRange[plan.dtype, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[plan.dtype, cute.cosize(b_layout)], 1024]
            inputs: cute.struct.Align[cute.struct.MemRange[plan.dtype, in_size], 1024]
            out: cute.struct.Align[cute.struct.MemRange[plan.dtype, cute.cosize(out_layout)], 1024]

        shared = SmemAllocator().allocate(Shared)
        warps = tile.warpgroups * 4
        loader = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        # A stage is free when every multiplying warp of every block that it was multicast to, or
        # that multicasts into it, has said so.
        sharers = cluster_m + cluster_n - 1
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.operand_barriers.data_ptr(),
            num_stages=tile.stages,
            producer_group=loader,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, sharers * warps),
            tx_count=plan.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, cluster_m, cluster_n, 1)),
            defer_sync=True,
        )
        input_pipe = None
        if const_expr(reads):
            input_pipe = pipeline.PipelineTmaAsync.create(
                barrier_storage=shared.input_barriers.data_ptr(),
                num_stages=tile.input_stages,
                producer_group=loader,
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warps),
                tx_count=plan.input_bytes,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )
        pipeline.pipeline_init_arrive(cluster_shape_mn=tile.cluster, is_relaxed=True)

        sa = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = shared.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        staged_out = shared.out.get_tensor(out_layout.outer, swizzle=out_layout.inner)
        staged_in = None
        if const_expr(in_place):
            # Output i of a group takes the place of input i.
            staged_in = staged_out
        elif const_expr(reads):
            staged_in = shared.inputs.get_tensor(in_layout.outer, swizzle=in_layout.inner)

        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        _, _, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        schedule = Schedule(cluster, clusters, grids, k_tiles, rank % cluster_m, rank // cluster_m)
        pipeline.pipeline_init_wait(cluster_shape_mn=tile.cluster)

        # One multiplying warpgroup has registers enough without taking the loaders'.
        if warp_index < 4:
            if const_expr(tile.warpgroups > 1):
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp_index == OPERAND_WARP:
                load_operands(plan, schedule, pipe, products, sa, sb)
            if const_expr(reads):  # noqa: SIM102 - one is the compiler's, the other the device's
                if warp_index == INPUT_WARP:
                    load_inputs(plan, schedule, input_pipe, aux_atoms, aux_tensors, staged_in)
        else:
            if const_expr(tile.warpgroups > 1):
                cute.arch.setmaxregister_increase(MULTIPLIER_REGISTERS)
            finisher = make_finisher(
                plan, tiled_mma, thread - 128, warp_index - 4, input_pipe, staged_in, staged_out,
                out_atoms, out_tensors,
            )  # fmt: skip
            multiply(
                plan, schedule, tiled_mma, thread - 128, warp_index - 4, pipe, sa, sb, finisher
            )


def _contraction_last(tensor: cute.Tensor, mn: bool) -> cute.Tensor:
    """An operand as (M or N, K), from how it is stored."""
    if not mn:
        return tensor
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0]))

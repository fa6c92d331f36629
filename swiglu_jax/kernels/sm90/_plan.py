"""A kernel's compile-time facts: tile, epilogue, dtype, layout of B, and what follows from them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum, hopper_helpers

from swiglu_jax.kernels.sm90._epilogue import DownDswiglu, GateUp
from swiglu_jax.kernels.sm90._tile import GROUP_COLUMNS, STEP_COLUMNS, WARP_ROWS, Tile


@dataclass(frozen=True)
class Plan:
    """``epilogue(a @ b^T)`` with a [M, K], K contiguous, and b [N, K] or, if ``b_mn``, [K, N]."""

    tile: Tile
    epilogue: GateUp | DownDswiglu
    dtype: type[cutlass.Numeric]
    b_mn: bool
    """B's N is contiguous (the weight's rows run along the contraction)."""

    @property
    def part_n(self) -> int:
        """Columns of one B operand, and of an output tile."""
        return self.tile.n // self.epilogue.operands

    @property
    def steps(self) -> int:
        """Steps of a tile's epilogue."""
        return self.part_n // STEP_COLUMNS

    @property
    def groups(self) -> int:
        """Groups of columns that a tile's epilogue reads and stores."""
        return self.part_n // GROUP_COLUMNS

    @property
    def stage_bytes(self) -> int:
        """Bytes of one operand stage."""
        return (self.tile.m + self.tile.n) * self.tile.k * self.dtype.width // 8

    @property
    def input_bytes(self) -> int:
        """Bytes of one group of the epilogue's inputs; 0 if it reads none."""
        return len(self.epilogue.aux) * self.tile.m * GROUP_COLUMNS * self.dtype.width // 8

    @property
    def a_slice(self) -> tuple[int, int]:
        """(M, K) of what one block of a cluster loads of A, and multicasts along N."""
        return self.tile.m // self.tile.cluster[1], self.tile.k

    @property
    def b_slice(self) -> tuple[int, int]:
        """(N, K) of what one block of a cluster loads of one B operand, and multicasts along M.

        K-contiguous B is sliced along N, N-contiguous B along K: the 64-element swizzle blocks
        along N would not divide for N = 192.
        """
        peers = self.tile.cluster[0]
        if self.b_mn:
            return self.part_n, self.tile.k // peers
        return self.part_n // peers, self.tile.k

    def a_layout(self) -> cute.ComposedLayout:
        """Shared memory of A, (M, K, stages)."""
        tile = self.tile
        return self._rows(tile.k, (tile.m, tile.k, tile.stages))

    def b_layout(self) -> cute.ComposedLayout:
        """Shared memory of B, (N, K, stages): one operand's N after the other's."""
        tile = self.tile
        shape = (tile.n, tile.k, tile.stages)
        if not self.b_mn:
            return self._rows(tile.k, shape)
        # One operand's N decides the swizzle: 64 elements where they divide it, else 32.
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.COL_MAJOR, self.dtype, self.part_n)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, shape, (1, 0, 2))

    def group_layout(self, count: int) -> cute.ComposedLayout:
        """Shared memory of ``count`` groups of epilogue inputs or outputs, (M, 32, count)."""
        return self._rows(GROUP_COLUMNS, (self.tile.m, GROUP_COLUMNS, count))

    def a_box(self) -> cute.ComposedLayout:
        """Shared memory of ``a_slice``."""
        return self._rows(self.tile.k, self.a_slice)

    def b_box(self) -> cute.ComposedLayout:
        """Shared memory of ``b_slice``, inside a stage of ``b_layout``."""
        n, k = self.b_slice
        if not self.b_mn:
            return self._rows(k, (n, k))
        width = 64 if n % 64 == 0 else 32
        outer = cute.make_layout(
            ((width, n // width), (8, k // 8)),
            stride=((1, width * self.tile.k), (width, width * 8)),
        )
        return cute.make_composed_layout(self.b_layout().inner, 0, outer)

    def input_box(self) -> cute.ComposedLayout:
        """Shared memory of one group of one epilogue input."""
        return self._rows(GROUP_COLUMNS, (self.tile.m, GROUP_COLUMNS))

    def output_box(self) -> cute.ComposedLayout:
        """Shared memory of what one warp stores of one output at once."""
        return self._rows(GROUP_COLUMNS, (WARP_ROWS, GROUP_COLUMNS))

    def _rows(self, width: int, shape: tuple[int, ...]) -> cute.ComposedLayout:
        """Rows of ``width`` contiguous elements, swizzled over 8 rows, one block after another."""
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, width)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, shape, tuple(range(len(shape))))

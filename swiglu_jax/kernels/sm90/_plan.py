"""A kernel's compile-time facts: tile, epilogue, dtype, layouts, and what follows from them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum, hopper_helpers

from swiglu_jax.kernels.sm90._epilogue import DownDswiglu, GateUp, Product
from swiglu_jax.kernels.sm90._tile import GROUP_COLUMNS, STEP_COLUMNS, WARP_ROWS, Tile


@dataclass(frozen=True)
class Plan:
    """``epilogue(a @ b^T)`` with a [M, K] or, if ``a_mn``, [K, M], and b [N, K] or, if ``b_mn``,
    [K, N]; rows are contiguous."""

    tile: Tile
    epilogue: GateUp | DownDswiglu | Product
    dtype: type[cutlass.Numeric]
    b_mn: bool
    """B's N is contiguous: its rows run along the contraction."""
    a_mn: bool = False
    """A's M is contiguous."""
    terms: int = 1
    """Products that one accumulator sums, one after the other."""
    problems: int = 1
    """Products that share one list of tiles, each with an output of its own, all of one K."""

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
        return self._slice(self.tile.m, self.tile.cluster[1], self.a_mn)

    @property
    def b_slice(self) -> tuple[int, int]:
        """(N, K) of what one block of a cluster loads of one B operand, and multicasts along M."""
        return self._slice(self.part_n, self.tile.cluster[0], self.b_mn)

    def a_layout(self) -> cute.ComposedLayout:
        """Shared memory of A, (M, K, stages)."""
        return self._operand(self.tile.m, self.tile.m, self.a_mn)

    def b_layout(self) -> cute.ComposedLayout:
        """Shared memory of B, (N, K, stages): one operand's N after the other's."""
        return self._operand(self.tile.n, self.part_n, self.b_mn)

    def group_layout(self, count: int) -> cute.ComposedLayout:
        """Shared memory of ``count`` groups of epilogue inputs or outputs, (M, 32, count)."""
        return self._rows(GROUP_COLUMNS, (self.tile.m, GROUP_COLUMNS, count))

    def a_box(self) -> cute.ComposedLayout:
        """Shared memory of ``a_slice``, inside a stage of ``a_layout``."""
        return self._box(self.a_slice, self.a_layout(), self.a_mn)

    def b_box(self) -> cute.ComposedLayout:
        """Shared memory of ``b_slice``, inside a stage of ``b_layout``."""
        return self._box(self.b_slice, self.b_layout(), self.b_mn)

    def input_box(self) -> cute.ComposedLayout:
        """Shared memory of one group of one epilogue input."""
        return self._rows(GROUP_COLUMNS, (self.tile.m, GROUP_COLUMNS))

    def output_box(self) -> cute.ComposedLayout:
        """Shared memory of what one warp stores of one output at once."""
        return self._rows(GROUP_COLUMNS, (WARP_ROWS, GROUP_COLUMNS))

    def _slice(self, rows: int, peers: int, mn: bool) -> tuple[int, int]:
        """(M or N, K) of one block's share of an operand tile of ``rows``.

        K-contiguous operands are sliced along M or N, the others along K: the 64-element swizzle
        blocks along N would not divide for N = 192.
        """
        return (rows, self.tile.k // peers) if mn else (rows // peers, self.tile.k)

    def _operand(self, rows: int, part: int, mn: bool) -> cute.ComposedLayout:
        """Shared memory of ``rows`` of an operand, those of one tensor being ``part``."""
        shape = (rows, self.tile.k, self.tile.stages)
        if not mn:
            return self._rows(self.tile.k, shape)
        # The rows of one tensor decide the swizzle: 64 elements where they divide it, else 32.
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.COL_MAJOR, self.dtype, part)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, shape, (1, 0, 2))

    def _box(
        self, shape: tuple[int, int], stages: cute.ComposedLayout, mn: bool
    ) -> cute.ComposedLayout:
        """Shared memory of a slice (M or N, K) inside a stage of ``stages``."""
        rows, k = shape
        if not mn:
            return self._rows(k, shape)
        width = 64 if rows % 64 == 0 else 32
        outer = cute.make_layout(
            ((width, rows // width), (8, k // 8)),
            stride=((1, width * self.tile.k), (width, width * 8)),
        )
        return cute.make_composed_layout(stages.inner, 0, outer)

    def _rows(self, width: int, shape: tuple[int, ...]) -> cute.ComposedLayout:
        """Rows of ``width`` contiguous elements, swizzled over 8 rows, one block after another."""
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, width)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, shape, tuple(range(len(shape))))

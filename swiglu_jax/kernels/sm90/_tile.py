"""What a kernel's author chooses: the shape of a tile, its pipeline, its cluster and its raster."""

from dataclasses import dataclass

GROUP_COLUMNS = 32
"""Columns of an output that are stored at once: rows of 64 bytes, one 64-byte swizzle."""
STEP_COLUMNS = 16
"""Columns that one ``stmatrix.x4`` writes: what an epilogue works off at once."""
STEPS = GROUP_COLUMNS // STEP_COLUMNS
"""Steps of a group."""
WARPGROUP_ROWS = 64
"""Rows of a tile that one warpgroup multiplies."""
WARP_ROWS = 16
"""Rows that one warp of it holds, and stores."""


@dataclass(frozen=True)
class Tile:
    """One thread block's tile and how it is fed. Rows and columns are in elements."""

    n: int
    """Columns of the accumulator. gate_up splits them into n / 2 of gate and n / 2 of up."""
    stages: int
    """Operand tiles in flight."""
    m: int = 128
    """Rows: 128 for two multiplying warpgroups, 64 for one."""
    k: int = 64
    """Depth of one stage: 128 bytes, one swizzle."""
    cluster: tuple[int, int] = (2, 1)
    """Thread blocks of a cluster along (M, N); they multicast the operand tiles they share."""
    raster: int = 8
    """Clusters along M that are walked before the next column of tiles: keeps L2 warm."""
    in_place: bool = False
    """How an epilogue that reads inputs stages them.

    True: outputs are written over one staged group of inputs. It leaves room for one more operand
    stage, but a group waits for the one before it, so the groups are spread over the main loop:
    for contractions of 2048 and more.
    False: two groups of inputs in flight, outputs beside them, the epilogue at the main loop's
    start: for short contractions.
    """

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply, all on one tile."""
        return self.m // WARPGROUP_ROWS

    @property
    def input_stages(self) -> int:
        """Groups of epilogue inputs in flight."""
        return 1 if self.in_place else 2

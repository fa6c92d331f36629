"""Which tile comes next: a static persistent schedule, rastered in groups of rows."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Schedule(NamedTuple):
    """A thread block's place in the schedule: cluster tiles first, first + step, ... below total.

    ``rank`` is the block's place (M, N) in its cluster, ``k_tiles`` the stages of one tile.
    """

    first: Int32
    step: Int32
    tiles_m: Int32
    tiles_n: Int32
    k_tiles: Int32
    rank_m: Int32
    rank_n: Int32


@cute.jit
def tile_coordinate(
    schedule: Schedule, index: Int32, cluster: cutlass.Constexpr, raster: cutlass.Constexpr
):
    """Coordinate (m, n), in tiles of one block, of the ``index``-th cluster tile.

    Groups of ``raster`` rows of cluster tiles are walked along N; inside a group, M runs fastest.
    A wave of all clusters then covers a nearly square part of the output, which needs the fewest
    operand bytes.
    """
    per_group = schedule.tiles_n * raster
    first = index // per_group * raster
    rest = index % per_group
    rows = schedule.tiles_m - first
    if rows > raster:
        rows = Int32(raster)
    m = (first + rest % rows) * cluster[0] + schedule.rank_m
    n = rest // rows * cluster[1] + schedule.rank_n
    return m, n

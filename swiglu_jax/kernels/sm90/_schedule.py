"""Which tile comes next: a static persistent schedule, rastered in groups of rows."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Schedule(NamedTuple):
    """A thread block's place in the schedule: cluster tiles first, first + step, ... below total.

    ``grids`` has the cluster tiles (M, N) of each problem, whose tiles follow each other in one
    list; ``k_tiles`` the stages of one term of a tile; ``rank`` is the block's place (M, N) in its
    cluster.
    """

    first: Int32
    step: Int32
    grids: Any
    k_tiles: Int32
    rank_m: Int32
    rank_n: Int32


@cute.jit
def tile_count(grids: cutlass.Constexpr):
    """Cluster tiles of all problems."""
    total = grids[0][0] * grids[0][1]
    for p in cutlass.range_constexpr(1, len(grids)):
        total += grids[p][0] * grids[p][1]
    return total


@cute.jit
def tile_coordinate(
    schedule: Schedule, index: Int32, cluster: cutlass.Constexpr, raster: cutlass.Constexpr
):
    """Problem of the ``index``-th cluster tile, and its coordinate (m, n) in tiles of one block.

    Groups of ``raster`` rows of cluster tiles are walked along N; inside a group, M runs fastest.
    A wave of all clusters then covers a nearly square part of the output, which needs the fewest
    operand bytes.
    """
    problem = Int32(0)
    tiles_m, tiles_n = schedule.grids[0]
    start = Int32(0)
    end = Int32(0)
    for p in cutlass.range_constexpr(1, len(schedule.grids)):
        end += schedule.grids[p - 1][0] * schedule.grids[p - 1][1]
        if index >= end:
            problem = Int32(p)
            start = end
            tiles_m = schedule.grids[p][0]
            tiles_n = schedule.grids[p][1]
    index -= start
    per_group = tiles_n * raster
    first = index // per_group * raster
    rest = index % per_group
    rows = tiles_m - first
    if rows > raster:
        rows = Int32(raster)
    m = (first + rest % rows) * cluster[0] + schedule.rank_m
    n = rest // rows * cluster[1] + schedule.rank_n
    return problem, m, n

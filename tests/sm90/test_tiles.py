"""Every shipped tile fits a multiprocessor, and every kernel names a tile that is there."""

import pytest

from swiglu_jax.kernels.sm90 import variants
from swiglu_jax.kernels.sm90._tile import (
    GROUP_COLUMNS,
    STEP_COLUMNS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    Tile,
)
from swiglu_jax.kernels.sm90._tiles import TILES
from swiglu_jax.kernels.sm90._variants import OUTPUTS, label_of, preferred_tiles

SHARED_MEMORY = 232448
"""Bytes a block can use on SM90: 227 KiB (CUDA programming guide, compute capability 9.0)."""
REGISTERS = 65536
EPILOGUE_REGISTERS = 32
"""What an epilogue step needs beside accumulator and held values, at the least."""
GRADIENTS = ("input_gradient", "weight_gradients")
"""Stages with one output a tile."""
ALL = [(stage, label, tile) for stage, tiles in TILES.items() for label, tile in tiles.items()]
IDS = [f"{stage}_{label}" for stage, label, _ in ALL]


def bytes_of(stage: str, tile: Tile) -> int:
    """Shared memory with the widest set of outputs, each part on its 1024-byte boundary."""
    operands = tile.stages * (tile.m + tile.n) * tile.k * 2
    group = tile.m * GROUP_COLUMNS * 2
    inputs = 2 * tile.input_stages * group if stage == "down_dswiglu" and not tile.in_place else 0
    staged = 1 if stage in GRADIENTS else len(OUTPUTS[stage][-1])
    return 1024 + operands + inputs + staged * group


@pytest.mark.parametrize(("stage", "label", "tile"), ALL, ids=IDS)
def test_shared_memory(stage: str, label: str, tile: Tile) -> None:
    assert bytes_of(stage, tile) <= SHARED_MEMORY


@pytest.mark.parametrize(("stage", "label", "tile"), ALL, ids=IDS)
def test_registers(stage: str, label: str, tile: Tile) -> None:
    accumulator = WARPGROUP_ROWS * tile.n // 128
    held = accumulator if stage == "down_dswiglu" else accumulator // 2
    assert accumulator + held + EPILOGUE_REGISTERS <= 240
    if tile.warpgroups == 2:
        assert REGISTERS >= 128 * 24 + 256 * 240


@pytest.mark.parametrize(("stage", "label", "tile"), ALL, ids=IDS)
def test_divides(stage: str, label: str, tile: Tile) -> None:
    part = tile.n // (2 if stage == "gate_up" else 1)
    assert tile.n <= 256 and tile.n % 8 == 0, "one wgmma instruction spans N"
    assert part % GROUP_COLUMNS == 0 and GROUP_COLUMNS % STEP_COLUMNS == 0
    assert tile.m % WARPGROUP_ROWS == 0 and WARPGROUP_ROWS == 4 * WARP_ROWS
    # What one block loads of K-contiguous B is whole swizzle atoms of 8 rows.
    assert part // tile.cluster[0] % 8 == 0 and tile.m // tile.cluster[1] % 8 == 0


def test_names() -> None:
    found = variants()
    assert len({variant.name for variant in found}) == len(found)
    for variant in found:
        tile = TILES[variant.stage][label_of(variant)]
        operands = 2 if variant.stage == "gate_up" else 1
        assert variant.tile == (tile.m, tile.n // operands, tile.k)
        assert variant.cluster == tile.cluster
        assert variant.outputs in OUTPUTS[variant.stage]


def test_everything_is_served() -> None:
    """Each stage's outputs, in both layouts and dtypes; fused stages for large and for small M."""
    served = {(v.stage, v.outputs, v.weight_layout, v.dtype, v.tile[0]) for v in variants()}
    for stage, outputs in OUTPUTS.items():
        for layout in ("OI", "IO"):
            for dtype in ("bfloat16", "float16"):
                for rows in (128,) if stage in GRADIENTS else (64, 128):
                    for some in outputs:
                        assert (stage, some, layout, dtype, rows) in served


@pytest.mark.parametrize("stage", sorted(set(TILES) - set(GRADIENTS)))
@pytest.mark.parametrize("m", [1, 64, 65, 128, 512, 513, 32768])
@pytest.mark.parametrize("h", [8, 1024, 8192])
def test_preference(stage: str, m: int, h: int) -> None:
    order = preferred_tiles(stage, m, h)
    assert sorted(order) == sorted(TILES[stage])
    first = TILES[stage][order[0]]
    # No block of a cluster is left without rows, and no tile is mostly empty.
    assert first.m * first.cluster[0] < 2 * max(m, 64)
    assert not (first.in_place and h < 1024)


@pytest.mark.parametrize("stage", GRADIENTS)
@pytest.mark.parametrize(("h", "i"), [(5120, 17408), (2048, 8192), (1024, 3072), (8, 8)])
def test_preference_for_gradients(stage: str, h: int, i: int) -> None:
    """Small tiles only where a wave of large ones would cover a whole gradient and idle."""
    order = preferred_tiles(stage, 8192, h, i)
    assert sorted(order) == sorted(TILES[stage])
    few = stage == "weight_gradients" and h * i <= 1024 * 3072
    assert order[0] == ("medium" if few else "large")
    assert preferred_tiles(stage, 8192, h)[0] == "large"

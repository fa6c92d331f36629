"""What the SM100 kernels' entries ask of the driver, call by call, through the shipped handlers.

The launcher and the entries run for real, over a driver that records: the launch and the tensor
maps must be those that the problem calls for.
"""

from collections.abc import Callable

import numpy as np
import pytest
from exported_recorder import (
    STREAM,
    Buffer,
    Recording,
    TensorMap,
    buffers_of,
    integer,
)

from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant

KERNELS = [k.variant for k in _manifest.installed().kernels if k.variant.abi == "frost"]
BFLOAT16, FLOAT16 = 9, 6  # CU_TENSOR_MAP_DATA_TYPE_*
SWIZZLE_64B, SWIZZLE_128B = 2, 3
EPILOGUE_COLUMNS = 32
SHARED_LIMIT = 232448

SHAPES = [
    ((8192,), 5120, 17408),  # the published shape
    ((1,), 8, 16),  # the smallest
    ((128,), 64, 256),  # whole tiles, one of each
    ((3, 43), 72, 208),  # ragged in M, H and I, rank 3
    ((2, 1, 257), 4104, 14352),  # ragged, one row and 16 columns beyond whole tiles, rank 4
    ((65536,), 1024, 40960),  # M * I over 2^31
]


def expected_grid(variant: KernelVariant, m: int, i: int) -> tuple[int, int, int]:
    """A CTA has a tile of the output; CTAs come in whole clusters along M."""
    tile_m, tile_n, _ = variant.tile
    clusters = -(-m // (tile_m * variant.cluster[0]))
    return clusters * variant.cluster[0], -(-i // tile_n), 1


def check_map(
    found: TensorMap, buffer: Buffer, rows: int, columns: int, box: tuple[int, int], swizzle: int
) -> None:
    """A tensor map over a whole row-major matrix; box: (columns, rows)."""
    assert found.address == buffer.data
    assert found.dtype == {"bfloat16": BFLOAT16, "float16": FLOAT16}[buffer.dtype]
    assert found.sizes == (columns, rows, 1)
    assert found.strides[:2] == (2, 2 * columns)
    assert found.box == (*box, 1)
    assert found.swizzle == swizzle
    assert (found.steps, found.interleave, found.fill) == ((1, 1, 1), 0, 0)


def check(
    recording: Recording, variant: KernelVariant, operands: list[Buffer], results: list[Buffer]
) -> None:
    """One launch, with everything that the problem calls for."""
    launch = recording.launch
    m, h = int(np.prod(operands[0].dims[:-1])), operands[0].dims[-1]
    i = results[0].dims[-1]
    tile_m, tile_n, tile_k = variant.tile
    assert launch.grid == expected_grid(variant, m, i)
    assert launch.cluster == (*variant.cluster, 1)
    assert launch.block == (256, 1, 1)
    # Two stages at least, of A and of what each CTA loads of every B.
    weights = 2 if variant.stage == "gate_up" else 1
    stage = 2 * tile_k * (tile_m + weights * tile_n // variant.ctas)
    assert 2 * stage < launch.shared <= SHARED_LIMIT
    assert launch.stream == STREAM
    assert launch.loaded, "the kernel was not loaded before its launch"
    cta_group = f"_{tile_m}x{tile_n}x{2 * tile_k}_" in launch.kernel
    assert cta_group and f"_{variant.ctas}ctamma" in launch.kernel

    maps = [p for p in launch.parameters if isinstance(p, TensorMap)]
    assert maps == recording.maps, "each tensor map is encoded once and handed to the kernel"
    check_map(maps[0], operands[0], m, h, (tile_k, tile_m), SWIZZLE_128B)
    hidden_first = (variant.stage == "gate_up") == (variant.weight_layout == "OI")
    for found, weight in zip(maps[1 : 1 + weights], operands[1 : 1 + weights], strict=True):
        rows, columns = (i, h) if hidden_first else (h, i)
        # A pair of CTAs shares B: each loads half of the tile's columns.
        box = (tile_k, tile_n // variant.ctas) if hidden_first else (64, tile_k)
        check_map(found, weight, rows, columns, box, SWIZZLE_128B)
    by_name = {buffer.name.removeprefix("result "): buffer for buffer in results}
    order = variant.entry_outputs or variant.outputs
    for found, name in zip(maps[1 + weights :], order, strict=True):
        box = (EPILOGUE_COLUMNS, tile_m)
        check_map(found, by_name[name], m, i, box, SWIZZLE_64B)

    others = [p for p in launch.parameters if not isinstance(p, TensorMap)]
    assert [integer(p) for p in others[:3]] == [m, i, h]
    # gate and up travel as tensors: address, sizes and the pitch, which must be I.
    tensors = [p for p in others[3:] if len(p) > 8]
    residuals = operands[2:] if variant.stage == "down_dswiglu" else []
    assert len(tensors) == len(residuals)
    for parameter, buffer in zip(tensors, residuals, strict=True):
        words = np.frombuffer(parameter, np.int64)
        assert words.tolist() == [buffer.data, m, i, m * i, i]
    # Then the strides (m, n, l) of every output.
    strides = [integer(p) for p in others[3:] if len(p) == 8]
    assert strides == [i, 1, m * i] * len(results)


@pytest.mark.parametrize("variant", KERNELS, ids=lambda v: v.name)
def test_a_launch_is_what_the_problem_calls_for(
    recorder_of: Callable, variant: KernelVariant
) -> None:
    recorder = recorder_of(variant.arch)
    for lead, h, i in SHAPES:
        operands, results = buffers_of(variant, lead, h, i)
        check(recorder.call(variant, operands, results), variant, operands, results)


@pytest.mark.parametrize("variant", KERNELS[::7], ids=lambda v: v.name)
def test_random_problems(
    recorder_of: Callable, rng: np.random.Generator, variant: KernelVariant
) -> None:
    recorder = recorder_of(variant.arch)
    for _ in range(8):
        lead = tuple(int(n) for n in rng.integers(1, 60, size=rng.integers(1, 4)))
        h, i = (int(n) for n in (8, 16) * rng.integers(1, 3000, size=2))
        operands, results = buffers_of(variant, lead, h, i)
        check(recorder.call(variant, operands, results), variant, operands, results)


def test_every_variant_is_shipped() -> None:
    """Both stages, layouts and dtypes, and each set of outputs that the residual table asks for."""
    from swiglu_jax.kernels import sm100  # noqa: PLC0415

    shipped = {kernel.variant for kernel in _manifest.installed().kernels}
    assert set(sm100.variants()) <= shipped
    for outputs in (("dup",), ("dgate", "dup"), ("dgate", "dup", "h")):
        for layout in ("OI", "IO"):
            for dtype in ("bfloat16", "float16"):
                assert {
                    v.ctas
                    for v in shipped
                    if (v.arch, v.outputs, v.weight_layout, v.dtype)
                    == ("sm_100a", outputs, layout, dtype)
                } >= {1, 2}

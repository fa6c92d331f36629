"""What the kernels of input_gradient and weight_gradients ask of the driver, and what is refused.

Tensor maps and launches are checked against the tile that the variant names: a map's box and
swizzle are what the kernel's shared-memory layouts and wgmma descriptors assume. These kernels pack
their own maps, in the form that the driver gives them: ``read_map`` reads them back.
"""

import dataclasses
import struct
from collections.abc import Callable
from math import ceil, prod

import pytest
from exported_recorder import Buffer, Recorder, Recording, buffers_of, integer
from stage_shapes import stage_shapes

from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90._tile import GROUP_COLUMNS, WARP_ROWS

STAGES = ("input_gradient", "weight_gradients")
BY_NAME = {kernel.variant.name: kernel.variant for kernel in _manifest.installed().kernels}
KERNELS = [variant for variant in BY_NAME.values() if variant.stage in STAGES]
INPUT = BY_NAME["sm90_input_gradient_x_large_oi_bf16"]
WEIGHTS = BY_NAME["sm90_weight_gradients_w_gate_w_up_w_down_large_oi_bf16"]
DOWN = BY_NAME["sm90_weight_gradients_w_down_large_io_bf16"]
SHAPES = [((8192,), 5120, 17408), ((3, 43), 72, 208), ((1,), 8, 8), ((2, 1500), 1032, 3080)]
CLUSTERS = 66


@pytest.fixture
def recorder(recorder_of: Callable) -> Recorder:
    return recorder_of("sm_90a")


def boxes_of(variant: KernelVariant) -> tuple[tuple[int, int], tuple[int, int]]:
    """(columns, rows) of the boxes that load A and B, columns being the contiguous dimension.

    Operands whose rows run along the contraction come in blocks of 64 columns, B's cut along the
    contraction by the cluster; the others in rows of one stage's depth.
    """
    m, n, k = variant.tile
    peers = variant.cluster[0]
    a = (k, m) if variant.stage == "input_gradient" else (64, k)
    # For input_gradient B [N, K] is the weight as "IO" stores it.
    plain_rows = variant.stage == "input_gradient" and variant.weight_layout == "IO"
    return a, (k, n // peers) if plain_rows else (64, k // peers)


def products_of(variant: KernelVariant) -> list[tuple[str, str]]:
    """(A, B) of every product, by the operands' names."""
    if variant.stage == "input_gradient":
        return [("dgate", "w_gate"), ("dup", "w_up")]
    pairs = {"w_gate": ("dgate", "x"), "w_up": ("dup", "x"), "w_down": ("dy", "h")}
    oi = variant.weight_layout == "OI"
    return [pairs[name] if oi else pairs[name][::-1] for name in variant.outputs]


@pytest.mark.parametrize("variant", KERNELS, ids=lambda v: v.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_maps_and_grid(recorder: Recorder, variant: KernelVariant, shape: tuple) -> None:
    lead, h, i = shape
    operands, results = buffers_of(variant, lead, h, i)
    recording = recorder.call(variant, operands, results)
    launch = recording.launch
    buffers = {buffer.name: buffer for buffer in [*operands, *results]}

    def expected(name: str, box: tuple[int, int]) -> Map:
        *rows, columns = buffers[name].dims
        kind = "result" if name.startswith("result") else "operand"
        flags = proven_flags(recorder, kind, prod(rows), columns, variant.dtype)
        return Map(buffers[name].data, prod(rows), columns, box, flags)

    # Each product's A before its B, in the order of the products, then the outputs.
    boxes = boxes_of(variant)
    pairs = products_of(variant)
    loads = [expected(*each) for pair in pairs for each in zip(pair, boxes, strict=True)]
    stores = [expected(result.name, (GROUP_COLUMNS, WARP_ROWS)) for result in results]
    assert maps_of(recording) == loads + stores

    tile_m, tile_n = (variant.tile[d] * variant.cluster[d] for d in (0, 1))
    grids = [(ceil(prod(r.dims[:-1]) / tile_m), ceil(r.dims[-1] / tile_n)) for r in results]
    assert launch.grid == (*variant.cluster, min(sum(m * n for m, n in grids), CLUSTERS))
    assert launch.cluster == (*variant.cluster, 1) and launch.block == (384, 1, 1)
    *sizes, k_tiles = (integer(p) for p in launch.parameters if len(p) == 4)
    assert sizes == [size for grid in grids for size in grid]
    # A tile has a stage for each step of 16 columns of its epilogue, half of them in each of dx's
    # two terms.
    terms, contraction = (2, i) if variant.stage == "input_gradient" else (1, prod(lead))
    assert k_tiles == max(ceil(contraction / variant.tile[2]), variant.tile[1] // 16 // terms)


@dataclasses.dataclass(frozen=True)
class Map:
    """A map over a row-major matrix of 2-byte elements."""

    address: int
    rows: int
    columns: int
    box: tuple[int, int]
    """Columns and rows."""
    flags: int
    """Element type, swizzle, fill and whatever else is no size."""


def proven_flags(recorder: Recorder, kind: str, rows: int, columns: int, dtype: str) -> int:
    """Flags of a matrix of that size as gate_up, which is right on a GPU, reads and writes it.

    Its x comes in rows of 64 elements in a 128-byte swizzle, its h goes in rows of 32 in 64 bytes.
    """
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    known = recorder.run(BY_NAME[f"sm90_gate_up_h_large_io_{short}"], (rows,), columns, columns)
    return maps_of(known)[0 if kind == "operand" else -1].flags


def maps_of(recording: Recording) -> list[Map]:
    return [read_map(p) for p in recording.launch.parameters if len(p) == 128]


def read_map(raw: bytes) -> Map:
    """The form of a CUtensorMap on SM90, which no document gives: the fields of a 2-D one.

    Where they are was read off maps of known sizes; sizes and boxes are stored less one, the row
    pitch in 16 bytes. What is behind the first 64 bytes is not read by the GPU.
    """
    address, flags, pitch = struct.unpack_from("<QII", raw)
    columns, rows = (size + 1 for size in struct.unpack_from("<II", raw, 32))
    assert 16 * pitch == 2 * columns
    assert not any(raw[16:32]) and not any(raw[40:55]) and not any(raw[57:64])
    return Map(address, rows, columns, (raw[55] + 1, raw[56] + 1), flags)


def test_nothing_to_write_is_a_success_that_launches_nothing(recorder: Recorder) -> None:
    for variant, lead, h, i in ((INPUT, (0,), 64, 128), (INPUT, (4, 0), 64, 128),
                                (WEIGHTS, (64,), 0, 128), (WEIGHTS, (64,), 64, 0)):  # fmt: skip
        for stage in ("initialize", "execute"):
            empty = recorder.run(variant, lead, h, i, stage=stage)
            assert (empty.error, empty.launches, empty.maps) == ("", [], [])


@pytest.mark.parametrize(("variant", "lead", "h", "i", "said"), [
    (WEIGHTS, (0,), 64, 128, "M: expected 1 to"),
    (DOWN, (3, 0), 64, 128, "M: expected 1 to"),
    (INPUT, (64,), 64, 0, "I: expected 1 to"),
    (WEIGHTS, (64,), 60, 128, "H: expected a multiple of 8"),
    (INPUT, (64,), 64, 100, "I: expected a multiple of 8"),
])  # fmt: skip
def test_sizes_that_no_kernel_serves_are_refused(
    recorder: Recorder, variant: KernelVariant, lead: tuple, h: int, i: int, said: str
) -> None:
    """Zeros are the right result where the contraction is empty; nobody writes them here."""
    refused = recorder.run(variant, lead, h, i)
    assert not refused.launches and said in refused.error, refused.error


@pytest.mark.parametrize("variant", [INPUT, WEIGHTS, DOWN], ids=lambda v: v.name)
def test_wrong_buffers_are_refused(recorder: Recorder, variant: KernelVariant) -> None:
    operands, results = buffers_of(variant, (3, 100), 136, 208)
    buffers = [*operands, *results]
    for k, buffer in enumerate(buffers):
        *lead, last = buffer.dims
        changes: list[tuple[dict, str]] = [
            ({"dims": (*lead, last + 8)}, "expected"),
            ({"dims": (*lead[:-1], lead[-1] + 8, last)}, "expected"),
            ({"dtype": "float32"}, "expected"),
            ({"dtype": "float16"}, "dtype"),
            ({"data": 0}, "multiple of 16"),
            ({"data": buffer.data + 8}, "multiple of 16"),
        ]
        for change, said in changes:
            changed = [*buffers]
            changed[k] = dataclasses.replace(buffer, **change)
            refused = recorder.call(variant, changed[: len(operands)], changed[len(operands) :])
            assert not refused.launches and said in refused.error, (buffer, change, refused.error)
    for wrong in ((operands[1:], results), ([*operands, operands[0]], results), (operands, [])):
        refused = recorder.call(variant, *wrong)
        assert not refused.launches and "expected" in refused.error
    assert recorder.call(variant, operands, results).launch


@pytest.mark.parametrize(("variant", "changes", "said"), [
    (INPUT, {"kernel": WEIGHTS.name}, "another stage"),
    (WEIGHTS, {"kernel": INPUT.name}, "another stage"),
    (INPUT, {"outputs": 2}, "attribute outputs"),
    (WEIGHTS, {"outputs": 8}, "attribute outputs"),
    (WEIGHTS, {"kernel": DOWN.name}, "attribute outputs"),
    (WEIGHTS, {"kernel": WEIGHTS.name.replace("_oi_", "_io_")}, "attribute weight_layout"),
    (INPUT, {"kernel": INPUT.name.replace("_bf16", "_f16")}, "dtype"),
])  # fmt: skip
def test_attributes_that_do_not_fit_are_refused(
    recorder: Recorder, variant: KernelVariant, changes: dict, said: str
) -> None:
    refused = recorder.run(variant, (3, 100), 136, 208, **changes)
    assert not refused.launches and said in refused.error, refused.error


def test_the_operands_of_a_stage() -> None:
    """The contract's order, which the lowering and the handlers share."""

    def names(variant: KernelVariant) -> tuple[str, ...]:
        return tuple(stage_shapes(variant, (4,), 8, 16)[0])

    assert names(INPUT) == ("dgate", "dup", "w_gate", "w_up")
    assert names(WEIGHTS) == ("x", "dgate", "dup", "h", "dy")
    assert names(DOWN) == ("h", "dy")


def test_a_gradient_may_carry_scratch(recorder: Recorder) -> None:
    operands, results = buffers_of(DOWN, (64,), 128, 256)
    scratch = Buffer("scratch", (64,), 1 << 20, "uint8")
    assert recorder.call(DOWN, operands, [*results, scratch]).launch

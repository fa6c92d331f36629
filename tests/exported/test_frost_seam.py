"""What the SM100 recipe leans on: fails loudly when a new FROST or DSL moves it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiglu_jax.kernels import sm100, sm120
from swiglu_jax.kernels.sm100 import _device, _seam
from swiglu_jax.kernels.sm100._pitch import PLACEHOLDER, Shape, read_pitch_from_problem
from swiglu_jax.kernels.sm100._seam import SeamMoved

HERE = Path(__file__).parent
NAMES = [v.name for v in sm100.variants() if v.arch == "sm_100a" and v.dtype == "bfloat16"]
ALIGNED = Shape(9216, 5632, 17408)
"""Sizes with many factors of two, and no other number of the source, as `_pitch` demands."""
OTHER = Shape(333, 4104, 14352)


def render(shape: Shape, names: list[str] = NAMES) -> dict[str, Any]:
    sizes = [str(size) for size in (shape.m, shape.h, shape.i)]
    done = subprocess.run(
        [sys.executable, str(HERE / "frost_source.py"), *sizes, *names],
        capture_output=True, text=True, cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def placeholder() -> dict[str, Any]:
    return render(PLACEHOLDER)


@pytest.fixture(scope="module")
def aligned() -> dict[str, Any]:
    return render(ALIGNED)


def test_the_pinned_versions_are_installed() -> None:
    _seam.check_versions()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_seam.PINNED, "nvidia-cudnn-frontend", "1.31.0")
    with pytest.raises(SeamMoved, match=r"nvidia-cudnn-frontend is .*, the recipe knows 1\.31\.0"):
        _seam.check_versions()


def test_one_source_serves_every_shape(placeholder: dict, aligned: dict) -> None:
    """Rewritten, the sources of two shapes are the same text; as generated they are not."""
    other = render(OTHER)
    for name in NAMES:
        rewritten = placeholder[name]["rewritten"]
        assert rewritten == aligned[name]["rewritten"] == other[name]["rewritten"], name
        as_generated = {shape[name]["source"] for shape in (placeholder, aligned, other)}
        assert len(as_generated) == (3 if "down_dswiglu" in name else 1), name


def test_one_source_of_the_sm120_family_serves_every_shape() -> None:
    names = [v.name for v in sm120.variants()]
    placeholder, aligned = render(PLACEHOLDER, names), render(ALIGNED, names)
    for name in names:
        rewritten = placeholder[name]["rewritten"]
        assert rewritten == aligned[name]["rewritten"], name
        moved = aligned[name]["source"] != rewritten
        assert moved == ("down_dswiglu" in name)
        assert rewritten.count("cutlass.Int64(row) * N + col_j)") >= 2 * moved


def test_only_the_pitch_is_rewritten(aligned: dict) -> None:
    for name in NAMES:
        before = aligned[name]["source"].splitlines()
        after = aligned[name]["rewritten"].splitlines()
        assert len(before) == len(after)
        changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        assert len(changed) == 3 * len(aligned[name]["auxiliaries"]), name
        for old, new in changed:
            pattern = r"stride=\(.*?\)" if "make_fake_tensor" in old else r" \* (17408|N) "
            assert re.sub(pattern, "", old) == re.sub(pattern.replace(".*?", ".*"), "", new) or (
                re.sub(r"stride=.*", "", old) == re.sub(r"stride=.*", "", new)
            )


def test_the_product_of_row_and_pitch_has_64_bits(aligned: dict) -> None:
    source = aligned["sm100_down_dswiglu_dgate_dup_h_128x256_2cta_oi_bf16"]["rewritten"]
    assert "    n: cutlass.Int64,\n" in source and "    N = n\n" in source
    assert source.count("_ptr + row * N + col_j)") == 2
    assert source.count(" * N + _auxc_") == 2


BREAKAGES = {
    "a literal moves": (r"row \* 17408 \+ col_j", "col_j + row * 17408"),
    "another use of the pitch": (r"(    N = n\n)", r"\1    pitch = 17408\n"),
    "a load is added": (r"(\n +_auxv_gate = \(_aux_gate_ptr.*)", r"\1\1"),
    "N becomes 32 bits": (r"    n: cutlass.Int64,", "    n: cutlass.Int32,"),
    "N is something else": (r"    N = n\n", "    N = n // 2\n"),
    "the symbol changes": (r"sym_n = cute.sym_int64\(", "sym_n = cute.sym_int32("),
    "the alignment changes": (r"17408, 1\), assumed_align=32", "17408, 1), assumed_align=16"),
    "the width is baked in": (r"(    M = m\n)", r"\1    width = 5632\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", BREAKAGES)
def test_a_source_that_has_moved_is_refused(aligned: dict, case: str) -> None:
    generated = aligned["sm100_down_dswiglu_dgate_dup_h_128x256_2cta_oi_bf16"]
    auxiliaries = tuple(generated["auxiliaries"])
    assert read_pitch_from_problem(generated["source"], auxiliaries, ALIGNED)
    pattern, replacement = BREAKAGES[case]
    moved, count = re.subn(pattern, replacement, generated["source"], count=1)
    assert count == 1 and moved != generated["source"]
    with pytest.raises(SeamMoved):
        read_pitch_from_problem(moved, auxiliaries, ALIGNED)


def test_gate_and_up_are_rounded_before_the_activation(aligned: dict) -> None:
    """Every route rounds them to the tensors' dtype first; here the source must say so."""
    source = aligned["sm100_gate_up_h_128x256_1cta_oi_bf16"]["source"]
    assert "_r_mm = (vec_f32).to(cutlass.BFloat16)" in source
    assert "_r_mm1 = (vec_f32_1).to(cutlass.BFloat16)" in source
    uses = re.findall(r"\b(vec_f32(?:_1)?)\b(?! = )", source.split("_r_mm1 = ")[1])
    assert uses == ["vec_f32_1"], "an accumulator is used beyond its rounding"


@pytest.mark.parametrize("name", [n for n in NAMES if "down_dswiglu" in n])
def test_gate_and_up_are_read_before_what_may_take_their_memory(aligned: dict, name: str) -> None:
    """All that a block reads of some columns it reads before it stores any of them.

    A thread stages an output in shared memory once it has computed it; behind a barrier of all that
    stage, one thread stores what they staged. So it is enough that each thread's reads come first,
    and that it reads nothing but its own row of the columns that are stored.
    """
    source = aligned[name]["rewritten"]
    (part,) = re.findall(r"( +for subtile_idx in .*?)# @@EPILOGUE_DRAIN:END@@", source, re.S)
    reads = [m.start() for m in re.finditer(r"\(_aux_\w+_ptr \+", part)]
    stages = [m.start() for m in re.finditer(r"\.store_swizzled\(", part)]
    stores = [m.start() for m in re.finditer(r"cp_async_bulk_tensor_global_shared_cta\(", part)]
    barriers = [m.start() for m in re.finditer(r"nvvm\.barrier_cta_sync\(", part)]
    outputs = 1 + name.count("dgate") + name.count("_h_")
    assert len(stages) == len(stores) == outputs
    assert len(reads) == 2 * len(aligned[name]["auxiliaries"])  # whole tiles, partial ones
    assert max(reads) < min(stages)
    assert any(stages[0] < barrier < stores[0] for barrier in barriers)
    assert source.count("_aux_gate_ptr + ") == part.count("_aux_gate_ptr + ")
    # Read and stored at one column; the rows are a thread's own, and the block's.
    assert "                    col_j = col\n" in part
    assert part.count("(col, coord_m, tile_l)") == outputs
    assert re.search(r"_tsv_0\.data_ptr\(tidx \* \d+\)\.store_swizzled", part)
    assert "                    row = coord_m + tidx\n" in source


def test_the_stand_in_driver_refuses_what_it_was_not_asked_before() -> None:
    driver = _device.StandInDriver(_device.DEVICES["sm_100a"])
    assert driver.cuDeviceGetAttribute(75, 0) == (0, 10)
    with pytest.raises(SeamMoved, match="attribute 16999"):
        driver.cuDeviceGetAttribute(16999, 0)
    with pytest.raises(SeamMoved, match="cuMemAlloc"):
        driver.cuMemAlloc(4)

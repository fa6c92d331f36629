"""What an entry of the "cute2d" ABI is handed: tensors as they are stored, then the stream.

The kernel library is one of the test's own, whose entries say what they were given.
"""

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exported_recorder import STREAM, Recorder, buffers_of

from swiglu_jax.kernels import _linker
from swiglu_jax.kernels._variant import KernelVariant

HERE = Path(__file__).parent
GATE_UP = KernelVariant(
    name="gate_up_oi", stage="gate_up", arch="sm_100a", outputs=("h", "gate", "up"),
    weight_layout="OI", dtype="bfloat16", tile=(128, 256, 64),
)  # fmt: skip
DOWN = dataclasses.replace(
    GATE_UP, name="down_oi", stage="down_dswiglu", outputs=("dgate", "dup", "h")
)
INPUT = dataclasses.replace(GATE_UP, name="input_oi", stage="input_gradient", outputs=("x",))
WEIGHTS = dataclasses.replace(
    GATE_UP, name="weights_oi", stage="weight_gradients", outputs=("w_gate", "w_up", "w_down")
)
KERNELS = [
    GATE_UP,
    dataclasses.replace(GATE_UP, name="gate_up_io", weight_layout="IO"),
    dataclasses.replace(
        GATE_UP, name="gate_up_h_last", outputs=("h", "gate"), entry_outputs=("gate", "h")
    ),
    DOWN,
    dataclasses.replace(DOWN, name="down_io", weight_layout="IO", outputs=("dgate", "dup")),
    INPUT,
    dataclasses.replace(INPUT, name="input_io", weight_layout="IO"),
    WEIGHTS,
    dataclasses.replace(WEIGHTS, name="weights_io", weight_layout="IO"),
    dataclasses.replace(WEIGHTS, name="weights_first", outputs=("w_gate", "w_up")),
    dataclasses.replace(WEIGHTS, name="weights_up", weight_layout="IO", outputs=("w_up",)),
    dataclasses.replace(WEIGHTS, name="weights_down", weight_layout="IO", outputs=("w_down",)),
    dataclasses.replace(DOWN, name="down_dup", weight_layout="IO", outputs=("dup",)),
]


@pytest.fixture(scope="module")
def speaker(recording_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    built = tmp_path_factory.mktemp("spoken") / "spoken.so"
    kernels = Path(_linker.__file__).parent
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden", f"-I{kernels}",
         f"-isystem{_linker.tvm_ffi_include()}", HERE / "spoken_entry.c",
         kernels / "kernel_library.c", "-o", built],
        check=True,
    )  # fmt: skip
    recorder = Recorder(recording_build, "sm_100a", devices=2, libraries=False)
    recorder.ask({"add_library": str(built)})
    yield recorder
    recorder.close()


def told(error: str) -> list[Any]:
    found = re.search(r"ValueError: <<(.*)>>", error)
    assert found is not None, error
    return json.loads(found[1])


@pytest.mark.parametrize("variant", KERNELS, ids=lambda v: v.name)
def test_tensors_are_handed_over_as_they_are_stored(
    speaker: Recorder, variant: KernelVariant
) -> None:
    for lead in ((192,), (3, 1, 64)):
        for h, i in ((136, 264), (8, 8)):
            operands, results = buffers_of(variant, lead, h, i)
            refused = speaker.call(variant, operands, results, stream=STREAM, ordinal=0)
            *tensors, stream = told(refused.error)
            assert stream == STREAM
            by_name = {buffer.name.removeprefix("result "): buffer for buffer in results}
            order = variant.entry_outputs or variant.outputs
            expected = [*operands, *(by_name[name] for name in order)]
            assert len(tensors) == len(expected)
            for tensor, buffer in zip(tensors, expected, strict=True):
                *rows, columns = buffer.dims
                flat = rows[0] if len(rows) == 1 else 192
                assert tensor == {
                    "data": buffer.data,
                    "device": [2, 0],
                    "dtype": [4, 16, 1],
                    "offset": 0,
                    "dims": [[flat, columns], [columns, 1]],
                }


def test_the_rehearsal_hands_over_no_address_of_the_call(speaker: Recorder) -> None:
    variant = dataclasses.replace(DOWN, name="down_rehearsed")
    operands, results = buffers_of(variant, (64,), 16, 24)
    for stage, ordinal in (("initialize", 0), ("initialize", 1)):
        refused = speaker.call(variant, operands, results, stage=stage, ordinal=ordinal)
        *tensors, _ = told(refused.error)
        addresses = [tensor["data"] for tensor in tensors]
        assert len(set(addresses)) == 7 and all(a and a % 256 == 0 for a in addresses)
        assert not set(addresses) & {buffer.data for buffer in [*operands, *results]}
        assert all(tensor["device"] == [2, ordinal] for tensor in tensors)


def test_m_must_divide_where_a_kernel_says_so(speaker: Recorder) -> None:
    variant = KERNELS[-1]
    assert told(speaker.run(variant, (128,), 16, 24).error)
    assert "M: expected a multiple of 64, got 100" in speaker.run(variant, (100,), 16, 24).error


def test_an_entry_that_launches_nothing_is_an_error(speaker: Recorder) -> None:
    """Results that nobody wrote must not pass for results."""
    variant = dataclasses.replace(DOWN, name="down_idle")
    assert "launched nothing" in speaker.run(variant, (64,), 16, 24).error

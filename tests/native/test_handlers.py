"""The cudnn route's FFI handlers, called with a hand-built frame: what they check and refuse.

No GPU: the addresses are made up and, below the driver's interface, nothing runs.
"""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swiglu_jax import _native

sys.path.append(str(Path(__file__).parent))
from xla import COMMAND_BUFFER_COMPATIBLE, Buffer, Caller

GATE_UP = "swiglu_jax_cudnn_gate_up"
DOWN = "swiglu_jax_cudnn_down_dswiglu"
TWO_STEP = "swiglu_jax_cudnn_down_dswiglu_two_step"
M, H, I = 6, 16, 24  # noqa: E741
BF16 = "bfloat16"


@pytest.fixture
def xla(library: ctypes.CDLL, caller: Path) -> Caller:
    return Caller(caller, _native.LIBRARY)


def tokens(width: int, *lead: int, dtype: str = BF16) -> Buffer:
    return Buffer(dtype, (*(lead or (2, 3)), width))


def weights(layout: str) -> list[Buffer]:
    return [Buffer(BF16, (I, H) if layout == "OI" else (H, I))] * 2


def w_down(layout: str) -> Buffer:
    return Buffer(BF16, (H, I) if layout == "OI" else (I, H))


@pytest.mark.parametrize("target", [GATE_UP, DOWN, TWO_STEP])
def test_only_execution_may_be_captured(xla: Caller, target: str) -> None:
    assert xla.traits(target) == COMMAND_BUFFER_COMPATIBLE
    assert xla.traits(f"{target}_initialize") == 0


@pytest.mark.parametrize("stage", ["initialize", "execute"])
@pytest.mark.parametrize("layout", ["OI", "IO"])
def test_a_right_call_gets_as_far_as_the_driver(xla: Caller, layout: str, stage: str) -> None:
    """Everything about the call is in order, so what stops it is that there is no driver."""
    if _has_driver():
        pytest.skip("this machine has a CUDA driver, and the stream is made up")
    calls = [
        (GATE_UP, [tokens(H), *weights(layout)], [tokens(I)] * 3, 7),
        (GATE_UP, [Buffer(BF16, (H,)), *weights(layout)], [Buffer(BF16, (I,))], 1),
        (DOWN, [tokens(H), w_down(layout), tokens(I), tokens(I)], [tokens(I)] * 2, 3),
        (DOWN, [tokens(H), w_down(layout), tokens(I)], [tokens(I)], 2),
        (TWO_STEP, [tokens(H), w_down(layout), tokens(I)],
         [tokens(I), Buffer("uint8", (2 * M * I,))], 2),
    ]  # fmt: skip
    for target, operands, results, outputs in calls:
        error = xla.call(target, operands, results, outputs=outputs, weight_layout=layout,
                         stage=stage)  # fmt: skip
        assert "no CUDA driver" in error


def test_nothing_to_do_needs_no_driver(xla: Caller) -> None:
    empty = [Buffer(BF16, (0, H)), *weights("OI")]
    assert xla.call(GATE_UP, empty, [Buffer(BF16, (0, I))], outputs=1) == ""
    narrow = [tokens(H), Buffer(BF16, (0, H)), Buffer(BF16, (0, H))]
    assert xla.call(GATE_UP, narrow, [tokens(0)], outputs=1) == ""


WRONG = {
    "x is a scalar": ([Buffer(BF16, ()), *weights("OI")], [tokens(I)], 1, "x: expected rank 1"),
    "one weight is of the other layout": (
        [tokens(H), Buffer(BF16, (I, H)), Buffer(BF16, (H, I))], [tokens(I)], 1, "w_up: expected",
    ),
    "a weight of rank 3": (
        [tokens(H), Buffer(BF16, (1, I, H)), Buffer(BF16, (I, H))], [tokens(I)], 1,
        "w_gate: expected rank 2",
    ),
    "x is too narrow": ([tokens(H - 8), *weights("OI")], [tokens(I)], 1, "w_gate: expected"),
    "h has rows too many": ([tokens(H), *weights("OI")], [tokens(I, 7)], 1, "result h: expected 6"),
    "gate is too wide": (
        [tokens(H), *weights("OI")], [tokens(I), tokens(I + 8)], 3, "result gate: expected",
    ),
    "float32": (
        [tokens(H, dtype="float32"), *weights("OI")], [tokens(I)], 1, "x: expected bf16 or f16",
    ),
    "two dtypes": (
        [tokens(H), replace(weights("OI")[0], dtype="float16"), weights("OI")[1]], [tokens(I)], 1,
        "w_gate: expected the dtype of the first operand, bf16, got f16",
    ),
    "an operand is missing": ([tokens(H), weights("OI")[0]], [tokens(I)], 1, "expected 3 operands"),
    "a result is missing": ([tokens(H), *weights("OI")], [tokens(I)], 3, "expected 2 results"),
    "results too many": ([tokens(H), *weights("OI")], [tokens(I)] * 3, 1, "expected 1 results"),
    "scratch is no bytes": (
        [tokens(H), *weights("OI")], [tokens(I)] * 2, 1, "scratch: expected uint8, got bf16",
    ),
    "no outputs": ([tokens(H), *weights("OI")], [], 0, "attribute outputs"),
    "outputs of another stage": ([tokens(H), *weights("OI")], [tokens(I)], 8, "attribute outputs"),
}  # fmt: skip


@pytest.mark.parametrize("stage", ["initialize", "execute"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_named(xla: Caller, case: str, stage: str) -> None:
    operands, results, outputs, text = WRONG[case]
    error = xla.call(GATE_UP, operands, results, outputs=outputs, stage=stage)
    assert error.startswith("gate_up: ")
    assert text in error


def test_up_is_an_operand_only_where_it_is_read(xla: Caller) -> None:
    operands = [tokens(H), w_down("OI"), tokens(I)]
    error = xla.call(DOWN, [*operands, tokens(I)], [tokens(I)], outputs=2)
    assert error == "down_dswiglu: expected 3 operands, got 4"
    error = xla.call(DOWN, operands, [tokens(I)], outputs=1)
    assert error == "down_dswiglu: expected 4 operands, got 3"


def test_an_unknown_layout_is_named(xla: Caller) -> None:
    error = xla.call(GATE_UP, [tokens(H), *weights("OI")], [tokens(I)], outputs=1,
                     weight_layout="OO")  # fmt: skip
    assert 'attribute weight_layout: expected "OI" or "IO", got "OO"' in error


@pytest.mark.parametrize("address", [0, 0x7000_0000_0008])
@pytest.mark.parametrize("where", ["operand", "result"])
def test_an_address_that_vector_loads_cannot_use(xla: Caller, where: str, address: int) -> None:
    operands, results = [tokens(H), *weights("OI")], [tokens(I), tokens(I)]
    buffers = operands if where == "operand" else results
    buffers[1] = replace(buffers[1], address=address)
    error = xla.call(GATE_UP, operands, results, outputs=3)
    assert f"{where} 1: expected a 16-byte aligned address, got {address}" in error
    # Addresses may not be known yet when XLA initializes.
    error = xla.call(GATE_UP, operands, results, outputs=3, stage="initialize")
    assert "address" not in error


UNDER_STUB = """
import sys
from pathlib import Path
from xla import Buffer, Caller
xla = Caller(Path(sys.argv[1]), Path(sys.argv[2]))
B = lambda *dims: Buffer("bfloat16", dims)
gate_up = [B(6, 16), B(24, 16), B(24, 16)], [B(6, 24)]
down = [B(6, 16), B(16, 24), B(6, 24)], [B(6, 24)]
print(xla.call("swiglu_jax_cudnn_gate_up", *gate_up, outputs=1, stage="initialize"))
print(xla.call("swiglu_jax_cudnn_gate_up", *gate_up, outputs=1, plan="e7;12=21"))
two = "swiglu_jax_cudnn_down_dswiglu_two_step"
print(xla.call(two, *down, outputs=2))
print(xla.call(two, down[0], [*down[1], Buffer("uint8", (8,))], outputs=2))
print(xla.call(two, down[0], [*down[1], Buffer("uint8", (2 * 6 * 24,))], outputs=2, plan="e1"))
"""


def test_failures_below_the_driver_carry_their_reason(
    library: ctypes.CDLL, caller: Path, stub_driver: Path
) -> None:
    """Under the stub driver cuDNN itself fails, since its cudart takes no driver but NVIDIA's."""
    done = subprocess.run(
        [sys.executable, "-c", UNDER_STUB, caller, _native.LIBRARY],
        cwd=Path(__file__).parent,
        env=os.environ
        | {
            "LD_LIBRARY_PATH": f"{stub_driver}:{Path(_native._cudnn_path()).parent}",
            "CUDNN_LOGLEVEL_DBG": "0",
        },
        check=True,
        capture_output=True,
        text=True,
    )
    initialize, execute, no_scratch, small_scratch, one_name = done.stdout.splitlines()
    for error in (initialize, execute):
        assert error.startswith("swiglu_jax, cudnn route: cuDNN: cudnnCreate failed")
    assert "scratch: expected 288 bytes or more, got 0" in no_scratch
    assert "scratch: expected 288 bytes or more, got 8" in small_scratch
    assert "expected the names of two" in one_name


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

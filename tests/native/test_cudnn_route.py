"""The cudnn route's candidates and declines, which need no GPU."""

import ctypes
from typing import Any

import jax
import pytest

from swiglu_jax import _cudnn, _native
from swiglu_jax._candidate import Declined, StageCall

CALL = StageCall("gate_up", ("h", "gate", "up"), "OI", "bfloat16", 64, 256, 512)
DOWN = StageCall("down_dswiglu", ("dgate", "dup", "h"), "IO", "float16", 64, 256, 512)


def changed(call: StageCall, **other: Any) -> StageCall:
    return StageCall(**vars(call) | other)


@pytest.fixture(autouse=True)
def _built(library: ctypes.CDLL) -> None:
    """Every test here needs the native library: without it the route declines, saying so."""


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("outputs", [("h",), ("h", "gate"), ("h", "gate", "up"), ("gate", "up"),
                                     ("gate",), ("up",), ("h", "up")])  # fmt: skip
def test_gate_up_is_one_graph_that_writes_what_is_asked(
    outputs: tuple[str, ...], target: str
) -> None:
    (candidate,) = _cudnn.candidates(changed(CALL, outputs=outputs), target)
    assert candidate.route == "cudnn"
    assert candidate.outputs == outputs
    assert candidate.scratch_bytes == 0
    attributes = dict(candidate.attributes)
    assert attributes["weight_layout"] == "OI"
    assert attributes["plan"] == ""
    assert attributes["outputs"] == sum({"h": 1, "gate": 2, "up": 4}[n] for n in outputs)


@pytest.mark.parametrize("outputs", [("dup",), ("dgate", "dup"), ("dgate", "dup", "h")])
def test_down_dswiglu_is_one_graph_or_two(outputs: tuple[str, ...]) -> None:
    fused, two_step = _cudnn.candidates(changed(DOWN, outputs=outputs), "sm_100a")
    assert fused.outputs == two_step.outputs == outputs
    assert fused.scratch_bytes == 0
    assert two_step.scratch_bytes == 2 * 64 * 512  # dh
    assert fused.kernel != two_step.kernel
    assert {fused.ffi_target, two_step.ffi_target} <= set(_native.FFI_TARGETS)


def test_a_set_that_plans_get_wrong_is_served_by_a_larger_one() -> None:
    for candidate in _cudnn.candidates(changed(DOWN, outputs=("dgate", "h")), "sm_90a"):
        assert candidate.outputs == ("dgate", "dup", "h")
        assert dict(candidate.attributes)["outputs"] == 7


DECLINES = {
    "an older GPU": (CALL, "sm_80", "9.0 or newer.*sm_80"),
    "no GPU": (CALL, "cpu", "9.0 or newer.*cpu"),
    "a dtype": (changed(CALL, dtype="float32"), "sm_90a", "float32"),
    "rows of H": (changed(CALL, h=260), "sm_90a", "H=260 is not a multiple of 8"),
    "rows of I": (changed(CALL, i=513), "sm_90a", "I=513 is not a multiple of 8"),
    "a symbolic M": (changed(CALL, m=None), "sm_90a", "symbolic"),
    "a symbolic I": (changed(DOWN, i=None), "sm_100a", "symbolic"),
    "h of the backward alone": (changed(DOWN, outputs=("h",)), "sm_90a", "no GEMM"),
}


@pytest.mark.parametrize("case", DECLINES)
def test_declines_with_the_reason(case: str) -> None:
    call, target, reason = DECLINES[case]
    with pytest.raises(Declined, match=reason):
        _cudnn.candidates(call, target)


def test_declines_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "unavailable_reason", lambda: "it is not built")
    with pytest.raises(Declined, match="it is not built"):
        _cudnn.candidates(CALL, "sm_90a")


def test_declines_on_a_gpu_machine_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> dict[str, Any]:
        raise RuntimeError("cuDNN 90100 is older than 91000")

    monkeypatch.setattr(_native, "call_json", refuse)
    assert _cudnn.candidates(CALL, "sm_90a")  # a lowering from elsewhere needs none
    monkeypatch.setattr(_cudnn, "local_gpu_target", lambda: "sm_90a")
    with pytest.raises(Declined, match="older than 91000"):
        _cudnn.candidates(CALL, "sm_90a")


def test_a_candidate_that_cannot_be_timed_stays_as_it_was() -> None:
    (candidate,) = _cudnn.candidates(CALL, "sm_90a")
    if _cudnn.local_gpu_target() is not None:
        pytest.skip("this machine has a GPU, so it can be timed")
    assert _cudnn.refine(candidate, CALL) == candidate


def test_plans_are_timed_on_the_gpu_that_this_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With jax_cuda_visible_devices the first one need not be CUDA's first."""

    class Gpu:
        local_hardware_id = 3

    asked = []

    def tuned(function: str, spec: _native.Graph, device: int, *limits: int) -> dict[str, Any]:
        asked.append(device)
        return {"plan": "e1"}

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu()])
    monkeypatch.setattr(_native, "call_json", tuned)
    monkeypatch.setattr(_cudnn, "local_gpu_target", lambda: None)
    for candidate in _cudnn.candidates(DOWN, "sm_100a"):
        plans = dict(_cudnn.refine(candidate, DOWN).attributes)["plan"]
        assert plans == "|".join(["e1"] * len(_cudnn.graphs(candidate)))
    assert asked == [3, 3, 3]

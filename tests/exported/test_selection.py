"""Which exported kernel serves a call, and why none does."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from swiglu_jax import _device, _exported, _routes, explain, swiglu_mlp
from swiglu_jax._candidate import Declined, StageCall
from swiglu_jax._config import config
from swiglu_jax._stages import StageParams, down_dswiglu
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS

B200 = "sm_100a"


def call(stage: str = "down_dswiglu", **changes: object) -> StageCall:
    outputs = ("dgate", "dup", "h") if stage == "down_dswiglu" else ("h", "gate", "up")
    right = StageCall(stage, outputs, "OI", "bfloat16", m=8192, h=5120, i=17408)
    return dataclasses.replace(right, **changes)


def tiles(found: list) -> list[str]:
    return [re.search(r"128x\d+_\dcta", candidate.kernel)[0] for candidate in found]


@pytest.mark.parametrize(("m", "i", "expected"), [
    (8192, 17408, ["128x256_2cta", "128x128_2cta"]),
    (129, 256, ["128x256_2cta", "128x128_2cta"]),
    (8192, 240, ["128x128_2cta", "128x256_2cta"]),
    (128, 17408, ["128x256_1cta", "128x128_1cta"]),
    (1, 16, ["128x128_1cta", "128x256_1cta"]),
    (None, 4096, ["128x256_2cta", "128x128_2cta"]),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["OI", "IO"])
def test_the_rule_of_sm100(m: int | None, i: int, expected: list[str], layout: str) -> None:
    found = _exported.candidates(call(m=m, i=i, weight_layout=layout), B200)
    assert tiles(found) == expected
    assert all(f"_{layout.lower()}_bf16" in candidate.kernel for candidate in found)


@pytest.mark.parametrize(("stage", "m", "h", "first"), [
    ("gate_up", 8192, 5120, "large"),
    ("gate_up", 256, 5120, "medium"),
    ("gate_up", 100, 5120, "narrow"),
    ("gate_up", 1, 5120, "small"),
    ("gate_up", None, 5120, "large"),
    ("down_dswiglu", 8192, 5120, "large"),
    ("down_dswiglu", 32768, 1024, "short"),
    ("down_dswiglu", 64, 1024, "small"),
])  # fmt: skip
def test_the_rule_of_sm90(stage: str, m: int | None, h: int, first: str) -> None:
    found = _exported.candidates(call(stage, m=m, h=h), "sm_90a")
    assert f"_{first}_" in found[0].kernel
    assert len({candidate.kernel for candidate in found}) == len(found) > 3


def test_unmeasured_forward() -> None:
    """NVIDIA's op runs the forward as a cuDNN graph on a B200, and its backward exported."""
    for stage, expected in (("gate_up", "cudnn"), ("down_dswiglu", "exported")):
        found, declined = _routes.candidates(call(stage), B200)
        assert not declined
        assert found[0].route == expected
        assert {candidate.route for candidate in found} == {"cudnn", "exported"}


@pytest.mark.parametrize("stage", ["gate_up", "down_dswiglu"])
def test_cudnn_on_hopper_is_for_what_no_kernel_serves(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, declined = _routes.candidates(call(stage), "sm_90a")
    assert {candidate.route for candidate in found} == {"exported"}
    assert "not tried where an exported kernel serves" in declined["cudnn"].reason

    def none(*_: object) -> None:
        raise Declined("no kernels here")

    monkeypatch.setattr(_exported, "candidates", none)
    found, declined = _routes.candidates(call(stage), "sm_90a")
    assert {candidate.route for candidate in found} == {"cudnn"}
    assert set(declined) == {"exported"}


def test_a_candidate_is_a_call_of_the_launcher() -> None:
    first = _exported.candidates(call(), B200)[0]
    assert first.route == "exported"
    assert first.ffi_target == "swiglu_jax_exported_down_dswiglu"
    assert first.outputs == ("dgate", "dup", "h")
    assert dict(first.attributes) == {
        "outputs": 7,
        "weight_layout": "OI",
        "kernel": "sm100_down_dswiglu_dgate_dup_h_128x256_2cta_oi_bf16",
    }
    assert first.scratch_bytes == 0


@pytest.mark.parametrize(("stage", "asked", "written"), [
    ("down_dswiglu", ("dup",), ("dup",)),
    ("down_dswiglu", ("dgate",), ("dgate", "dup")),
    ("down_dswiglu", ("dgate", "dup"), ("dgate", "dup")),
    ("down_dswiglu", ("dup", "h"), ("dgate", "dup", "h")),
    ("down_dswiglu", ("h",), ("dgate", "dup", "h")),
    ("gate_up", ("h",), ("h",)),
    ("gate_up", ("gate",), ("h", "gate")),
    ("gate_up", ("up",), ("gate", "up")),
    ("gate_up", ("gate", "up"), ("gate", "up")),
    ("gate_up", ("h", "up"), ("h", "gate", "up")),
    ("gate_up", ("h", "gate", "up"), ("h", "gate", "up")),
])  # fmt: skip
def test_the_smallest_kernel_that_writes_what_is_asked(
    stage: str, asked: tuple[str, ...], written: tuple[str, ...]
) -> None:
    for layout in ("OI", "IO"):
        for dtype in ("bfloat16", "float16"):
            asking = call(stage, outputs=asked, weight_layout=layout, dtype=dtype)
            for candidate in _exported.candidates(asking, B200):
                assert candidate.outputs == written
                canonical = STAGE_OUTPUTS[stage]
                mask = sum(1 << canonical.index(output) for output in written)
                assert dict(candidate.attributes)["outputs"] == mask


@pytest.mark.parametrize(("changes", "target", "reason"), [
    ({"h": 5124}, B200, "H=5124 is not a multiple of 8"),
    ({"i": 17400}, B200, "I=17400 is not a multiple of 16"),
    ({"h": None}, B200, "symbolic"),
    ({"i": None}, B200, "symbolic"),
    ({"dtype": "float32"}, B200, "float32"),
    ({}, "sm_80", "no kernel is exported for sm_80"),
    ({}, "sm_89", "sm_100a"),
])  # fmt: skip
def test_a_decline_says_why(changes: dict, target: str, reason: str) -> None:
    for stage in ("gate_up", "down_dswiglu"):
        with pytest.raises(Declined, match=reason):
            _exported.candidates(call(stage, **changes), target)


def test_frost_backward_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    switched = dataclasses.replace(config, frost_backward=False)
    monkeypatch.setattr(_exported, "config", switched)
    with pytest.raises(Declined, match="SWIGLU_JAX_FROST_BWD=0"):
        _exported.candidates(call(), B200)
    assert _exported.candidates(call("gate_up"), B200)


def test_every_kernel_can_be_chosen() -> None:
    """A kernel that no call reaches would be shipped for nothing."""
    chosen = set()
    for kernel in _manifest.installed().kernels:
        v = kernel.variant
        for m in (64, 8192):
            for i in (128, 4096):
                asking = StageCall(v.stage, v.outputs, v.weight_layout, v.dtype, m, 4096, i)
                chosen |= {c.kernel for c in _exported.candidates(asking, v.arch)}
    assert chosen == {kernel.variant.name for kernel in _manifest.installed().kernels}


@pytest.mark.parametrize("layout", ["OI", "IO"])
def test_a_step_lowered_for_a_b200_names_its_kernels(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device, "config", dataclasses.replace(_device.config, target=B200))
    m, h, i = 1024, 512, 2048
    first, second = ((i, h), (h, i)) if layout == "OI" else ((h, i), (i, h))
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, h), first, first, second)]

    def loss(*arrays: jax.Array) -> jax.Array:
        y = swiglu_mlp(*arrays, weight_layout=layout, implementation="fused")
        return (y.astype(jnp.float32) ** 2).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(*shapes)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r'kernel = "(\w+)"', text)
    backward = f"sm100_down_dswiglu_dgate_dup_h_128x256_2cta_{layout.lower()}_bf16"
    assert backward in kernels
    assert set(kernels) <= {kernel.variant.name for kernel in _manifest.installed().kernels}
    told = explain(*shapes, weight_layout=layout, implementation="fused", target=B200)
    assert (told.backward.route, told.backward.kernel) == ("exported", backward)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
@pytest.mark.parametrize("outputs", [("dup",), ("dgate", "dup"), ("dgate", "dup", "h")])
def test_kernels_that_read_before_they_write_do_it_in_place(
    monkeypatch: pytest.MonkeyPatch, target: str, outputs: tuple[str, ...]
) -> None:
    """FROST's SM120 kernels read gate and up anew for each output: theirs take memory."""
    monkeypatch.setattr(_device, "config", dataclasses.replace(config, target=target))
    named = dict.fromkeys(("gate", "up", "dgate", "dup", "h"), (256, 512))
    operands = [(256, 64), (64, 512), named["gate"], named["up"]]
    needed = down_dswiglu.needed(outputs)
    arrays = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s, n in zip(operands, needed, strict=True) if n
    ]
    params = StageParams(outputs, "OI", "fused")
    bind = functools.partial(down_dswiglu.primitive.bind, params=params)
    text = jax.jit(bind).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (x for x in text.splitlines() if "@swiglu_jax_exported_down_dswiglu" in x)
    aliased = re.findall(r"output_operand_alias<.*?operand_index = (\d)", call)
    expected = {1: ["2"], 2: ["2", "3"], 3: ["2", "3"]}[len(outputs)]
    assert aliased == ([] if target == "sm_120a" else expected)

"""What a CUDA lowering holds, from any machine: which calls, and no transpose of a weight."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from support import ARGUMENTS, LAYOUTS, SUBSETS

from swiglu_jax import _device, _table, explain, swiglu_mlp
from swiglu_jax._residuals import residual_plan

TARGETS = ("sm_90a", "sm_100a")
WIDTH, HIDDEN = 256, 512


@pytest.fixture(params=TARGETS)
def target(request, monkeypatch):
    config = dataclasses.replace(_device.config, target=request.param)
    monkeypatch.setattr(_device, "config", config)
    # Unmeasured: which of the gradients' kernels serve must not depend on what a GPU measured.
    monkeypatch.setattr(_table, "rows", lambda target: ())
    return request.param


def _shapes(layout, lead=(4, 64), dtype=jnp.bfloat16):
    first, second = (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    if layout == "IO":
        first, second = second, first
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((*lead, WIDTH), first, first, second)]


def _lowered(f, shapes) -> str:
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def _calls(text: str) -> list[str]:
    return re.findall(r"custom_call @(swiglu_jax_\w+)", text)


def _op(layout, implementation="fused"):
    return lambda *a: swiglu_mlp(*a, weight_layout=layout, implementation=implementation)


def _step(layout, subset):
    """The gradients of ``subset``, the other arguments fixed."""

    def step(*arrays):
        fixed = dict(zip(ARGUMENTS, arrays, strict=True))

        def loss(chosen):
            y = _op(layout)(*(fixed | chosen).values())
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)({name: fixed[name] for name in subset})

    return step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_is_one_fused_call_that_writes_h_alone(target, layout):
    shapes = _shapes(layout)
    text = _lowered(_op(layout), shapes)
    (call,) = _calls(text)
    assert call.endswith("_gate_up")
    assert "stablehlo.transpose" not in text
    # The down projection is the only GEMM left to XLA.
    assert text.count("stablehlo.dot_general") == 1
    route = explain(*shapes, weight_layout=layout, wrt=(), implementation="fused", target=target)
    assert route.forward.route in call


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subset", SUBSETS[1:], ids="+".join)
def test_a_step_holds_the_stages_of_the_residual_table(target, layout, subset):
    text = _lowered(_step(layout, subset), _shapes(layout))
    backward = bool(residual_plan(frozenset(subset)).backward)
    calls = _calls(text)
    assert len(calls) == 1 + backward
    assert calls[0].endswith("_gate_up")
    if backward:
        assert "_down_dswiglu" in calls[1]
    assert "stablehlo.transpose" not in text
    # The GEMMs left to XLA: the down projection and the asked gradients'.
    gemms = 1 + 2 * ("x" in subset) + sum(name in subset for name in ARGUMENTS[1:])
    assert text.count("stablehlo.dot_general") == gemms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_say_their_layout_and_outputs(target, layout):
    text = _lowered(_step(layout, ARGUMENTS), _shapes(layout))
    fused = [line for line in text.splitlines() if "custom_call @swiglu_jax_" in line]
    assert len(fused) == 2
    for line in fused:
        assert f'weight_layout = "{layout}"' in line
        assert re.search(r"outputs = 7 : i64", line)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_keep_the_rank_of_x(target, layout):
    text = _lowered(_step(layout, ARGUMENTS), _shapes(layout, lead=(2, 3, 8)))
    assert f"tensor<2x3x8x{HIDDEN}xbf16>" in text
    assert "stablehlo.reshape" not in text


def test_other_dtypes_take_xla_unless_fused_is_forced(target):
    shapes = _shapes("OI", dtype=jnp.float32)
    assert _calls(_lowered(_op("OI", None), shapes)) == []
    with pytest.raises(NotImplementedError, match="float32"):
        _lowered(_op("OI"), shapes)


def test_xla_forced_holds_no_fused_call(target):
    assert _calls(_lowered(_op("OI", "xla"), _shapes("OI"))) == []


def test_empty_batches_take_xla(target):
    assert _calls(_lowered(_op("OI", None), _shapes("OI", lead=(0,)))) == []


def test_without_a_gpu_and_without_a_target_xla_serves_and_fused_asks_for_one(monkeypatch):
    config = dataclasses.replace(_device.config, target=None)
    monkeypatch.setattr(_device, "config", config)
    monkeypatch.setattr(_device, "local_gpu_target", lambda: None)
    assert _calls(_lowered(_op("OI", None), _shapes("OI"))) == []
    with pytest.raises(NotImplementedError, match="set SWIGLU_JAX_TARGET"):
        _lowered(_op("OI"), _shapes("OI"))

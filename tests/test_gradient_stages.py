"""The gradients' GEMMs as stages: XLA's form, unless a kernel is known to be faster."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ARGUMENTS, LAYOUTS, SUBSETS, error, float64, problem

from swiglu_jax import _device, _table, swiglu_mlp
from swiglu_jax._stages import GRADIENT_STAGES, STAGES, StageParams
from swiglu_jax._stages._remat import _dimension_numbers

TARGET = "sm_90a"
SERVED = (("w_down",), ("w_gate", "w_up"), ("w_gate", "w_up", "w_down"))
"""Sets of weights whose gradients one kernel makes."""


@pytest.fixture(params=[0.9, 1.1], ids=["faster", "slower"])
def ratio(request, monkeypatch):
    """A table in which each kernel takes this share of XLA's time, for a lowering to sm_90a."""

    def lookup(call, offered, target):
        return _table.Row(call, 100.0, {c.kernel: 100.0 * request.param for c in offered})

    monkeypatch.setattr(_table, "lookup", lookup)
    config = dataclasses.replace(_device.config, target=TARGET, tune=False)
    monkeypatch.setattr(_device, "config", config)
    return request.param


def _calls(f, *shapes) -> list[str]:
    text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @swiglu_jax_exported_(\w+)", text)


def _loss(layout, implementation=None):
    def loss(chosen, fixed):
        given = [(fixed | chosen)[name] for name in ARGUMENTS]
        y = swiglu_mlp(*given, weight_layout=layout, implementation=implementation)
        return (y.astype(jnp.float32) ** 2).sum()

    return loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subset", SUBSETS[1:], ids="+".join)
@pytest.mark.parametrize("implementation", [None, "fused"])
def test_a_kernel_serves_where_it_is_faster(rng, ratio, layout, subset, implementation):
    arrays = dict(zip(ARGUMENTS, problem(rng, (64,), 64, 128, "bfloat16", layout), strict=True))
    chosen = {name: arrays[name] for name in subset}
    calls = _calls(jax.grad(_loss(layout, implementation)), chosen, arrays)
    weights = tuple(name for name in ARGUMENTS[1:] if name in subset)
    faster = ratio < 1
    assert calls.count("input_gradient") == (faster and "x" in subset)
    assert calls.count("weight_gradients") == (faster and weights in SERVED)


def test_per_example_gradients_are_a_batched_gemm(rng, ratio):
    x, *weights = problem(rng, (3, 8), 64, 128, "bfloat16")

    def per_example(x, *weights):
        def loss(x, *weights):
            return (swiglu_mlp(x, *weights).astype(jnp.float32) ** 2).sum()

        return jax.vmap(jax.grad(loss, (1, 2, 3)), (0, None, None, None))(x, *weights)

    assert "weight_gradients" not in _calls(per_example, x, *weights)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lead", [(), (7,), (2, 3)], ids=str)
@pytest.mark.parametrize("outputs", [*SERVED, ("w_up",), ("w_gate", "w_down")], ids="+".join)
def test_values(rng, layout, lead, outputs):
    """The stages bound alone, against float64."""
    h, i = 24, 40
    sizes = {"l": lead, "h": (h,), "i": (i,)}
    for stage, asked in (("input_gradient", ("x",)), ("weight_gradients", outputs)):
        stage = GRADIENT_STAGES[stage]
        params = StageParams(asked, layout, precision="highest")
        given = [
            rng.standard_normal([s for letter in names for s in sizes[letter]])
            for names in stage.letters(layout)
        ]
        got = stage.bind(*(jnp.asarray(a, jnp.float32) for a in given), params=params)
        assert tuple(got) == asked
        for name, expected in _expected(stage.name, asked, layout, given).items():
            assert got[name].shape == expected.shape
            assert error(got[name], expected) <= 1e-5


def _expected(stage, asked, layout, given):
    if stage == "input_gradient":
        dgate, dup, w_gate, w_up = given
        turn = np.transpose if layout == "IO" else np.asarray
        return {"x": dgate @ turn(w_gate) + dup @ turn(w_up)}
    x, dgate, dup, h, dy = (a.reshape(-1, a.shape[-1]) for a in given)
    products = {"w_gate": dgate.T @ x, "w_up": dup.T @ x, "w_down": dy.T @ h}
    return {name: products[name].T if layout == "IO" else products[name] for name in asked}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("name", [*STAGES, *GRADIENT_STAGES])
def test_remat_policies_see_the_stage_s_gemm(rng, name, rank, layout):
    """The dimension numbers that a policy is asked about are those of the stage's product."""
    stage = (STAGES | GRADIENT_STAGES)[name]
    lead = (2, 3, 4)[: rank - 1]
    sizes = {"l": lead, "h": (5,), "i": (6,)}
    params = StageParams(stage.outputs, layout)
    letters = [stage.operand_letters(params)[k] for k in stage.gemm]
    a, b = (rng.standard_normal([s for n in names for s in sizes[n]]) for names in letters)
    numbers = _dimension_numbers(stage, params, a.ndim)
    got = jax.lax.dot_general(jnp.asarray(a), jnp.asarray(b), numbers)
    one = [names.replace("l", "abc"[: rank - 1]) for names in letters]
    out = [n for names in one for n in names if not all(n in other for other in one)]
    want = np.einsum(f"{one[0]},{one[1]}->{''.join(out)}", a, b)
    assert error(got, float64(want)) <= 1e-5

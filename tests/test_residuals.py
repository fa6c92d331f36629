"""The residual table, read off what jax.vjp's function really holds."""

import jax
import jax.numpy as jnp
import pytest
from support import ARGUMENTS, LAYOUTS, SUBSETS, kept_activations, problem

from swiglu_jax import explain, swiglu_mlp
from swiglu_jax._residuals import residual_plan

HIDDEN = 40


def table(subset: tuple[str, ...]) -> dict[str, int]:
    """The table of the design, written again by hand: [M, I] tensors, and whether x is kept."""
    s = set(subset)
    if s & {"x", "w_gate"}:
        hidden = 2
    elif "w_up" in s:
        hidden = 2 if "w_down" in s else 1
    else:
        hidden = 1 if "w_down" in s else 0
    return {"hidden": hidden, "x": int(bool(s & {"w_gate", "w_up"}))}


def _vjp(arrays, subset, layout, wrap=lambda f: f):
    fixed = dict(zip(ARGUMENTS, arrays, strict=True))

    def op(chosen):
        return swiglu_mlp(*(fixed | chosen).values(), weight_layout=layout)

    return jax.vjp(wrap(op), {name: fixed[name] for name in subset})[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_vjp_keeps_what_the_table_says(rng, subset, layout):
    arrays = problem(rng, (3, 4), hidden=HIDDEN, layout=layout)
    pull = _vjp(arrays, subset, layout)
    assert kept_activations(pull, arrays, HIDDEN) == table(subset)


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_vjp_under_jit_keeps_what_the_table_says(rng, subset):
    arrays = problem(rng, (3, 4), hidden=HIDDEN)
    pull = jax.jit(lambda a: _vjp(a, subset, "OI"))(arrays)
    assert kept_activations(pull, arrays, HIDDEN) == table(subset)


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_explain_lists_what_vjp_keeps(rng, subset):
    arrays = problem(rng, (3, 4), hidden=HIDDEN)
    listed = explain(*arrays, wrt=subset).residuals
    counted = {
        "hidden": sum(r.shape == (3, 4, HIDDEN) for r in listed),
        "x": sum(r.name == "x" for r in listed),
    }
    assert counted == table(subset)
    for r in listed:
        assert r.bytes == jnp.dtype(r.dtype).itemsize * jnp.zeros(r.shape).size


@pytest.mark.parametrize("subset", SUBSETS[1:], ids="+".join)
def test_only_the_asked_stages_and_gemms_run(rng, subset):
    arrays = problem(rng, (3, 4), hidden=HIDDEN)
    plan = residual_plan(frozenset(subset))

    def step(*a):
        fixed = dict(zip(ARGUMENTS, a, strict=True))
        f = lambda chosen: swiglu_mlp(*(fixed | chosen).values()).sum()  # noqa: E731
        # With the value, which is the down projection: else that GEMM would be dead code.
        wanted = {name: fixed[name] for name in subset}
        return jax.value_and_grad(f)(wanted) if subset else f({})

    # gate, up and the down projection; dh; two GEMMs for dx; and one for each weight.
    dots = 3 + bool(plan.backward)
    dots += 2 * ("x" in subset) + sum(name in subset for name in ARGUMENTS[1:])
    assert jax.jit(step).lower(*arrays).as_text().count("stablehlo.dot_general") == dots
    text = str(jax.make_jaxpr(step)(*arrays))
    assert text.count("swiglu_gate_up[") == 1
    assert text.count("swiglu_down_dswiglu[") == int(bool(plan.backward))
    assert f"outputs={plan.forward}" in text
    if plan.backward:
        assert f"outputs={plan.backward}" in text


def test_residuals_carry_checkpoint_names(rng):
    arrays = problem(rng)
    asked = set()

    def policy(primitive, *_, **params):
        asked.update([params["name"]] if primitive.name == "name" else [])
        return False

    layer = jax.checkpoint(swiglu_mlp, policy=policy)
    jax.vjp(layer, *arrays)
    assert asked == {"swiglu_h", "swiglu_gate", "swiglu_up", "swiglu_x"}

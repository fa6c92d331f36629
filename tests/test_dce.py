"""Dead-code elimination: unused outputs choose the smaller kernel wherever JAX eliminates them."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from support import BOUNDS, LAYOUTS, check, float64, plain, problem

from swiglu_jax import swiglu_mlp
from swiglu_jax._stages import STAGES, StageParams, down_dswiglu, gate_up

pytestmark = pytest.mark.usefixtures("on_cpu")

LEAD, WIDTH, HIDDEN = (2, 3), 8, 12
BOUND = 10 * BOUNDS["float32"]


def _subsets(names):
    return [s for k in range(1, len(names) + 1) for s in itertools.combinations(names, k)]


CASES = [(name, s) for name, stage in STAGES.items() for s in _subsets(stage.outputs)]


by_case = pytest.mark.parametrize(
    "stage, used", CASES, ids=lambda v: v if isinstance(v, str) else "+".join(v)
)


def _chosen(made, used):
    return {name: made[name] for name in used}


def _operands(rng, stage, layout="OI"):
    x, w_gate, w_up, w_down = problem(rng, LEAD, WIDTH, HIDDEN, layout=layout)
    if stage == "gate_up":
        return x, w_gate, w_up
    gate, up = (jnp.asarray(rng.standard_normal((*LEAD, HIDDEN)), jnp.float32) for _ in range(2))
    return x, w_down, gate, up


def _all(stage, layout, implementation):
    params = StageParams(STAGES[stage].outputs, layout, implementation)
    return lambda *a: STAGES[stage].bind(*a, params=params)


def test_an_axis_over_weights_of_an_unused_operand_alone_stays(rng):
    """dup does not need up, but under a vmap over up it has the axis all the same."""
    dy, w_down, gate, up = _operands(rng, "down_dswiglu")
    ups = jnp.stack([up, 2 * up])
    params = StageParams(("dgate", "dup"), "OI", "xla")

    def dup(up):
        return down_dswiglu.bind(dy, w_down, gate, up, params=params)["dup"]

    check(list(jax.jit(jax.vmap(dup))(ups)), [float64(dup(up))] * 2, BOUND)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "stage, used", CASES, ids=lambda v: v if isinstance(v, str) else "+".join(v)
)
def test_jit_asks_for_the_used_outputs_alone(rng, fused_cpu, stage, used, layout):
    operands = _operands(rng, stage, layout)
    whole = _all(stage, layout, "fused")
    want = _all(stage, layout, "xla")(*operands)
    got = jax.jit(lambda *a: _chosen(whole(*a), used))(*operands)
    (call,) = fused_cpu.take_calls(got)
    assert (call.stage, call.outputs) == (stage, used)
    for name in used:
        check([got[name]], [float64(want[name])], BOUND)


@pytest.mark.parametrize(
    "stage, used", CASES, ids=lambda v: v if isinstance(v, str) else "+".join(v)
)
def test_a_kernel_that_writes_more_serves_any_subset(rng, fused_cpu, stage, used):
    fused_cpu.superset = True
    operands = _operands(rng, stage)
    whole = _all(stage, "OI", "fused")
    want = _all(stage, "OI", "xla")(*operands)
    got = jax.jit(lambda *a: _chosen(whole(*a), used))(*operands)
    assert set(used) <= set(fused_cpu.take_calls(got)[0].outputs)
    for name in used:
        check([got[name]], [float64(want[name])], BOUND)


def test_an_unused_stage_goes(fused_cpu, rng):
    operands = _operands(rng, "gate_up")
    whole = _all("gate_up", "OI", "fused")
    got = jax.jit(lambda *a: (whole(*a), a[0] + 1)[1])(*operands)
    assert fused_cpu.take_calls(got) == []


def test_dup_alone_does_not_read_up(rng):
    dy, w_down, gate, up = _operands(rng, "down_dswiglu")
    whole = _all("down_dswiglu", "OI", "xla")
    only_dup = jax.jit(lambda *a: whole(*a)["dup"])
    bad = only_dup(dy, w_down, gate, jnp.full_like(up, jnp.nan))
    check([bad], [float64(only_dup(dy, w_down, gate, up))], 0)


def _asked(f, *args):
    """Outputs asked of each fused call of the program that JAX hands to XLA."""
    text = jax.jit(f).lower(*args).as_text()
    found = []
    for name, mask in re.findall(r"@swiglu_jax_test_(\w+)\(.*?outputs = (\d) : i64", text):
        outputs = STAGES[name].outputs
        found.append(tuple(n for k, n in enumerate(outputs) if int(mask) >> k & 1))
    return found


CONTAINERS = {
    "scan": lambda f: lambda a: jax.lax.scan(lambda c, _: (c, f(a)), 0.0, length=2)[1],
    "fori": lambda f: lambda a: jax.lax.fori_loop(0, 2, lambda _, c: c + f(a).sum(), 0.0),
    "cond": lambda f: lambda a: jax.lax.cond(a[0].sum() > 0, f, lambda a: 2 * f(a), a),
    "remat": lambda f: lambda a: jax.checkpoint(f)(a),
    "jit": lambda f: lambda a: jax.jit(f)(a),
    "vmap": lambda f: lambda a: jax.vmap(lambda x: f((x, *a[1:])))(a[0]),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_inside_control_flow(rng, fused_cpu, container):
    operands = _operands(rng, "gate_up")

    def used(a):
        made = gate_up.bind(*a, params=StageParams(("h", "gate", "up"), "OI", "fused"))
        return made["gate"] * made["up"]

    asked = _asked(CONTAINERS[container](used), operands)
    assert asked
    assert set(asked) == {("gate", "up")}


def test_the_backward_stage_shrinks_when_gradients_are_dropped(rng, fused_cpu):
    """A step whose caller uses one gradient asks the backward stage for its part alone."""
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)

    def one(k):
        def loss(*a):
            return (swiglu_mlp(*a, implementation="fused") ** 2).sum()

        return lambda *a: jax.grad(loss, (0, 1, 2, 3))(*a)[k]

    for k, asked in enumerate((("dgate", "dup"), ("dgate",), ("dup",), ("h",))):
        assert _asked(one(k), *arrays)[-1] == asked
        got = jax.jit(one(k))(*arrays)
        want = jax.grad(lambda *a: (plain(*a) ** 2).sum(), k)(*arrays)
        check([got], [float64(want)], BOUND)


def test_batched_operands_follow_the_ones_that_stay(rng, fused_cpu):
    """dup alone of a stage whose weights are batched drops up and its batch flag together."""
    dy, w_down, gate, up = _operands(rng, "down_dswiglu")
    stack = lambda a: jnp.stack([a, 2 * a])  # noqa: E731
    params = StageParams(("dgate", "dup", "h"), "OI", "fused")
    f = jax.vmap(lambda *a: down_dswiglu.bind(*a, params=params)["dup"], (None, 0, None, 0))
    got = jax.jit(f)(dy, stack(w_down), gate, stack(up))
    assert {c.outputs for c in fused_cpu.take_calls(got)} == {("dup",)}
    want = down_dswiglu.bind(dy, w_down, gate, up, params=StageParams(("dup",), "OI", "xla"))["dup"]
    check([got[0], got[1]], [float64(want), 2 * float64(want)], BOUND)

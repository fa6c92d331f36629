"""``forward_mode=True``: jvp, linearize, jacfwd, and a reverse mode that keeps no more for it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh, place, training_step
from support import (
    ARGUMENTS,
    BOUNDS,
    LAYOUTS,
    SUBSETS,
    check,
    error,
    float64,
    kept_activations,
    plain,
    problem,
)

from swiglu_jax import swiglu_mlp
from swiglu_jax._residuals import residual_plan

pytestmark = pytest.mark.usefixtures("on_cpu")

ROWS, WIDTH, HIDDEN = 5, 8, 12
BOUND = 20 * BOUNDS["float32"]
ALL = (0, 1, 2, 3)


def _op(layout="OI", implementation="xla"):
    return functools.partial(
        swiglu_mlp, weight_layout=layout, implementation=implementation, forward_mode=True
    )


def _chosen(f, arrays, subset):
    """``f`` of the arguments in ``subset`` alone, and those."""
    fixed = dict(zip(ARGUMENTS, arrays, strict=True))
    return lambda chosen: f(*(fixed | chosen).values()), {name: fixed[name] for name in subset}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subset", SUBSETS[1:], ids="+".join)
def test_jvp_and_vjp_of_each_set(rng, fused_cpu, subset, layout):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN, layout=layout)

    def both(f):
        f, at = _chosen(f, arrays, subset)
        along = jax.tree.map(jnp.cos, at)
        y, pull = jax.vjp(f, at)
        return jax.jvp(f, (at,), (along,)), pull(jnp.sin(y))

    got = jax.jit(lambda: both(_op(layout, "fused")))()
    want = both(lambda *a: plain(*a, layout))
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


def test_eager(rng, implementation):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    y, along = jax.jvp(_op("OI", implementation), arrays, arrays)
    want = jax.jvp(plain, arrays, arrays)
    check([y, along], [float64(a) for a in want], BOUND)


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_reverse_mode_keeps_what_the_residual_table_says(rng, subset):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    pull = jax.vjp(*_chosen(_op(), arrays, subset))[1]
    kept = residual_plan(frozenset(subset)).kept
    want = {"hidden": len({"h", "gate", "up"} & set(kept)), "x": int("x" in kept)}
    assert kept_activations(pull, arrays, HIDDEN) == want


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "checkpoint"])
def test_hidden_tensors_kept_a_layer_under_scan(wrap):
    rows, width, hidden = 1024, 8, 256

    def temporaries(layers):
        shapes = [(layers, hidden, width), (layers, hidden, width), (layers, width, hidden)]
        weights = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        x = jax.ShapeDtypeStruct((rows, width), jnp.float32)

        def loss(x, *weights):
            layer = wrap(lambda x, w: (x + _op()(x, *w), None))
            return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

        step = jax.jit(jax.grad(loss, ALL)).lower(x, *weights).compile()
        return step.memory_analysis().temp_size_in_bytes

    kept = (temporaries(24) - temporaries(8)) / 16 / (rows * hidden * 4)
    assert kept <= (0 if wrap is jax.checkpoint else 2) + 3 * width / hidden


def test_a_jvp_holds_one_fused_call(rng, fused_cpu):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    got = jax.jit(lambda *a: jax.jvp(_op("OI", "fused"), a, a))(*arrays)
    (call,) = fused_cpu.take_calls(got)
    assert (call.stage, call.outputs) == ("gate_up", ("h", "gate", "up"))


MODES = {
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*map(jnp.cos, a)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 2)),
    "hessian": lambda f: jax.hessian(lambda *a: jnp.sin(f(*a)).sum(), (0, 3)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f, 1), 0),
    "reverse over forward": lambda f: jax.grad(
        lambda *a: (jax.jvp(f, a, tuple(map(jnp.cos, a)))[1] ** 2).sum(), ALL
    ),
    "gauss-newton": lambda f: (
        lambda *a: jax.vjp(f, *a)[1](jax.jvp(f, a, tuple(map(jnp.cos, a)))[1])
    ),
    "transpose": lambda f: (
        lambda x, *w: jax.linear_transpose(jax.linearize(lambda x: f(x, *w), x)[1], x)(jnp.cos(x))
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(rng, implementation, mode):
    arrays = problem(rng, (2,), 4, 6)
    got = jax.jit(MODES[mode](_op("OI", implementation)))(*arrays)
    want = jax.jit(MODES[mode](plain))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], 3 * BOUND)


PROGRAMS = {
    "vmap over x": lambda f: jax.vmap(f, (0, None, None, None)),
    "vmap over weights": lambda f: (
        lambda x, *w: jax.vmap(f, (None, 0, None, 0))(
            x[0], jnp.stack([w[0], -w[0]]), w[1], jnp.stack([w[2], 2 * w[2]])
        )
    ),
    "scan": lambda f: lambda x, *w: jax.lax.scan(lambda x, _: (f(x, *w), x), x, length=2)[1],
    "checkpoint": lambda f: jax.checkpoint(lambda x, *w: jnp.sin(f(jnp.sin(f(x, *w)), *w))),
    "checkpoint dots": lambda f: jax.checkpoint(
        lambda x, *w: jnp.sin(f(jnp.sin(f(x, *w)), *w)),
        policy=jax.checkpoint_policies.dots_saveable,
    ),
    "a shared layer": lambda f: (
        lambda x, *w: jax.jit(f)(
            jax.jit(f)(jax.lax.stop_gradient(x), *map(jax.lax.stop_gradient, w[:2]), w[2]), *w
        )
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_under_transformations(rng, fused_cpu, program):
    arrays = problem(rng, (3, ROWS), WIDTH, HIDDEN)

    def both(f):
        f = PROGRAMS[program](f)
        tangent = jax.jvp(f, arrays, tuple(map(jnp.cos, arrays)))[1]
        return tangent, jax.grad(lambda *a: (f(*a) ** 2).mean(), ALL)(*arrays)

    got = jax.jit(lambda: both(_op("OI", "fused")))()
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(both(plain))], BOUND)


@pytest.mark.parametrize("kind", ["automatic", "explicit", "manual"])
def test_on_meshes(rng, implementation, kind):
    arrays = problem(rng, (8,), 16, 32)
    explicit = kind == "explicit"
    on = mesh(AxisType.Explicit if explicit else AxisType.Auto, dp=2, tp=2)
    specs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))
    placed = place(arrays, [NamedSharding(on, s) for s in specs])
    f = _op("OI", implementation)
    if kind == "manual":
        f = jax.shard_map(
            lambda *a: jax.lax.psum(_op("OI", implementation)(*a), "tp"),
            mesh=on,
            in_specs=specs,
            out_specs=P("dp"),
        )

    def both(f):
        return lambda *a: (jax.jvp(f, a, a)[1], training_step(f)(*a))

    with jax.set_mesh(on):
        got = jax.jit(both(f))(*placed)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(both(plain)(*arrays))], BOUND)


def test_bfloat16(rng):
    arrays = problem(rng, (64,), 128, 192, "bfloat16")
    wide = [a.astype(jnp.float32) for a in arrays]

    def both(f, a):
        y, pull = jax.vjp(f, *a)
        return jax.jvp(f, a, a)[1], *pull(y)

    want = [float64(a) for a in both(plain, tuple(wide))]
    ours, theirs = (jax.jit(functools.partial(both, f))(arrays) for f in (_op(), plain))
    for a, b, c in zip(ours, theirs, want, strict=True):
        assert a.dtype == jnp.bfloat16
        assert error(a, c) <= 1.3 * error(b, c) + 1e-3


def test_derivatives_are_finite_for_every_finite_gate():
    gate = jnp.asarray([0.0, 17.0, -17.0, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38])[:, None]
    one = jnp.ones((1, 1))
    f = lambda x: _op()(x, one, 0 * one, one)  # noqa: E731
    assert jnp.isfinite(jax.jvp(f, (gate,), (jnp.ones_like(gate),))[1]).all()
    assert jnp.isfinite(jax.grad(lambda x: f(x).sum())(gate)).all()

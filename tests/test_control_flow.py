"""while, fori, cond, switch and associative uses, also with sets that differ between branches."""

import jax
import jax.numpy as jnp
import pytest
from narrow import check_narrow
from support import BOUNDS, check, float64, plain, problem

from swiglu_jax import swiglu_mlp

pytestmark = pytest.mark.usefixtures("on_cpu")

BOUND = 20 * BOUNDS["float32"]
stop = jax.lax.stop_gradient


def _fori(op):
    def loss(x, *w):
        return (jax.lax.fori_loop(0, 3, lambda _, x: x + op(x, *w), x) ** 2).mean()

    return loss


def _cond(op):
    """Branches with different sets of differentiated arguments."""

    def loss(x, *w):
        def one(x):
            return op(x, w[0], stop(w[1]), w[2])

        def other(x):
            return op(stop(x), *w)

        y = jax.lax.cond(x[0, 0] > 0, one, other, x)
        y = jax.lax.cond(x[0, 0] <= 0, one, other, y)
        return (y**2).mean()

    return loss


def _switch(op):
    def loss(x, *w):
        branches = [
            lambda x: op(x, *map(stop, w)),
            lambda x: op(x, *w),
            lambda x: op(stop(x), stop(w[0]), stop(w[1]), w[2]),
            lambda x: x,
        ]
        total = 0.0
        for k in range(4):
            total = total + (jax.lax.switch((x[0, 0] > 0) + k, branches, x) ** 2).mean()
        return total

    return loss


def _cond_in_scan(op):
    def loss(x, *w):
        def body(x, k):
            y = jax.lax.cond(k % 2 == 0, lambda x: op(x, *w), lambda x: op(x, *map(stop, w)), x)
            return x + y, y.sum()

        x, sums = jax.lax.scan(body, x, jnp.arange(4))
        return (x**2).mean() + sums.mean()

    return loss


def _shared_layer(wrap):
    """One traced layer, used with every kind of set: the trap of JAX's one residual tree."""

    def program(op):
        layer = wrap(lambda *a: op(*a))

        def loss(x, *w):
            data = jnp.cos(stop(x))
            uses = [
                layer(data, *w),
                layer(x, stop(w[0]), w[1], w[2]),
                layer(x, w[0], stop(w[1]), stop(w[2])),
                layer(data, *map(stop, w[:2]), w[2]),
                layer(data, stop(w[0]), w[1], stop(w[2])),
                layer(x, *map(stop, w)),
                layer(layer(x, *w), *w),
            ]
            return sum((k + 1) * (y**2).mean() for k, y in enumerate(uses))

        return loss

    return program


def _scanned(f):
    def layer(x, *w):
        return jax.lax.scan(lambda x, _: (f(x, *w), None), x, None, length=2)[0]

    return layer


PROGRAMS = {
    "fori": _fori,
    "cond": _cond,
    "switch": _switch,
    "cond in scan": _cond_in_scan,
    "shared jit": _shared_layer(jax.jit),
    "shared checkpoint": _shared_layer(jax.checkpoint),
    "shared scan": _shared_layer(lambda f: jax.jit(_scanned(f))),
    "shared dots policy": _shared_layer(
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "shared vmap": _shared_layer(
        lambda f: jax.jit(lambda x, *w: jax.vmap(f, (0, None, None, None))(x[None], *w)[0])
    ),
    "shared cond": _shared_layer(
        lambda f: jax.jit(lambda x, *w: jax.lax.cond(x[0, 0] > 0, f, lambda *a: 2 * f(*a), x, *w))
    ),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_gradients(rng, implementation, program):
    arrays = problem(rng, (4,), 8, 12)

    def grad(op):
        return jax.jit(jax.value_and_grad(program(op), (0, 1, 2, 3)))(*arrays)

    got = grad(lambda *a: swiglu_mlp(*a, implementation=implementation))
    want = grad(plain)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


@pytest.mark.parametrize("dtype, layout", [("bfloat16", "OI"), ("float16", "IO")])
@pytest.mark.parametrize("program", ["fori", "cond", "shared checkpoint"])
def test_narrow_dtypes(rng, fused_cpu, program, dtype, layout):
    arrays = problem(rng, (16,), 64, 96, dtype, layout)

    def gradients(f):
        def loss(*a):
            return PROGRAMS[program](lambda *a: f(*a).astype(a[0].dtype))(*a).astype("float32")

        return jax.grad(loss, (0, 1, 2, 3))

    def ours(*a):
        return swiglu_mlp(*a, weight_layout=layout, implementation="fused")

    check_narrow(gradients, ours, lambda *a: plain(*a, layout), arrays)


@pytest.mark.parametrize("program", ["shared jit", "shared checkpoint", "cond"])
def test_gradients_of_several_sets_eagerly(rng, program):
    arrays = problem(rng, (4,), 8, 12)
    ours = PROGRAMS[program](lambda *a: swiglu_mlp(*a))
    theirs = PROGRAMS[program](plain)
    for argnums in ((1,), (2, 3), (0, 3)):
        got, want = jax.grad(ours, argnums)(*arrays), jax.grad(theirs, argnums)(*arrays)
        check(got, [float64(a) for a in want], BOUND)


def test_while_loop(rng, implementation):
    """A while loop has no reverse mode; its forward runs the stage, and it may hold a grad."""
    arrays = problem(rng, (4,), 8, 12)

    def descend(op):
        def body(state):
            k, x = state
            return k + 1, x - 0.1 * jax.grad(lambda x: (op(x, *arrays[1:]) ** 2).mean())(x)

        return jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1])

    got = descend(lambda *a: swiglu_mlp(*a, implementation=implementation))(arrays[0])
    check([got], [float64(descend(plain)(arrays[0]))], BOUND)


def test_conditional_that_takes_the_layer_or_not(rng, implementation):
    """Residuals of a branch that did not run are zeros, not garbage."""
    x, *w = problem(rng, (4,), 8, 12)

    def f(op):
        def loss(flag, x, *w):
            return (jax.lax.cond(flag, lambda x: op(x, *w), lambda x: x, x) ** 2).mean()

        return jax.jit(jax.grad(loss, (1, 2, 3, 4)))

    for flag in (True, False):
        got = f(lambda *a: swiglu_mlp(*a, implementation=implementation))(flag, x, *w)
        check(got, [float64(a) for a in f(plain)(flag, x, *w)], BOUND)

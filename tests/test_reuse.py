"""One traced layer used several times with different sets of differentiated arguments.

JAX keeps one residual tree per traced custom_vjp call. A tree that depends on the set can give
gradients of zero without a word; every case here compares with plain JAX.
"""

import jax
import jax.numpy as jnp
import pytest
from support import BOUNDS, check, float64, plain, problem

from swiglu_jax import swiglu_mlp

WRAPS = {"jit": jax.jit, "checkpoint": jax.checkpoint, "both": lambda f: jax.jit(jax.checkpoint(f))}


def _loop_over_data(layer):
    """The first x is data, the later ones depend on the weights."""

    def loss(weights, x):
        for _ in range(3):
            x = layer(x, *weights)
        return (x**2).sum()

    return loss


def _stop_gradient_in_one_use(layer):
    def loss(weights, x):
        w_gate, w_up, w_down = weights
        once = layer(x, w_gate, jax.lax.stop_gradient(w_up), w_down)
        return (layer(once, w_gate, w_up, w_down) ** 2).sum()

    return loss


def _each_weight_alone_then_all(layer):
    def loss(weights, x):
        stop = jax.lax.stop_gradient
        total = 0.0
        for k in range(3):
            used = [w if j == k else stop(w) for j, w in enumerate(weights)]
            total = total + (layer(x, *used) ** 2).sum()
        return total + (layer(jnp.sin(weights[0][0]) * x, *weights) ** 2).sum()

    return loss


def _all_then_nothing(layer):
    def loss(weights, x):
        y = layer(layer(x, *weights), *weights)
        return (y * layer(x, *map(jax.lax.stop_gradient, weights))).sum()

    return loss


def _frozen_in_a_scan(layer):
    """The carry becomes differentiable only after the first pass over the body."""

    def loss(weights, x):
        def body(carry, _):
            return layer(carry, weights[0], jax.lax.stop_gradient(weights[1]), weights[2]), None

        y, _ = jax.lax.scan(body, x, None, length=3)
        return (layer(y, *weights) ** 2).sum()

    return loss


PROGRAMS = [
    _loop_over_data,
    _stop_gradient_in_one_use,
    _each_weight_alone_then_all,
    _all_then_nothing,
    _frozen_in_a_scan,
]


@pytest.mark.parametrize("outer", ["eager", "jitted"])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__.strip("_"))
def test_gradients_equal_plain_jax(rng, program, wrap, outer):
    x, *weights = problem(rng, (5,), width=8, hidden=12)
    gradients = []
    for op in (swiglu_mlp, plain):
        f = jax.grad(program(WRAPS[wrap](lambda *a, op=op: op(*a))))
        gradients.append((jax.jit(f) if outer == "jitted" else f)(weights, x))
    ours, theirs = gradients
    assert all(abs(float64(g)).max() > 0 for g in ours)
    check(ours, [float64(g) for g in theirs], 10 * BOUNDS["float32"])


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_of_a_shared_layer_with_respect_to_x_alone_and_all(rng, wrap):
    x, *weights = problem(rng, (5,), width=8, hidden=12)
    layer = WRAPS[wrap](lambda *a: swiglu_mlp(*a))
    reference = lambda *a: plain(*a)  # noqa: E731
    for argnums in ((0,), (1,), (0, 1, 2, 3), (3,), (2,), (2, 3)):
        f = lambda op, n=argnums: jax.grad(  # noqa: E731
            lambda *a: (op(*a) ** 2).sum(), argnums=n
        )(x, *weights)
        check(f(layer), [float64(g) for g in f(reference)], 10 * BOUNDS["float32"])

"""Derivatives beyond the first, and the clear error of forward mode."""

import jax
import jax.numpy as jnp
import pytest
from meshes import op
from narrow import check_narrow
from support import BOUNDS, LAYOUTS, check, float64, plain, problem

from swiglu_jax import swiglu_mlp

pytestmark = pytest.mark.usefixtures("on_cpu")

SIZES = ((3,), 4, 6)
BOUND = 50 * BOUNDS["float32"]


def _loss(f):
    return lambda *a: (jnp.sin(f(*a)) ** 2).sum()


def _compare(rng, transform, implementation, layout="OI"):
    arrays = problem(rng, *SIZES, layout=layout)
    got = jax.jit(transform(_loss(op(layout, implementation))))(*arrays)
    want = jax.jit(transform(_loss(lambda *a: plain(*a, layout))))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


def _grad_of_grad(outer, inner):
    """Gradient with respect to ``outer`` of the squared norm of the gradient for ``inner``."""

    def transform(loss):
        first = jax.grad(loss, inner)
        norm = lambda *a: sum((g**2).sum() for g in first(*a))  # noqa: E731
        return jax.grad(norm, outer)

    return transform


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grad_of_grad_of_everything(rng, implementation, layout):
    _compare(rng, _grad_of_grad((0, 1, 2, 3), (0, 1, 2, 3)), implementation, layout)


@pytest.mark.parametrize("outer", [(0,), (1,), (2,), (3,)])
@pytest.mark.parametrize("inner", [(0,), (2,), (3,), (2, 3)])
def test_grad_of_grad_of_parts(rng, outer, inner):
    _compare(rng, _grad_of_grad(outer, inner), "xla")


def test_reverse_over_reverse_hessian_vector_product(rng, implementation):
    def transform(loss):
        def product(*a):
            along = [jnp.cos(v) for v in a]
            first = jax.grad(loss, (0, 1, 2, 3))
            inner = lambda *b: sum(jnp.vdot(g, v) for g, v in zip(first(*b), along, strict=True))  # noqa: E731
            return jax.grad(inner, (0, 1, 2, 3))(*a)

        return product

    _compare(rng, transform, implementation)


def test_hessian_by_reverse_mode(rng):
    _compare(rng, lambda loss: jax.jacrev(jax.jacrev(loss, 0), 3), "xla")


def test_forward_over_reverse_hessian_vector_product(rng, implementation):
    """jax.jvp of a gradient: the backward rule's own operations all have forward mode."""

    def transform(loss):
        def product(*a):
            along = tuple(jnp.cos(v) for v in a)
            return jax.jvp(jax.grad(loss, (0, 1, 2, 3)), a, along)[1]

        return product

    arrays = problem(rng, *SIZES)
    ours = transform(_loss(op("OI", implementation)))
    got = jax.jit(ours)(*arrays)
    want = jax.jit(transform(_loss(plain)))(*arrays)
    check(got, [float64(a) for a in want], BOUND)


def test_third_derivative(rng):
    def transform(loss):
        second = _grad_of_grad((1,), (1,))(loss)
        return jax.grad(lambda *a: (second(*a)[0] ** 2).sum(), 0)

    _compare(rng, transform, "xla")


def test_under_checkpoint_and_scan(rng, implementation):
    def transform(loss):
        again = jax.checkpoint(loss)

        def scanned(*a):
            return jax.lax.scan(lambda c, _: (c + again(*a), None), 0.0, length=2)[0]

        return _grad_of_grad((0, 3), (1, 2))(scanned)

    _compare(rng, transform, implementation)


@pytest.mark.parametrize("dtype, layout", [("bfloat16", "OI"), ("float16", "IO")])
def test_narrow_dtypes(rng, fused_cpu, dtype, layout):
    arrays = problem(rng, (16,), 64, 96, dtype, layout)

    def program(f):
        return _grad_of_grad((0, 3), (1, 2))(
            lambda *a: (jnp.sin(f(*a)).astype(jnp.float32) ** 2).sum()
        )

    check_narrow(program, op(layout), lambda *a: plain(*a, layout), arrays)


@pytest.mark.parametrize("mode", ["jvp", "linearize", "jacfwd"])
def test_forward_mode_gives_jax_s_own_error(rng, mode):
    arrays = problem(rng, *SIZES)
    run = {
        "jvp": lambda: jax.jvp(swiglu_mlp, arrays, arrays),
        "linearize": lambda: jax.linearize(swiglu_mlp, *arrays)[1](*arrays),
        "jacfwd": lambda: jax.jacfwd(swiglu_mlp)(*arrays),
    }
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp function"):
        run[mode]()


def test_one_pull_serves_many_cotangents(rng, implementation):
    arrays = problem(rng, *SIZES)
    _, pull = jax.vjp(op("OI", implementation), *arrays)
    _, plain_pull = jax.vjp(plain, *arrays)
    for _ in range(3):
        dy = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)
        check(pull(dy), [float64(a) for a in plain_pull(dy)], BOUND)

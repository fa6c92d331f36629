"""GEMMs accumulate in at least float32, and follow the matmul precision in force at the call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import error, float64

from swiglu_jax import swiglu_mlp
from swiglu_jax._dot import contract

LONG = 1 << 15


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_long_sums_of_one_sign_are_as_good_as_their_rounding(rng, dtype):
    """A narrow accumulator stalls on such sums: its error grows with their length."""
    a = jnp.asarray(rng.uniform(0.5, 1.0, (16, LONG)) / LONG, dtype)
    b = jnp.asarray(rng.uniform(0.5, 1.0, (24, LONG)), dtype)
    want = float64(a) @ float64(b).T
    rounding = error(jnp.asarray(want, dtype), want)
    assert error(jax.jit(lambda a, b: contract(a, -1, b, -1))(a, b), want) <= 1.05 * rounding


def _precisions(f, *args) -> set[str]:
    text = jax.jit(f).lower(*args).as_text()
    return {line.split("precision = ")[1].split("]")[0] for line in text.splitlines()
            if "dot_general" in line and "precision = " in line}  # fmt: skip


def test_precision_set_inside_a_jitted_function_reaches_every_gemm():
    """Stages are lowered when the context is gone; they must remember it."""
    x, w, v = jnp.ones((4, 8)), jnp.ones((12, 8)), jnp.ones((8, 12))

    def step(x, w, v):
        with jax.default_matmul_precision("highest"):
            f = lambda *a: swiglu_mlp(*a).sum()  # noqa: E731
            return jax.grad(f, argnums=(0, 1, 2, 3))(x, w, w, v)

    assert _precisions(step, x, w, v) == {"[HIGHEST, HIGHEST"}


def test_default_precision_is_left_alone():
    x, w, v = jnp.ones((4, 8)), jnp.ones((12, 8)), jnp.ones((8, 12))
    grad = jax.grad(lambda *a: swiglu_mlp(*a).sum(), argnums=(0, 1, 2, 3))
    assert _precisions(lambda x, w, v: grad(x, w, w, v), x, w, v) <= {"[DEFAULT, DEFAULT"}


def test_float64_stays_float64(rng):
    with jax.enable_x64(True):
        x = jnp.asarray(rng.standard_normal((3, 8)))
        w = jnp.asarray(rng.standard_normal((12, 8)))
        text = str(jax.make_jaxpr(jax.grad(lambda x: swiglu_mlp(x, w, w, w.T).sum()))(x))
    assert "f64" in text
    assert "f32" not in text
    assert np.asarray(x).dtype == np.float64

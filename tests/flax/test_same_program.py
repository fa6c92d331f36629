"""A module's step is the op's own: the same program, and on a GPU the same time."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.timing import Contender, interleave
from swiglu_jax import swiglu_mlp
from swiglu_jax.flax import linen as swiglu_linen
from swiglu_jax.flax.nnx import SwiGLUMLP

OPERATION = re.compile(
    r"= \"?((?:stablehlo|chlo|call)[\w.]*).*?(tensor<[^>]*>)\s*(?:loc.*)?$", re.M
)


def op(width, hidden):
    """The op with its kernels in one tree, as a module has them."""

    def apply(kernels, x):
        names = ("gate_proj", "up_proj", "down_proj")
        return swiglu_mlp(x, *(kernels[n]["kernel"] for n in names), weight_layout="IO")

    params = swiglu_linen.SwiGLUMLP(hidden, param_dtype=jnp.bfloat16)
    return apply, params.init(jax.random.key(0), jnp.ones((1, width), jnp.bfloat16))["params"]


def nnx_module(width, hidden):
    mlp = SwiGLUMLP(width, hidden, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(mlp)
    return lambda state, x: nnx.merge(graphdef, state)(x), state


def linen_module(width, hidden):
    mlp = swiglu_linen.SwiGLUMLP(hidden, param_dtype=jnp.bfloat16)
    params = mlp.init(jax.random.key(0), jnp.ones((1, width), jnp.bfloat16))
    return mlp.apply, params


def step_of(make, width, hidden):
    """The jitted result and gradients of parameters and x, and the parameters."""
    apply, params = make(width, hidden)

    @jax.jit
    def step(params, x, dy):
        y, pull = jax.vjp(apply, params, x)
        return y, *pull(dy)

    return step, params


def operations(step, params, x):
    """How often each operation stands in the program that XLA is given, by its result's type."""
    text = step.trace(params, x, x).lower(lowering_platforms=("cuda",)).as_text()
    return Counter(OPERATION.findall(text))


@pytest.mark.parametrize("make", [nnx_module, linen_module])
def test_the_program_is_the_ops_own(make):
    x = jnp.ones((4, 8, 64), jnp.bfloat16)
    want = operations(*step_of(op, 64, 96), x)
    assert sum(n for (name, _), n in want.items() if "dot_general" in name) >= 9
    assert operations(*step_of(make, 64, 96), x) == want


@pytest.mark.gpu
def test_a_step_takes_no_longer_than_the_ops_own():
    tokens, width, hidden = 8192, 2048, 8192
    x, dy = (jax.random.normal(jax.random.key(k), (tokens, width), jnp.bfloat16) for k in range(2))

    def contender(make):
        step, params = step_of(make, width, hidden)

        def run(launches):
            for _ in range(launches):
                result = step(params, x, dy)
            jax.block_until_ready(result)

        return Contender(make.__name__, run)

    made = [contender(make) for make in (op, nnx_module, linen_module)]
    timings = interleave(made, rounds=9, sample_seconds=0.05)
    for name in ("nnx_module", "linen_module"):
        assert timings[name].median_ms <= 1.02 * timings["op"].median_ms

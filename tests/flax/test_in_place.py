"""No hidden copy: a module's lowered step holds no transpose of a kernel, on the CPU or CUDA."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from swiglu_jax.flax import linen as swiglu_linen
from swiglu_jax.flax.nnx import SwiGLUMLP

FEATURES, HIDDEN = 64, 96
KERNELS = {f"{a}x{b}" for a, b in ((FEATURES, HIDDEN), (HIDDEN, FEATURES))}


def nnx_step():
    mlp = SwiGLUMLP(FEATURES, HIDDEN, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(mlp)
    return lambda state, x: nnx.merge(graphdef, state)(x), state


def linen_step():
    mlp = swiglu_linen.SwiGLUMLP(HIDDEN, dtype=jnp.bfloat16)
    return mlp.apply, mlp.init(jax.random.key(0), jnp.ones((1, FEATURES)))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("step", [nnx_step, linen_step])
def test_no_transpose_of_a_kernel(step, platform):
    apply, params = step()

    def loss(params, x):
        return apply(params, x).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((4, 8, FEATURES), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(params, x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in text
    transposed = re.findall(r"stablehlo\.transpose.*tensor<(\d+x\d+)x", text)
    assert not KERNELS & set(transposed), text

"""No hidden copy: a module's lowered step holds no transpose of a kernel, on any route."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from swiglu_jax import _device
from swiglu_jax.flax import linen as swiglu_linen
from swiglu_jax.flax.nnx import SwiGLUMLP

FEATURES, HIDDEN, LAYERS = 256, 512, 3
KERNELS = {f"{a}x{b}" for a, b in ((FEATURES, HIDDEN), (HIDDEN, FEATURES))}
KERNELS |= {f"{LAYERS}x{kernel}" for kernel in KERNELS}


def nnx_step(**options):
    mlp = SwiGLUMLP(FEATURES, HIDDEN, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    graphdef, state = nnx.split(mlp)
    return lambda state, x: nnx.merge(graphdef, state)(x), state


def nnx_scan_step(**options):
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return SwiGLUMLP(FEATURES, HIDDEN, dtype=jnp.bfloat16, rngs=rngs, **options)

    graphdef, state = nnx.split(create(nnx.Rngs(0)))
    forward = nnx.scan(lambda x, mlp: x + mlp(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return lambda state, x: forward(x, nnx.merge(graphdef, state)), state


def linen_step(**options):
    mlp = swiglu_linen.SwiGLUMLP(HIDDEN, dtype=jnp.bfloat16, **options)
    params = swiglu_linen.SwiGLUMLP(HIDDEN).init(jax.random.key(0), jnp.ones((1, FEATURES)))
    return mlp.apply, params


class LinenStack(nn.Module):
    options: dict

    @nn.compact
    def __call__(self, x):
        def layer(stack, x, _):
            mlp = swiglu_linen.SwiGLUMLP(HIDDEN, dtype=jnp.bfloat16, name="mlp", **self.options)
            return x + mlp(x), None

        scan = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return scan(self, x, None)[0]


def linen_scan_step(**options):
    stack = LinenStack(options)
    params = LinenStack({}).init(jax.random.key(0), jnp.ones((1, FEATURES), jnp.bfloat16))
    return stack.apply, params


def lowered_step(step, platform, **options):
    apply, params = step(**options)

    def loss(params, x):
        return apply(params, x).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((4, 8, FEATURES), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(params, x)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def transposed_kernels(text):
    """Shapes on either side of a transpose, so far as they are those of kernels, stacked or not."""
    shapes = set()
    for line in re.findall(r"stablehlo\.transpose.*", text):
        shapes |= set(re.findall(r"tensor<(\d+(?:x\d+)+)x", line))
    return shapes & KERNELS


STEPS = [nnx_step, nnx_scan_step, linen_step, linen_scan_step]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("step", STEPS)
def test_no_transpose_of_a_kernel(step, platform):
    text = lowered_step(step, platform)
    assert "dot_general" in text
    assert not transposed_kernels(text), text


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("step", STEPS)
def test_fused_kernels_read_kernels_in_place(step, target, monkeypatch):
    config = dataclasses.replace(_device.config, target=target)
    monkeypatch.setattr(_device, "config", config)
    text = lowered_step(step, "cuda", implementation="fused")
    stages = r"custom_call @swiglu_jax_\w+_(gate_up|down_dswiglu)"
    calls = [line for line in text.splitlines() if re.search(stages, line)]
    assert len(calls) == 2, calls
    for call in calls:
        assert 'weight_layout = "IO"' in call
        kernels = re.findall(rf"tensor<({FEATURES}x{HIDDEN}|{HIDDEN}x{FEATURES})xbf16>", call)
        assert kernels, call
    assert not transposed_kernels(text), text


def test_a_transpose_would_be_seen():
    text = jax.jit(lambda w: w.T @ w).lower(jnp.ones((FEATURES, HIDDEN))).as_text()
    assert transposed_kernels(text)

"""Frozen bases: low-rank adapters beside frozen kernels, and the memory that this spares.

Memory is that of the compiled gradient of a scan over layers, by the difference between two
numbers of layers, in tensors of [M, I] a layer. The residual stream, one [M, H] a layer, is kept
in any case and not counted.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_flax import PlainNNX

from swiglu_jax.flax.nnx import SwiGLUMLP

TOKENS, FEATURES, HIDDEN, RANK = 256, 16, 512, 2
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
TRAINED = {
    "everything": nnx.Param,
    "adapters alone": nnx.LoRAParam,
    "adapters and `up_proj`": nnx.Any(nnx.LoRAParam, nnx.PathContains("up_proj")),
    "adapters and `down_proj`": nnx.Any(nnx.LoRAParam, nnx.PathContains("down_proj")),
}


class Adapted(nnx.Module):
    """A layer on the residual stream, with a low-rank update beside its MLP."""

    def __init__(self, kind, rngs: nnx.Rngs):
        self.mlp = kind(FEATURES, HIDDEN, rngs=rngs)
        self.update = nnx.LoRA(FEATURES, RANK, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(x) + self.update(x)


def stack(kind, layers: int, seed: int = 0) -> nnx.Module:
    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs: nnx.Rngs) -> Adapted:
        return Adapted(kind, rngs)

    return create(nnx.Rngs(seed))


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return jnp.sum(jnp.square(forward(x, model)))


def gradient(wrt):
    return nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, wrt)))


@functools.cache
def tensors_kept(kind, wrt: str) -> float:
    """[M, I] tensors a layer, less the one [M, H] of the residual stream."""

    def temporaries(layers: int) -> int:
        x = jnp.zeros((TOKENS, FEATURES))
        step = gradient(TRAINED[wrt]).lower(stack(kind, layers), x).compile()
        return step.compiled.memory_analysis().temp_size_in_bytes

    per_layer = (temporaries(12) - temporaries(4)) / 8 / 4  # float32 elements
    return (per_layer - TOKENS * FEATURES) / (TOKENS * HIDDEN)


@pytest.mark.parametrize("wrt", TRAINED)
def test_gradients_are_those_of_plain_flax_and_of_the_filter(rng, wrt):
    seed = int(rng.integers(2**31))
    x = jnp.asarray(rng.standard_normal((7, FEATURES)), jnp.float32)
    got, want = (
        nnx.to_pure_dict(gradient(TRAINED[wrt])(stack(kind, 3, seed), x))
        for kind in (SwiGLUMLP, PlainNNX)
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    kernels = {"gate_proj", "up_proj", "down_proj"} & set(got.get("mlp", {}))
    names = (
        {"gate_proj", "up_proj", "down_proj"}
        if wrt == "everything"
        else set(re.findall("`(.*?)`", wrt))
    )
    assert kernels == names
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * float(jnp.abs(b).max() + 1))


@pytest.mark.parametrize("wrt", TRAINED)
def test_two_tensors_a_layer_are_kept_where_plain_flax_keeps_five_or_more(wrt):
    ours, plain = tensors_kept(SwiGLUMLP, wrt), tensors_kept(PlainNNX, wrt)
    assert ours < 2.2
    assert plain - ours > 2.8


def test_a_frozen_base_keeps_no_input():
    """x is kept for the weight gradients of gate and up, and for nothing else."""
    share = FEATURES / HIDDEN  # of one [M, H] in units of [M, I]
    whole, adapters = (tensors_kept(SwiGLUMLP, w) for w in ("everything", "adapters alone"))
    assert whole - adapters >= 0.9 * share


def test_the_guide_has_these_numbers():
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE.read_text(), re.M)
    told = {what: (float(plain), float(ours)) for what, plain, ours in rows}
    assert set(told) == set(TRAINED)
    for wrt, (plain, ours) in told.items():
        assert tensors_kept(PlainNNX, wrt) == pytest.approx(plain, abs=0.15)
        assert tensors_kept(SwiGLUMLP, wrt) == pytest.approx(ours, abs=0.15)

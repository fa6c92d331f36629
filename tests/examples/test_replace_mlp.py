"""Replacing the MLPs of a model keeps its values and gradients, and spares memory."""

import math

import pytest
from flax import nnx

import replace_mlp
from swiglu_jax.flax.nnx import SwiGLUMLP


def test_replacing_keeps_values_and_spares_memory(rng):
    seed = int(rng.integers(2**31))
    result = replace_mlp.run(3, 32, 128, batch=4, length=32, dtype="float32", seed=seed)
    assert result["replaced"] == 1
    assert math.isclose(result["loss"], result["loss_after"], rel_tol=1e-5)
    assert result["largest_gradient_difference"] < 1e-4
    hidden = 3 * (4 * 32) * 128 * 4
    assert result["temporary_bytes"] - result["temporary_bytes_after"] > 2 * hidden


@pytest.mark.gpu
def test_replacing_on_a_gpu(rng):
    seed = int(rng.integers(2**31))
    result = replace_mlp.run(3, 256, 1024, batch=8, length=128, dtype="bfloat16", seed=seed)
    assert math.isclose(result["loss"], result["loss_after"], rel_tol=1e-2)
    assert result["largest_gradient_difference"] < 3e-2
    hidden = 3 * (8 * 128) * 1024 * 2
    assert result["temporary_bytes"] - result["temporary_bytes_after"] > 2 * hidden


def test_every_mlp_is_found_and_keeps_its_kernels():
    layers = nnx.List(
        [replace_mlp.Layer(8, 16, 4, dtype="float32", rngs=nnx.Rngs(i)) for i in range(3)]
    )
    kernels = [layer.mlp.up_proj.kernel for layer in layers]
    assert replace_mlp.replace_mlps(layers) == 3
    for layer, kernel in zip(layers, kernels, strict=True):
        assert isinstance(layer.mlp, SwiGLUMLP)
        assert layer.mlp.up_proj.kernel[...] is kernel[...]

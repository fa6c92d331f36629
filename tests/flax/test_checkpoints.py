"""Checkpoints: Orbax there and back, and tensors stored as PyTorch and Hugging Face store them."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from plain_flax import PlainNNX
from support import error, float64

from swiglu_jax.flax import kernels_from_torch, kernels_to_torch
from swiglu_jax.flax import linen as swiglu_linen
from swiglu_jax.flax.nnx import SwiGLUMLP

FEATURES, HIDDEN = 12, 20
PREFIX = "model.layers.7.mlp."


@pytest.fixture
def tensors(rng):
    shapes = {"gate_proj": (HIDDEN, FEATURES), "up_proj": (HIDDEN, FEATURES)}
    shapes["down_proj"] = (FEATURES, HIDDEN)
    made = {f"{PREFIX}{n}.weight": rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    return made | {"model.layers.7.self_attn.q_proj.weight": np.ones((3, 3), np.float32)}


def fused(tensors):
    gate, up = (tensors[f"{PREFIX}{n}.weight"] for n in ("gate_proj", "up_proj"))
    return {
        f"{PREFIX}gate_up_proj.weight": np.concatenate([gate, up]),
        f"{PREFIX}down_proj.weight": tensors[f"{PREFIX}down_proj.weight"],
    }


def as_torch_computes(tensors, x):
    """The formula of Hugging Face's LlamaMLP, in float64 NumPy."""
    gate, up, down = (
        float64(tensors[f"{PREFIX}{n}.weight"]) for n in ("gate_proj", "up_proj", "down_proj")
    )
    a = float64(x) @ gate.T
    return (a / (1 + np.exp(-a)) * (float64(x) @ up.T)) @ down.T


@pytest.mark.parametrize("form", ["apart", "fused"])
def test_modules_compute_with_converted_tensors(rng, tensors, form):
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    kernels = kernels_from_torch(fused(tensors) if form == "fused" else tensors, PREFIX)
    want = as_torch_computes(tensors, x)

    mlp = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
    nnx.update(mlp, kernels)
    assert error(mlp(x), want) <= 1e-5

    linen = swiglu_linen.SwiGLUMLP(HIDDEN)
    assert error(linen.apply({"params": kernels}, x), want) <= 1e-5


def test_conversion_there_and_back(tensors):
    back = kernels_to_torch(kernels_from_torch(tensors, PREFIX), PREFIX)
    assert set(back) == {name for name in tensors if name.startswith(PREFIX)}
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, tensors[name])


def test_module_to_torch(tensors):
    mlp = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
    written = kernels_to_torch(nnx.to_pure_dict(nnx.state(mlp)))
    np.testing.assert_array_equal(written["down_proj.weight"], mlp.down_proj.kernel[...].T)


def test_dtype(tensors):
    half = {name: jnp.asarray(t, jnp.bfloat16) for name, t in tensors.items()}
    kept, cast = kernels_from_torch(half, PREFIX), kernels_from_torch(half, PREFIX, dtype="float32")
    assert kept["up_proj"]["kernel"].dtype == jnp.bfloat16
    assert cast["up_proj"]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "error_type", "match"),
    [
        (lambda t: t.pop(f"{PREFIX}up_proj.weight"), KeyError, "up_proj.weight"),
        (lambda t: t.update({f"{PREFIX}up_proj.bias": 0}), ValueError, "up_proj.bias"),
        (
            lambda t: t.update({f"{PREFIX}down_proj.weight": np.ones((HIDDEN, FEATURES))}),
            ValueError,
            r"down_proj.weight: expected \(12, 20\)",
        ),
        (lambda t: t.update({f"{PREFIX}gate_proj.weight": np.ones(3)}), ValueError, "gate_proj"),
        (
            lambda t: t.update({f"{PREFIX}gate_up_proj.weight": np.ones((2 * HIDDEN, FEATURES))}),
            ValueError,
            "alone and within",
        ),
    ],
)
def test_bad_tensors_are_named(tensors, change, error_type, match):
    change(tensors)
    with pytest.raises(error_type, match=match):
        kernels_from_torch(tensors, PREFIX)


def test_odd_fused_tensor(tensors):
    odd = fused(tensors)
    odd[f"{PREFIX}gate_up_proj.weight"] = np.ones((2 * HIDDEN + 1, FEATURES))
    with pytest.raises(ValueError, match=r"gate_up_proj\.weight: expected"):
        kernels_from_torch(odd, PREFIX)


def test_orbax_round_trip(rng, tmp_path):
    mlp = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(int(rng.integers(2**31))))
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "mlp", nnx.state(mlp))
        checkpointer.wait_until_finished()
        abstract = nnx.eval_shape(lambda: SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        restored = nnx.merge(graphdef, checkpointer.restore(tmp_path / "mlp", state))
    np.testing.assert_array_equal(restored(x), mlp(x))


def test_a_checkpoint_of_plain_flax_layers_fits(rng, tmp_path):
    plain = PlainNNX(FEATURES, HIDDEN, rngs=nnx.Rngs(int(rng.integers(2**31))))
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    mlp = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", nnx.state(plain, nnx.Param))
        checkpointer.wait_until_finished()
        nnx.update(mlp, checkpointer.restore(tmp_path / "plain", nnx.state(mlp, nnx.Param)))
    assert error(mlp(x), np.asarray(jax.jit(lambda x: plain(x))(x), np.float64)) <= 1e-5

"""Checkpoints: Orbax there and back, and tensors stored as PyTorch and Hugging Face store them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType
from plain_flax import PlainNNX
from support import error, float64

from swiglu_jax.flax import kernels_from_fused, kernels_from_torch, kernels_to_torch
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


class TorchTensor:
    """As a tensor of PyTorch shows itself: dtypes of its own, and not all of them for NumPy."""

    def __init__(self, array):
        self.shape, self.dtype, self._array = array.shape, f"torch.{array.dtype}", array

    def __array__(self, dtype=None, copy=None):
        if self._array.dtype.name.startswith(("bfloat16", "float8")):
            raise TypeError(f"Got unsupported ScalarType {self._array.dtype}")
        return np.asarray(self._array, dtype)

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


FORMS = {"numpy": np.asarray, "jax": jnp.asarray, "torch": lambda a: TorchTensor(jnp.asarray(a))}
FLOATING = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_dtypes_of_each_tensor_are_kept(tensors, form, dtype):
    """One by one: an MLP whose kernels differ in dtype is as fine."""
    name = f"{PREFIX}up_proj.weight"
    given = {n: FORMS[form](t) for n, t in tensors.items()}
    given[name] = FORMS[form](tensors[name].astype(dtype))
    kernels = kernels_from_torch(given, PREFIX)
    assert {n: k["kernel"].dtype for n, k in kernels.items()} == {
        "gate_proj": jnp.float32, "up_proj": jnp.dtype(dtype), "down_proj": jnp.float32,
    }  # fmt: skip
    np.testing.assert_array_equal(
        float64(kernels["up_proj"]["kernel"]), float64(tensors[name].astype(dtype)).T
    )


QUANTIZED = ["int8", "uint8", "int4", "uint4", "int32", "int64", "bool", "complex64", "V2",
             "float4_e2m1fn", "float8_e8m0fnu"]  # fmt: skip


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "gate_up_proj"])
def test_tensors_that_are_not_floating_are_refused(tensors, name, dtype):
    given = fused(tensors) if name == "gate_up_proj" else tensors
    name = f"{PREFIX}{name}.weight"
    given |= {name: np.zeros(given[name].shape, jnp.dtype(dtype))}
    for asked in (None, "float32"):
        with pytest.raises(TypeError, match=rf"^{name}: expected ") as e:
            kernels_from_torch(given, PREFIX, dtype=asked)
        assert str(jnp.dtype(dtype)) in str(e.value)


@pytest.mark.parametrize(
    "value", [1.0, None, [[1.0]], jax.ShapeDtypeStruct((HIDDEN, FEATURES), "float32"),
              np.ma.zeros((HIDDEN, FEATURES)), np.empty((HIDDEN, FEATURES), object)],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_what_is_no_array_is_refused(tensors, value):
    name = f"{PREFIX}up_proj.weight"
    with pytest.raises(
        TypeError, match=rf"^{name}: expected an array, got .*{type(value).__name__}"
    ):
        kernels_from_torch(tensors | {name: value}, PREFIX)


BESIDE = [  # as GPTQ, AWQ, bitsandbytes, compressed-tensors, PEFT, BitNet and MoE name them
    "gate_proj.weight_scale", "gate_proj.weight_scale_inv", "up_proj.input_scale",
    "down_proj.weight_zero_point", "down_proj.qweight", "up_proj.scales", "up_proj.qzeros",
    "gate_proj.g_idx", "down_proj.weight.absmax", "down_proj.SCB", "up_proj.lora_A.weight",
    "gate_up_proj.weight_scale", "gate_proj.bias", "gate_up_proj.bias", "ffn_sub_norm.weight",
    "gate.weight", "experts.0.gate_proj.weight", "act_fn.alpha", "gate_projection.weight",
]  # fmt: skip


@pytest.mark.parametrize("prefix", [PREFIX, ""])
@pytest.mark.parametrize("name", BESIDE)
def test_nothing_below_the_prefix_is_lost(tensors, name, prefix):
    """What belongs to the weights, or to the MLP beside them, is not left out in silence."""
    for form in (tensors, fused(tensors)):
        given = {n.removeprefix(PREFIX): t for n, t in form.items() if n.startswith(PREFIX)}
        given = {f"{prefix}{n}": t for n, t in given.items()}
        with pytest.raises(ValueError, match=rf"^{prefix}{name}: ") as e:
            kernels_from_torch(given | {f"{prefix}{name}": np.float32(2)}, prefix)
        assert "not supported" in str(e.value) or f"{prefix}up_proj.weight" in str(e.value)


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float4_e2m1fn", "bf16"])
def test_a_dtype_asked_that_no_kernel_can_have(tensors, dtype):
    with pytest.raises(TypeError, match=rf"^dtype: expected a floating dtype .* got {dtype}"):
        kernels_from_torch(tensors, PREFIX, dtype=dtype)
    with pytest.raises(TypeError, match=rf"^dtype: expected a floating dtype .* got {dtype}"):
        kernels_from_fused({}, dtype=dtype)


CONVERTERS = {
    "tensors": kernels_from_torch,
    "kernels": kernels_from_fused,
    "kernels to torch": kernels_to_torch,
}


@pytest.mark.parametrize("name", CONVERTERS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "{}: expected a mapping, got NoneType"),
        ([("gate_proj.weight", 1)], "{}: expected a mapping, got list"),
        (np.ones(3), "{}: expected a mapping, got ndarray"),
        ({0: {}}, "a key of {}: expected text, got 0"),
        ({("gate_proj", "kernel"): {}}, "a key of {}: expected text, got ('gate_proj', 'kernel')"),
    ],
    ids=repr,
)
def test_what_is_no_mapping_from_names(name, given, said):
    with pytest.raises(TypeError, match=f"^{re.escape(said.format(name.split()[0]))}$"):
        CONVERTERS[name](given)


@pytest.mark.parametrize("prefix", [None, 3, b"model."])
def test_a_prefix_that_is_no_text(tensors, prefix):
    for convert in (kernels_from_torch, kernels_to_torch):
        with pytest.raises(TypeError, match=f"^prefix: expected text, got {prefix}"):
            convert(tensors, prefix)


def test_kernels_are_made_abstractly_too(tensors):
    """As a model's shapes are asked before its checkpoint is read."""
    shapes = jax.eval_shape(lambda t: kernels_from_torch(t, PREFIX), tensors)
    assert shapes["down_proj"]["kernel"].shape == (HIDDEN, FEATURES)


def test_odd_fused_tensor(tensors):
    odd = fused(tensors)
    odd[f"{PREFIX}gate_up_proj.weight"] = np.ones((2 * HIDDEN + 1, FEATURES))
    with pytest.raises(ValueError, match=r"gate_up_proj\.weight: expected"):
        kernels_from_torch(odd, PREFIX)


@pytest.mark.parametrize("stacked", [(), (3,)])
@pytest.mark.parametrize("form", ["[H, 2 I]", "[H, 2, I]"])
def test_fused_flax_kernels(rng, stacked, form):
    """Against the fused MLP itself: one product, halves apart, as models with such a kernel do."""
    fused = rng.standard_normal((*stacked, FEATURES, 2 * HIDDEN), np.float32)
    down = rng.standard_normal((*stacked, HIDDEN, FEATURES), np.float32)
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    gate, up = np.split(float64(x) @ float64(fused), 2, axis=-1)
    want = (gate / (1 + np.exp(-gate)) * up) @ float64(down)

    shape = (*stacked, FEATURES, 2, HIDDEN) if form == "[H, 2, I]" else fused.shape
    kernels = {"gate_up_proj": {"kernel": fused.reshape(shape)}, "down_proj": {"kernel": down}}
    params = kernels_from_fused(kernels)
    apply = swiglu_linen.SwiGLUMLP(HIDDEN).apply
    for _ in stacked:
        apply = jax.vmap(apply, in_axes=(0, None))
    assert error(apply({"params": params}, x), want) <= 1e-5


@pytest.mark.parametrize(
    ("change", "error_type", "match"),
    [
        (lambda k: k.pop("down_proj"), KeyError, "down_proj/kernel"),
        (lambda k: k["gate_up_proj"].update(bias=0), ValueError, "gate_up_proj/bias"),
        (lambda k: k["gate_up_proj"].update(kernel=np.ones((12, 39))), ValueError, r"\(12, 39\)"),
        (lambda k: k["gate_up_proj"].update(kernel=np.ones((40, 12))), ValueError, "expected"),
        (lambda k: k["down_proj"].update(kernel=np.ones(12)), ValueError, r"got \(12,\)"),
        (lambda k: k["gate_up_proj"].pop("kernel"), KeyError, "gate_up_proj/kernel"),
        (
            lambda k: k.update(down_proj=k["down_proj"]["kernel"]),
            TypeError,
            "^down_proj: expected a mapping, got ndarray",
        ),
        (
            lambda k: k["down_proj"].update(scale=1),
            ValueError,
            "^down_proj/scale: expected nothing",
        ),
        (lambda k: k.update(norm={"scale": 1}), ValueError, "^norm/scale: expected nothing but"),
        (
            lambda k: k.update(up_proj=k["down_proj"]),
            ValueError,
            "^up_proj/kernel: expected nothing",
        ),
        (
            lambda k: k["down_proj"].update(kernel=np.ones((20, 12), np.int8)),
            TypeError,
            "^down_proj/kernel: expected a floating dtype .* got int8",
        ),
    ],
)
def test_bad_fused_kernels_are_named(change, error_type, match):
    kernels = {
        "gate_up_proj": {"kernel": np.ones((FEATURES, 2 * HIDDEN))},
        "down_proj": {"kernel": np.ones((HIDDEN, FEATURES))},
    }
    change(kernels)
    with pytest.raises(error_type, match=match):
        kernels_from_fused(kernels)


@pytest.mark.parametrize(
    ("change", "error_type", "match"),
    [
        (lambda k: k.pop("up_proj"), KeyError, "up_proj/kernel"),
        (lambda k: k["up_proj"].update(bias=0), ValueError, "^up_proj/bias: .*not supported"),
        (lambda k: k["up_proj"].update(scale=0), ValueError, "^up_proj/scale: expected nothing"),
        (lambda k: k.update(norm={"scale": 1}), ValueError, "^norm/scale: expected nothing but"),
        (lambda k: k["down_proj"].update(kernel=np.ones((12, 20))), ValueError,
         r"^down_proj/kernel: expected \(20, 12\).*got \(12, 20\)"),
        (lambda k: k["gate_proj"].update(kernel=np.ones(3)), ValueError, "^gate_proj/kernel: expe"),
        (lambda k: k["gate_proj"].update(kernel=np.ones((12, 20), int)), TypeError,
         "^gate_proj/kernel: expected a floating dtype"),
    ],
)  # fmt: skip
def test_nothing_is_lost_on_the_way_to_torch(change, error_type, match):
    kernels = {n: {"kernel": np.ones((FEATURES, HIDDEN))} for n in ("gate_proj", "up_proj")}
    kernels["down_proj"] = {"kernel": np.ones((HIDDEN, FEATURES))}
    assert len(kernels_to_torch(kernels)) == 3
    change(kernels)
    with pytest.raises(error_type, match=match):
        kernels_to_torch(kernels)


def test_layers_of_a_checkpoint_stack_for_a_scan(rng):
    shapes = {"gate_proj": (HIDDEN, FEATURES), "up_proj": (HIDDEN, FEATURES)}
    shapes["down_proj"] = (FEATURES, HIDDEN)
    tensors = {
        f"model.layers.{k}.mlp.{n}.weight": 0.3 * rng.standard_normal(s, np.float32)
        for k in range(3)
        for n, s in shapes.items()
    }
    layers = [kernels_from_torch(tensors, f"model.layers.{k}.mlp.") for k in range(3)]

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return SwiGLUMLP(FEATURES, HIDDEN, rngs=rngs)

    stack = create(nnx.Rngs(0))
    nnx.update(stack, jax.tree.map(lambda *k: jnp.stack(k), *layers))
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    forward = nnx.scan(lambda x, mlp: mlp(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    want = float64(x)
    for k in range(3):
        names = {n: tensors[f"model.layers.{k}.mlp.{n}.weight"] for n in shapes}
        want = as_torch_computes({f"{PREFIX}{n}.weight": t for n, t in names.items()}, want)
    assert error(forward(x, stack), want) <= 1e-5


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


def test_orbax_round_trip_of_linen_parameters(rng, tmp_path):
    module = swiglu_linen.SwiGLUMLP(HIDDEN)
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    variables = module.init(jax.random.key(int(rng.integers(2**31))), x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "mlp", variables)
        checkpointer.wait_until_finished()
        abstract = jax.eval_shape(module.init, jax.random.key(0), x)
        restored = checkpointer.restore(tmp_path / "mlp", abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(variables)
    np.testing.assert_array_equal(module.apply(restored, x), module.apply(variables, x))


def test_a_checkpoint_is_restored_onto_a_mesh(rng, tmp_path):
    """Saved whole, restored in the shards that the kernels' own axis names ask for."""
    mlp = SwiGLUMLP(FEATURES, 24, rngs=nnx.Rngs(int(rng.integers(2**31))))
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    mesh = jax.make_mesh((2, 4), ("embed", "mlp"), axis_types=(AxisType.Auto,) * 2)

    def create():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        return SwiGLUMLP(FEATURES, 24, kernel_init=init, rngs=nnx.Rngs(0))

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "mlp", nnx.state(mlp))
        checkpointer.wait_until_finished()
        with jax.set_mesh(mesh):
            graphdef, state = nnx.split(nnx.eval_shape(create))
            shards = nnx.get_named_sharding(state, mesh)
            asked = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shards
            )
            restored = nnx.merge(graphdef, checkpointer.restore(tmp_path / "mlp", asked))
            y = jax.jit(lambda x: restored(x))(x)
    down = restored.down_proj.kernel[...]
    assert down.sharding.shard_shape(down.shape) == (24 // 4, FEATURES // 2)
    assert error(y, float64(mlp(x))) <= 1e-5


def test_a_checkpoint_of_plain_flax_layers_fits(rng, tmp_path):
    plain = PlainNNX(FEATURES, HIDDEN, rngs=nnx.Rngs(int(rng.integers(2**31))))
    x = jnp.asarray(rng.standard_normal((5, FEATURES)), jnp.float32)
    mlp = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", nnx.state(plain, nnx.Param))
        checkpointer.wait_until_finished()
        nnx.update(mlp, checkpointer.restore(tmp_path / "plain", nnx.state(mlp, nnx.Param)))
    assert error(mlp(x), np.asarray(jax.jit(lambda x: plain(x))(x), np.float64)) <= 1e-5


def test_stacked_kernels_are_written_layer_by_layer():
    rng = np.random.default_rng()
    shapes = {"gate_proj": (3, 8, 12), "up_proj": (3, 8, 12), "down_proj": (3, 12, 8)}
    kernels = {n: {"kernel": rng.normal(size=s).astype(np.float32)} for n, s in shapes.items()}
    stacked = kernels_to_torch(kernels)
    for layer in range(3):
        alone = {n: {"kernel": k["kernel"][layer]} for n, k in kernels.items()}
        for name, weight in kernels_to_torch(alone).items():
            np.testing.assert_array_equal(stacked[name][layer], weight)

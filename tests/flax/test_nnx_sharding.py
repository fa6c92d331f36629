"""Axis names and sharding metadata of the NNX module, as nnx.Linear takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import error

from swiglu_jax.flax._mlp import reversed_axes
from swiglu_jax.flax.nnx import SwiGLUMLP

FEATURES, HIDDEN = 16, 32
NAMES = ("embed", "mlp")
RULES = (("embed", None), ("mlp", "tensor"), ("batch", "data"))

partitioned = nnx.with_partitioning(nnx.initializers.lecun_normal(), NAMES)
WAYS = {
    "kernel_init": {"kernel_init": partitioned},
    "kernel_metadata": {"kernel_metadata": {"out_sharding": NAMES}},
    "both inits": {
        "kernel_init": partitioned,
        "down_kernel_init": nnx.with_partitioning(nnx.initializers.zeros_init(), NAMES[::-1]),
    },
}


def names_of(model):
    projections = {n: getattr(model, n) for n in ("gate_proj", "up_proj", "down_proj")}
    return {n: p.kernel.get_metadata("out_sharding") for n, p in projections.items()}


@pytest.fixture
def names_alone():
    """Axis names that no mesh has: Flax would shard each kernel as it is created."""
    with nnx.use_eager_sharding(False):
        yield


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("names_alone")
def test_axis_names(way):
    model = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(0), **WAYS[way])
    assert names_of(model) == {"gate_proj": NAMES, "up_proj": NAMES, "down_proj": NAMES[::-1]}
    specs = nnx.get_partition_spec(nnx.state(model))
    assert specs["down_proj"]["kernel"].get_value() == PartitionSpec("mlp", "embed")


@pytest.mark.usefixtures("names_alone")
def test_other_metadata_is_kept():
    metadata = {"out_sharding": NAMES, "note": "frozen"}
    model = SwiGLUMLP(FEATURES, HIDDEN, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    for projection in (model.gate_proj, model.up_proj, model.down_proj):
        assert projection.kernel.get_metadata("note") == "frozen"


@pytest.mark.usefixtures("names_alone")
def test_axis_names_under_vmap():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs):
        return SwiGLUMLP(FEATURES, HIDDEN, kernel_init=partitioned, rngs=rngs)

    names = names_of(create(nnx.Rngs(0)))
    assert names["up_proj"] == ("layers", "embed", "mlp")
    assert names["down_proj"] == ("layers", "mlp", "embed")


def test_kernels_are_created_sharded_and_give_the_same(rng, mesh):
    seed = int(rng.integers(2**31))
    x = jnp.asarray(rng.standard_normal((8, FEATURES)), jnp.float32)
    alone = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(seed))

    @nnx.jit
    def create():
        metadata = {"out_sharding": NAMES, "sharding_rules": RULES}
        return SwiGLUMLP(FEATURES, HIDDEN, kernel_metadata=metadata, rngs=nnx.Rngs(seed))

    def loss(model, x):
        return jnp.sum(jnp.square(model(x)))

    with jax.set_mesh(mesh):
        model = create()
        assert model.gate_proj.kernel[...].sharding.spec == PartitionSpec(None, "tensor")
        assert model.down_proj.kernel[...].sharding.spec[0] == "tensor"
        spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        grads = nnx.jit(nnx.grad(loss))(model, spread)
    want = nnx.grad(loss)(alone, x)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert error(got, np.asarray(expected, np.float64)) <= 1e-5
    shard = grads.up_proj.kernel[...].sharding.shard_shape((FEATURES, HIDDEN))
    assert shard == (FEATURES, HIDDEN // 4)


@pytest.mark.parametrize(
    ("given", "reversed_"),
    [
        (("a", "b"), ("b", "a")),
        ((None, "b"), ("b", None)),
        (("a",), (None, "a")),
        (PartitionSpec("a", ("b", "c")), PartitionSpec(("b", "c"), "a")),
        (None, None),
    ],
)
def test_reversed_axes(given, reversed_):
    turned = reversed_axes(given)
    assert turned == reversed_
    assert type(turned) is type(reversed_)

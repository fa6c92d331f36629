"""The Linen module against the same MLP of nn.Dense layers, under Linen's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec
from plain_flax import PlainLinen
from support import error

from swiglu_jax.flax.linen import SwiGLUMLP

FEATURES, HIDDEN = 48, 80
"""Enough values, with the rows below, for rounding errors of bfloat16 to average out."""
DTYPES = [
    (None, "float32", 1e-5),
    ("bfloat16", "float32", 1.2e-2),
    (None, "bfloat16", 1.2e-2),
]


def inputs(rng, dtype="float32"):
    key = jax.random.key(int(rng.integers(2**31)))
    return key, jnp.asarray(rng.standard_normal((4, 32, FEATURES)), dtype)


def assert_close(got, want, bound):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert error(a, np.asarray(b, np.float64)) <= bound


def gradients(module, params, x):
    def loss(params, x):
        return jnp.sum(jnp.square(module.apply(params, x).astype(jnp.float32)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)


@pytest.mark.parametrize(("dtype", "param_dtype", "bound"), DTYPES)
def test_parameters_value_and_gradients(rng, dtype, param_dtype, bound):
    key, x = inputs(rng, param_dtype)
    options = {"dtype": dtype, "param_dtype": param_dtype}
    ours, plain = (kind(HIDDEN, **options) for kind in (SwiGLUMLP, PlainLinen))
    params = ours.init(key, x)
    assert_close(params, plain.init(key, x), 0.0)
    y, want = ours.apply(params, x), plain.apply(params, x)
    assert y.dtype == want.dtype
    assert error(y, np.asarray(want, np.float64)) <= bound
    assert_close(gradients(ours, params, x), gradients(plain, params, x), bound)


class Stack(nn.Module):
    """Layers under nn.scan, each rematerialized or not."""

    make: type[nn.Module]
    remat: bool
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        make = nn.remat(self.make) if self.remat else self.make
        options = {} if self.make is PlainLinen else {"kernel_init": self.kernel_init}

        def layer(stack, x, _):
            return x + make(HIDDEN, name="mlp", **options)(x), None

        scan = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(self, x, None)[0]


@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat(rng, remat):
    key, x = inputs(rng)
    ours, plain = (Stack(kind, remat) for kind in (SwiGLUMLP, PlainLinen))
    params = ours.init(key, x)
    assert_close(params, plain.init(key, x), 0.0)
    got = gradients(ours, params, x)
    assert_close(got, gradients(plain, params, x), 1e-5)
    assert all(np.abs(g).min(axis=0).max() > 0 for g in jax.tree.leaves(got[0]))


@pytest.mark.parametrize("wrap", [nn.with_partitioning, nn.with_logical_partitioning])
def test_axis_names(rng, wrap):
    key, x = inputs(rng)
    init = wrap(nn.initializers.lecun_normal(), ("embed", "mlp"))
    boxed = SwiGLUMLP(HIDDEN, kernel_init=init).init(key, x)
    specs = nn.get_partition_spec(boxed)["params"]
    assert specs["gate_proj"]["kernel"] == PartitionSpec("embed", "mlp")
    assert specs["up_proj"]["kernel"] == PartitionSpec("embed", "mlp")
    assert specs["down_proj"]["kernel"] == PartitionSpec("mlp", "embed")
    plain = SwiGLUMLP(HIDDEN).init(key, x)
    assert_close(nn.unbox(boxed), plain, 0.0)

    given = SwiGLUMLP(
        HIDDEN, kernel_init=init, down_kernel_init=wrap(nn.initializers.ones, ("a", "b"))
    )
    assert nn.get_partition_spec(given.init(key, x))["params"]["down_proj"]["kernel"] == (
        PartitionSpec("a", "b")
    )


def test_axis_names_under_scan(rng):
    key, x = inputs(rng)
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    boxed = Stack(SwiGLUMLP, False, kernel_init=init).init(key, x)
    specs = nn.get_partition_spec(boxed)["params"]["mlp"]
    assert specs["up_proj"]["kernel"] == PartitionSpec("layers", "embed", "mlp")
    assert specs["down_proj"]["kernel"] == PartitionSpec("layers", "mlp", "embed")


def test_logical_axis_names_on_a_mesh(rng):
    """As a partitioned model is set up: rules, shardings of the variables, jit with them."""
    key, x = inputs(rng)
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    module = SwiGLUMLP(HIDDEN, kernel_init=init)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = (("embed", "data"), ("mlp", "tensor"))
    abstract = jax.eval_shape(module.init, key, x)
    logical = nn.get_partition_spec(abstract)
    shardings = nn.logical_to_mesh_sharding(logical, mesh, rules)
    params = jax.jit(module.init, out_shardings=shardings)(key, x)
    spread = {k: nn.unbox(params)["params"][k]["kernel"] for k in ("up_proj", "down_proj")}
    assert spread["up_proj"].sharding.spec == PartitionSpec("data", "tensor")
    assert spread["down_proj"].sharding.spec == PartitionSpec("tensor", "data")

    alone = SwiGLUMLP(HIDDEN)
    want = gradients(alone, alone.init(key, x), x)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        got = gradients(module, params, x)
    assert_close(nn.unbox(got), want, 1e-5)


def test_forward_mode(rng):
    key, x = inputs(rng)
    ours, plain = SwiGLUMLP(HIDDEN, forward_mode=True), PlainLinen(HIDDEN)
    params = ours.init(key, x)
    tangents = [jax.jvp(lambda p, m=m: m.apply(p, x), (params,), (params,)) for m in (ours, plain)]
    for got, want in zip(*tangents, strict=True):
        assert error(got, np.asarray(want, np.float64)) <= 1e-5


def test_precision_reaches_the_products(rng):
    key, x = inputs(rng)
    module = SwiGLUMLP(HIDDEN, precision="high")
    params = module.init(key, x)
    text = jax.jit(module.apply).lower(params, x).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 3
    assert all("[HIGH, HIGH]" in line for line in dots)

"""The NNX module against the same MLP of nnx.Linear layers, under NNX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_flax import PlainNNX
from support import error, kept_activations

from swiglu_jax.flax.nnx import SwiGLUMLP

FEATURES, HIDDEN = 48, 80
"""Enough values, with the rows below, for rounding errors of bfloat16 to average out."""
DTYPES = [
    # dtype, param_dtype, bound on the relative L2 difference to plain Flax
    (None, "float32", 1e-5),
    ("bfloat16", "float32", 1.2e-2),
    (None, "bfloat16", 1.2e-2),
    ("float16", "float32", 2e-3),
]


def pair(rng, **options):
    """Ours and plain Flax's from the same seed, and an input."""
    seed = int(rng.integers(2**31))
    ours = SwiGLUMLP(FEATURES, HIDDEN, rngs=nnx.Rngs(seed), **options)
    plain = PlainNNX(FEATURES, HIDDEN, rngs=nnx.Rngs(seed), **options)
    return ours, plain, jnp.asarray(rng.standard_normal((4, 32, FEATURES)), jnp.float32)


def loss(model, x):
    return jnp.sum(jnp.square(model(x).astype(jnp.float32)))


def assert_close(got, want, bound):
    """Two states of one structure, leaf by leaf."""
    got, want = nnx.to_pure_dict(got), nnx.to_pure_dict(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert error(a, np.asarray(b, np.float64)) <= bound


def test_state_is_that_of_three_linears(rng):
    ours, plain, _ = pair(rng)
    assert_close(nnx.state(ours), nnx.state(plain), 0.0)
    assert ours.gate_proj.kernel.shape == (FEATURES, HIDDEN)
    assert ours.down_proj.kernel.shape == (HIDDEN, FEATURES)


@pytest.mark.parametrize(("dtype", "param_dtype", "bound"), DTYPES)
def test_value_and_gradients(rng, dtype, param_dtype, bound):
    ours, plain, x = pair(rng, dtype=dtype, param_dtype=param_dtype)
    x = x.astype(param_dtype)
    assert ours(x).dtype == plain(x).dtype
    results = [nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(m, x) for m in (ours, plain)]
    (value, (grads, dx)), (plain_value, (plain_grads, plain_dx)) = results
    assert error(value, np.float64(plain_value)) <= bound
    assert dx.dtype == plain_dx.dtype
    assert error(dx, np.asarray(plain_dx, np.float64)) <= bound
    assert_close(grads, plain_grads, bound)


def test_dtype_is_inferred_as_by_linear(rng):
    ours, plain, x = pair(rng, param_dtype="bfloat16")
    assert ours(x).dtype == plain(x).dtype == jnp.float32
    assert ours(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert ours(jnp.ones((3, FEATURES), jnp.int32)).dtype == jnp.bfloat16


def test_a_frozen_base_gets_no_gradient_and_keeps_less(rng):
    ours, _, x = pair(rng)
    down = nnx.PathContains("down_proj")
    whole = nnx.grad(loss)(ours, x)
    part = nnx.grad(loss, argnums=nnx.DiffState(0, down))(ours, x)
    assert set(nnx.to_pure_dict(part)) == {"down_proj"}
    assert_close(part, nnx.state(whole, down), 1e-6)

    def kept(filter_, with_x):
        graphdef, chosen, rest = nnx.split(ours, filter_, ...)

        def f(chosen, x):
            return nnx.merge(graphdef, chosen, rest)(x)

        arguments = (chosen, x) if with_x else (chosen,)
        _, pull = jax.vjp(f if with_x else lambda c: f(c, x), *arguments)
        return kept_activations(pull, (x,), HIDDEN)

    assert kept(nnx.Param, with_x=True) == {"hidden": 2, "x": 1}
    assert kept(down, with_x=False) == {"hidden": 1, "x": 0}
    # A frozen MLP below trained layers: only x is differentiated, and x itself is not kept.
    assert kept(nnx.Nothing(), with_x=True) == {"hidden": 2, "x": 0}


def test_split_and_merge(rng):
    ours, _, x = pair(rng)
    graphdef, state = nnx.split(ours)
    doubled = jax.tree.map(lambda a: 2 * a, state)
    merged = nnx.merge(graphdef, doubled)
    np.testing.assert_array_equal(merged.up_proj.kernel[...], 2 * ours.up_proj.kernel[...])
    nnx.update(ours, doubled)
    np.testing.assert_array_equal(ours(x), merged(x))


class Stack(nnx.Module):
    """Layers under nnx.vmap and nnx.scan, each rematerialized or not."""

    def __init__(self, make, layers: int, rngs: nnx.Rngs, remat: bool):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return make(rngs)

        self.layers = create(rngs)
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x, mlp):
            return x + mlp(x)

        step = nnx.remat(layer) if self.remat else layer
        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat(rng, remat):
    _, _, x = pair(rng)
    seed = int(rng.integers(2**31))
    stacks = [
        Stack(lambda rngs, kind=kind: kind(FEATURES, HIDDEN, rngs=rngs), 3, nnx.Rngs(seed), remat)
        for kind in (SwiGLUMLP, PlainNNX)
    ]
    assert stacks[0].layers.gate_proj.kernel.shape == (3, FEATURES, HIDDEN)
    grads, plain_grads = (nnx.jit(nnx.grad(loss))(stack, x) for stack in stacks)
    assert_close(grads, plain_grads, 1e-5)
    assert all(np.abs(g).min(axis=0).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.save_only_these_names("swiglu_gate"),
        jax.checkpoint_policies.save_only_these_names("swiglu_gate", "swiglu_up"),
        jax.checkpoint_policies.dots_saveable,
    ],
    ids=["gate", "gate and up", "dots"],
)
def test_remat_with_a_policy(rng, policy):
    ours, plain, x = pair(rng)

    def remat_loss(model, x):
        layer = nnx.remat(lambda model, x: model(x), policy=policy)
        return jnp.sum(jnp.square(layer(model, x)))

    got, want = nnx.jit(nnx.grad(remat_loss))(ours, x), nnx.jit(nnx.grad(loss))(plain, x)
    assert_close(got, want, 1e-5)


def test_scan_keeps_two_hidden_tensors_a_layer(rng):
    layers, tokens = 4, 64
    x = jnp.asarray(rng.standard_normal((tokens, FEATURES)), jnp.float32)

    def temporary_bytes(kind):
        stack = Stack(lambda rngs: kind(FEATURES, 512, rngs=rngs), layers, nnx.Rngs(0), False)
        graphdef, state = nnx.split(stack)
        grad = jax.grad(lambda state: loss(nnx.merge(graphdef, state), x))
        compiled = jax.jit(grad).lower(state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    hidden = layers * tokens * 512 * 4
    ours, plain = temporary_bytes(SwiGLUMLP), temporary_bytes(PlainNNX)
    assert plain - ours > 3 * hidden


def test_precision_reaches_the_products(rng):
    ours, _, x = pair(rng, precision=jax.lax.Precision.HIGH)
    text = nnx.jit(nnx.grad(loss)).lower(ours, x).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert dots
    assert all("[HIGH, HIGH]" in line for line in dots)
    ours.precision = (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH)
    with pytest.raises(ValueError, match="precision"):
        ours(x)


def test_implementation_reaches_the_op(rng):
    ours, plain, x = pair(rng)
    ours.implementation = "xla"
    assert error(ours(x), np.asarray(plain(x), np.float64)) <= 1e-5
    ours.implementation = "fused"
    with pytest.raises(NotImplementedError, match="fused"):
        jax.jit(lambda x: ours(x)).trace(x).lower(lowering_platforms=("cpu",))


def test_forward_mode(rng):
    ours, plain, x = pair(rng)
    ours.forward_mode = True
    v = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    (y, tangent), (want, want_tangent) = (jax.jvp(m, (x,), (v,)) for m in (ours, plain))
    assert error(y, np.asarray(want, np.float64)) <= 1e-5
    assert error(tangent, np.asarray(want_tangent, np.float64)) <= 1e-5


def test_down_kernel_init():
    zeros = SwiGLUMLP(
        FEATURES, HIDDEN, down_kernel_init=nnx.initializers.zeros_init(), rngs=nnx.Rngs(0)
    )
    assert not zeros.down_proj.kernel[...].any()
    assert zeros.gate_proj.kernel[...].any()

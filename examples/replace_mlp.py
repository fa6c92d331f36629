"""Replace the MLPs of a Flax NNX transformer that was written without this package.

    python examples/replace_mlp.py

The model below stands for somebody else's: its MLPs are three `nnx.Linear` layers. `replace_mlps`
swaps each for a `SwiGLUMLP` that takes over the very same kernels: values and gradients stay, and
a training step keeps two tensors of the hidden width a layer where it kept several. Needs the
`flax` extra.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import nnx

from swiglu_jax.flax.nnx import SwiGLUMLP


class MLP(nnx.Module):
    """The MLP as Flax models spell it: gate, up and down projections without biases."""

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)

        self.gate_proj = linear(width, hidden)
        self.up_proj = linear(width, hidden)
        self.down_proj = linear(hidden, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[..., width]` to the same shape."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and MLP, each on a normalized copy of the residual stream."""

    def __init__(self, width: int, hidden: int, heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, decode=False, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.mlp = MLP(width, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[batch, length, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """Layers with stacked parameters, run by `nnx.scan` as large models do to compile faster."""

    def __init__(self, layers: int, width: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> Layer:
            return Layer(width, hidden, 4, dtype=dtype, rngs=rngs)

        self.layers = create(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[batch, length, width]` to the same shape."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        return forward(x, self.layers)


def fused(mlp: MLP) -> SwiGLUMLP:
    """A SwiGLUMLP that owns the kernels of ``mlp``, stacked or not: nothing is copied."""
    gate = mlp.gate_proj

    def create() -> SwiGLUMLP:
        rngs = nnx.Rngs(0)
        return SwiGLUMLP(gate.in_features, gate.out_features, dtype=gate.dtype, rngs=rngs)

    # Under eval_shape no kernel is initialized only to be thrown away.
    return nnx.merge(nnx.graphdef(nnx.eval_shape(create)), nnx.state(mlp))


def replace_mlps(model: nnx.Module) -> int:
    """Swap every MLP below ``model``, in place; return how many there were."""
    owners = [
        (module, name)
        for _, module in nnx.iter_modules(model)
        for name, child in vars(module).items()
        if isinstance(child, MLP)
    ]
    for module, name in owners:
        setattr(module, name, fused(getattr(module, name)))
    return len(owners)


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    """A stand-in for a training loss: a float32 scalar."""
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


def measure(model: Transformer, x: jax.Array) -> tuple[jax.Array, nnx.State, int]:
    """Loss, gradients, and the bytes that one training step needs beside its arguments."""
    step = nnx.jit(nnx.value_and_grad(loss)).lower(model, x).compile()
    value, grads = step(model, x)
    return value, grads, temporary_bytes(step.compiled)


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """What a compiled program allocates beside its arguments and results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this platform does not tell"
    return analysis.temp_size_in_bytes


def run(
    layers: int, width: int, hidden: int, batch: int, length: int, dtype: jnp.dtype, seed: int
) -> dict:
    """Measure a transformer before and after its MLPs are replaced."""
    model = Transformer(layers, width, hidden, dtype=dtype, rngs=nnx.Rngs(seed))
    x = jax.random.normal(jax.random.key(seed), (batch, length, width), dtype)
    value, grads, plain_bytes = measure(model, x)
    replaced = replace_mlps(model)
    new_value, new_grads, bytes_ = measure(model, x)
    pairs = zip(jax.tree.leaves(new_grads), jax.tree.leaves(grads), strict=True)
    difference = max(
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs if b.any()
    )
    return {
        "replaced": replaced,
        "loss": float(value),
        "loss_after": float(new_value),
        "largest_gradient_difference": difference,
        "temporary_bytes": plain_bytes,
        "temporary_bytes_after": bytes_,
    }


def main() -> None:
    """Replace, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = (("layers", 4), ("width", 128), ("hidden", 512), ("batch", 8), ("length", 128))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    result = run(**vars(parser.parse_args()))
    print(
        f"{result['replaced']} MLP module(s) replaced\n"
        f"loss {result['loss']:.6f} before, {result['loss_after']:.6f} after; gradients differ by "
        f"{result['largest_gradient_difference']:.1e} at most\n"
        f"temporary memory of a training step {result['temporary_bytes'] / 1e6:.1f} MB before, "
        f"{result['temporary_bytes_after'] / 1e6:.1f} MB after"
    )


if __name__ == "__main__":
    main()

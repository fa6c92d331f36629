"""A pre-norm decoder in Flax NNX: rotary attention and SwiGLU MLPs."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from swiglu_jax.flax.nnx import SwiGLUMLP

Layer = Callable[[jax.Array], jax.Array]

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. Parameters are float32; `dtype` is what the layers compute in."""

    vocabulary: int
    layers: int
    width: int
    hidden: int
    heads: int
    dtype: DTypeLike
    implementation: str | None = None


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = (config.heads, config.width // config.heads)
        self.qkv: Layer = nnx.LinearGeneral(
            config.width, (3, *shape), use_bias=False, dtype=config.dtype, rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            shape, config.width, axis=(-2, -1), use_bias=False, dtype=config.dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[batch, length, width]` to the same shape."""
        query, key, value = jnp.moveaxis(self.qkv(x), -3, 0)
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed)


class Block(nnx.Module):
    """One layer: attention, then the MLP, each on a normalized copy of the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mlp = SwiGLUMLP(
            config.width,
            config.hidden,
            dtype=config.dtype,
            implementation=config.implementation,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[batch, length, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocabulary, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(
            config.width, config.vocabulary, use_bias=False, dtype=config.dtype, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map int32 tokens `[batch, length]` to float32 logits `[batch, length, vocabulary]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of x `[batch, length, heads, head width]`."""
    half = x.shape[-1] // 2
    frequency = _ROTARY_BASE ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

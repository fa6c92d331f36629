"""A decoder-only transformer in plain JAX, with three choices: MLP, attention, normalization."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.mlps import plain
from swiglu_jax import swiglu_mlp

MODULES = ("mlp", "attention", "norm", "head")
"""Names of the scopes that kernels are attributed to."""


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder; published ones below."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int | None
    """None: a stack of layers alone, from activations to a sum of squares."""
    dtype: str = "bfloat16"
    sequences: int = 2
    length: int = 4096
    """What is measured unless another batch is asked for."""


CONFIGS = {
    # Four layers at the widths of a Qwen-style 27B model.
    "qwen-27b-proxy": Config(4, 5120, 17408, 40, 8, 128, None),
    # At 4096 tokens a sequence, XLA's attention would keep 16 layers of 2 GiB a sequence.
    "llama-3.2-1b": Config(16, 2048, 8192, 32, 8, 64, 128256, sequences=4, length=2048),
    # For any CPU, in seconds: the benchmark itself is what this one tries.
    "tiny": Config(2, 32, 64, 4, 2, 8, 97, "float32", sequences=2, length=8),
}


@dataclass(frozen=True)
class Variant:
    """One of the eight ways to run a decoder."""

    mlp: str
    """"plain" or "swiglu_jax"."""
    attention: str
    """"xla" or "cudnn", as jax.nn.dot_product_attention takes it."""
    norm: str
    """"kept": in float32, what its backward pass needs is kept; "recomputed": from its input."""

    @property
    def name(self) -> str:
        return f"{self.mlp}+{self.attention}+{self.norm}"


CHOICES = {
    "mlp": ("plain", "swiglu_jax"),
    "attention": ("xla", "cudnn"),
    "norm": ("kept", "recomputed"),
}
"""The axes in the order of a variant's name, and what is chosen on each."""

VARIANTS = tuple(Variant(*chosen) for chosen in itertools.product(*CHOICES.values()))

Params = dict[str, Any]


def init(config: Config, key: jax.Array) -> Params:
    """Random parameters; a layer's are stacked over layers, for lax.scan."""
    width, inner, n = config.width, config.hidden, config.layers
    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    sizes = {
        "q": (width, q), "k": (width, kv), "v": (width, kv), "o": (q, width),
        "gate": (width, inner), "up": (width, inner), "down": (inner, width),
    }  # fmt: skip
    keys = iter(jax.random.split(key, len(sizes) + 1))
    layers: Params = {
        name: (size[0] ** -0.5 * jax.random.normal(next(keys), (n, *size))).astype(config.dtype)
        for name, size in sizes.items()
    }
    for name in ("norm_attention", "norm_mlp"):
        layers[name] = jnp.ones((n, width), config.dtype)
    params: Params = {"layers": layers, "norm": jnp.ones((width,), config.dtype)}
    if config.vocabulary:
        embedding = width**-0.5 * jax.random.normal(next(keys), (config.vocabulary, width))
        params["embedding"] = embedding.astype(config.dtype)
    return params


def batch(config: Config, sequences: int, length: int, key: jax.Array) -> jax.Array:
    """Tokens [sequences, length + 1], or activations [sequences, length, width]."""
    if config.vocabulary:
        return jax.random.randint(key, (sequences, length + 1), 0, config.vocabulary)
    return jax.random.normal(key, (sequences, length, config.width)).astype(config.dtype)


def loss(config: Config, variant: Variant, params: Params, inputs: jax.Array) -> jax.Array:
    """Next-token cross-entropy, or half the mean square of the stack's output."""
    x = params["embedding"][inputs[:, :-1]] if config.vocabulary else inputs

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        x = x + _attention(config, variant, _norm(variant, x, p["norm_attention"]), p)
        return x + _mlp(variant, _norm(variant, x, p["norm_mlp"]), p), None

    x, _ = lax.scan(layer, x, params["layers"])
    x = _norm(variant, x, params["norm"])
    with jax.named_scope("head"):
        if not config.vocabulary:
            return 0.5 * jnp.mean(x.astype(jnp.float32) ** 2)
        return _cross_entropy(x, params["embedding"], inputs[:, 1:])


def _cross_entropy(x: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
    """Sequence by sequence and recomputed, so that not all logits are in memory at once."""

    @jax.checkpoint
    def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        h, wanted = pair
        logits = jnp.dot(h, embedding.T, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, wanted[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)

    return jnp.mean(lax.map(one, (x, targets)))


def _norm(variant: Variant, x: jax.Array, scale: jax.Array) -> jax.Array:
    def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)

    with jax.named_scope("norm"):
        form = jax.checkpoint(rms) if variant.norm == "recomputed" else rms
        return form(x, scale)


def _attention(config: Config, variant: Variant, x: jax.Array, p: Params) -> jax.Array:
    with jax.named_scope("attention"):
        shape = (*x.shape[:2], -1, config.head_size)
        q, k, v = ((x @ p[name]).reshape(shape) for name in ("q", "k", "v"))
        implementation: Any = variant.attention
        mixed = jax.nn.dot_product_attention(
            _rotary(q), _rotary(k), v, is_causal=True, implementation=implementation
        )
        return mixed.reshape(*x.shape[:2], -1) @ p["o"]


def _rotary(x: jax.Array) -> jax.Array:
    """Rotary position embedding over [B, T, heads, size]; Su et al., 2021, arXiv:2104.09864."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _mlp(variant: Variant, x: jax.Array, p: Params) -> jax.Array:
    with jax.named_scope("mlp"):
        weights = p["gate"], p["up"], p["down"]
        if variant.mlp == "swiglu_jax":
            return swiglu_mlp(x, *weights, weight_layout="IO")
        return plain(x, *weights, layout="IO")

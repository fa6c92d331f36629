"""The same MLP of Flax's own layers: what the modules are compared with."""

from typing import Any

import jax
from flax import linen as nn
from flax import nnx


class PlainNNX(nnx.Module):
    def __init__(self, features: int, hidden_features: int, **options: Any):
        self.gate_proj = nnx.Linear(features, hidden_features, use_bias=False, **options)
        self.up_proj = nnx.Linear(features, hidden_features, use_bias=False, **options)
        self.down_proj = nnx.Linear(hidden_features, features, use_bias=False, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLinen(nn.Module):
    hidden_features: int
    dtype: Any = None
    param_dtype: Any = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
            )

        gate = dense(self.hidden_features, "gate_proj")(x)
        up = dense(self.hidden_features, "up_proj")(x)
        return dense(x.shape[-1], "down_proj")(jax.nn.silu(gate) * up)

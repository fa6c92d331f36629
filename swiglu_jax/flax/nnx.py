"""SwiGLUMLP for Flax NNX."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Initializer, PromoteDtypeFn
from jax.typing import DTypeLike

from swiglu_jax.flax._mlp import Precision, apply, reversed_axes

default_kernel_init = nnx.initializers.lecun_normal()


class Projection(nnx.Module):
    """A kernel alone: to a state, a checkpoint or a partition rule, an nnx.Linear without bias.

    It is no nnx.Linear, so that a tool which swaps linear layers for others (LoRA, quantization)
    leaves it alone rather than having its layer ignored: only the kernel is read.
    """

    def __init__(self, kernel: Any, metadata: Mapping[str, Any]):
        """Own ``kernel``, an array or a value with metadata as Flax initializers return it."""
        self.kernel = nnx.Param(kernel, **metadata)


class SwiGLUMLP(nnx.Module):
    """``(silu(x @ gate) * (x @ up)) @ down`` through ``swiglu_jax.swiglu_mlp``, without biases.

    State: ``gate_proj.kernel`` and ``up_proj.kernel`` [features, hidden_features] and
    ``down_proj.kernel`` [hidden_features, features], as three nnx.Linear of those names would
    have, and of the same values from the same ``rngs``. They are read in place.

    Args:
        features: H, the width of the input and of the result.
        hidden_features: I.
        dtype: what is computed in; None infers it from the input and the kernels, as nnx.Linear
            does. bfloat16 and float16 can take fused kernels.
        param_dtype: what the kernels are stored in.
        precision: of the matrix products, as nnx.Linear takes it, one for all operands; None
            takes ``jax.default_matmul_precision``.
        kernel_init: initializer of the kernels, plain or wrapped in ``nnx.with_partitioning``.
        down_kernel_init: initializer of the down kernel, whose shape is [hidden_features,
            features]; None takes ``kernel_init``, with its axis names reversed.
        kernel_metadata: metadata of the gate and up kernels, as nnx.Linear takes it; the down
            kernel gets the same with ``out_sharding`` reversed.
        promote_dtype: brings (x, gate, up, down) to one dtype, as nnx.Linear takes it.
        implementation: as ``swiglu_mlp`` takes it.
        forward_mode: as ``swiglu_mlp`` takes it.
        rngs: where the keys of the initializers come from.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        down_kernel_init: Initializer | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        implementation: str | None = None,
        forward_mode: bool = False,
        rngs: nnx.Rngs,
    ):
        """Initialize the three kernels; see the class for the arguments."""
        shape = (features, hidden_features)
        self.gate_proj, self.up_proj = (
            Projection(kernel_init(rngs.params(), shape, param_dtype), kernel_metadata)
            for _ in range(2)
        )
        down = (down_kernel_init or kernel_init)(rngs.params(), shape[::-1], param_dtype)
        if down_kernel_init is None and isinstance(down, nnx.VariableMetadata):
            down = dataclasses.replace(down, metadata=_reversed(down.metadata))
        self.down_proj = Projection(down, _reversed(kernel_metadata))

        self.features = features
        self.hidden_features = hidden_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.implementation = implementation
        self.forward_mode = forward_mode

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the MLP.

        Args:
            x: [..., features].

        Returns:
            [..., features], of ``dtype`` or the dtype inferred.
        """
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        x, *kernels = self.promote_dtype(
            (x, *(p.kernel[...] for p in projections)), dtype=self.dtype
        )
        return apply(x, kernels, self.precision, self.implementation, self.forward_mode)


def _reversed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {key: reversed_axes(value) for key, value in metadata.items() if key in _AXIS_NAMES}
    return {**metadata, **names}


_AXIS_NAMES = ("out_sharding", "sharding", "sharding_names")
"""Flax's key for the axis names of a Param, and the two older ones that it still takes."""

"""SwiGLUMLP for Flax Linen."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer
from jax.typing import DTypeLike

from swiglu_jax.flax._mlp import PROJECTIONS, Precision, apply, reversed_axes

default_kernel_init = nn.initializers.lecun_normal()


class Projection(nn.Module):
    """A kernel alone, owned and named as that of an nn.Dense without bias.

    Attributes:
        shape: of the kernel.
        param_dtype: of the kernel.
        kernel_init: its initializer.
    """

    shape: tuple[int, int]
    param_dtype: DTypeLike
    kernel_init: Initializer

    @nn.compact
    def __call__(self) -> jax.Array:
        """The kernel."""
        return self.param("kernel", self.kernel_init, self.shape, self.param_dtype)


class SwiGLUMLP(nn.Module):
    """``(silu(x @ gate) * (x @ up)) @ down`` through ``swiglu_jax.swiglu_mlp``, without biases.

    Parameters: ``gate_proj/kernel`` and ``up_proj/kernel`` [features, hidden_features] and
    ``down_proj/kernel`` [hidden_features, features], as three nn.Dense of those names would have,
    and of the same values from the same key. They are read in place. ``features`` is the width of
    the input.

    Attributes:
        hidden_features: I.
        dtype: what is computed in; None infers it from the input and the kernels, as nn.Dense
            does. bfloat16 and float16 can take fused kernels.
        param_dtype: what the kernels are stored in.
        precision: of the matrix products, as nn.Dense takes it, one for all operands; None takes
            ``jax.default_matmul_precision``.
        kernel_init: initializer of the kernels, plain or wrapped in ``nn.with_partitioning`` or
            ``nn.with_logical_partitioning``.
        down_kernel_init: initializer of the down kernel, whose shape is [hidden_features,
            features]; None takes ``kernel_init``, with its axis names reversed.
        promote_dtype: brings x, gate, up and down to one dtype, as nn.Dense takes it.
        implementation: as ``swiglu_mlp`` takes it.
        forward_mode: as ``swiglu_mlp`` takes it.
    """

    hidden_features: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Precision = None
    kernel_init: Initializer = default_kernel_init
    down_kernel_init: Initializer | None = None
    promote_dtype: Callable[..., Sequence[Any]] = promote_dtype
    implementation: str | None = None
    forward_mode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the MLP.

        Args:
            x: [..., features].

        Returns:
            [..., features], of ``dtype`` or the dtype inferred.
        """
        features = jnp.shape(x)[-1]
        up, down = (features, self.hidden_features), (self.hidden_features, features)
        down_init = self.down_kernel_init or _with_reversed_axes(self.kernel_init)
        inits = (self.kernel_init, self.kernel_init, down_init)
        kernels = (
            Projection(shape, self.param_dtype, init, name=name)()
            for name, shape, init in zip(PROJECTIONS, (up, up, down), inits, strict=True)
        )
        x, *cast = self.promote_dtype(x, *kernels, dtype=self.dtype)
        return apply(x, cast, self.precision, self.implementation, self.forward_mode)


def _with_reversed_axes(init: Initializer) -> Initializer:
    """``init``, with the names reversed if it returns a box that names axes."""

    def turned(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        made = init(key, shape, dtype)
        if isinstance(made, nn.Partitioned):  # nn.LogicallyPartitioned is one too
            return made.replace(names=reversed_axes(made.names))
        return made

    return turned

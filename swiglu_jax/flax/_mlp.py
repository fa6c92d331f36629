"""What the NNX and the Linen module share: the call, and the names of axes."""

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from swiglu_jax import swiglu_mlp

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of the three kernels' owners, as in Hugging Face checkpoints, PyTorch and Flax ones alike:
their partition rules and checkpoints fit as they are."""

Precision = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | None


def apply(
    x: jax.Array,
    kernels: Iterable[jax.Array],
    precision: Precision,
    implementation: str | None,
    forward_mode: bool,
) -> jax.Array:
    """The op on Flax kernels (gate and up [H, I], down [I, H]), all of x's dtype."""
    with _matmul_precision(precision):
        return swiglu_mlp(
            x,
            *kernels,
            weight_layout="IO",
            implementation=implementation,
            forward_mode=forward_mode,
        )


def _matmul_precision(precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """``precision`` as the context that swiglu_mlp reads it from."""
    if precision is None:
        return contextlib.nullcontext()
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    elif isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    if not isinstance(precision, str):
        raise ValueError(
            "precision: expected None, a string, jax.lax.Precision or jax.lax.DotAlgorithmPreset "
            f"(one for all operands of all products), got {precision!r}"
        )
    return jax.default_matmul_precision(precision)


def reversed_axes(names: Any) -> Any:
    """Axis names of a [features, hidden] kernel as those of a [hidden, features] one."""
    if names is None:
        return None
    if isinstance(names, NamedSharding):
        return NamedSharding(names.mesh, reversed_axes(names.spec), memory_kind=names.memory_kind)
    first, second = (*names, None, None)[:2]
    turned = (second, first)
    return PartitionSpec(*turned) if isinstance(names, PartitionSpec) else turned

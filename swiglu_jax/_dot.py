"""The one matrix product of this package: lax.dot_general, accumulating in at least float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

_OWN_OUTPUT = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
"""Dtypes whose products XLA accumulates in float32 or wider also when the result is that dtype
(checked on the CPU by tests/test_precision.py). Asking for the result in the operands' dtype
lets cuBLAS round in its epilogue instead of writing a float32 tensor."""


def contract(
    a: jax.Array,
    a_axes: int | tuple[int, ...],
    b: jax.Array,
    b_axes: int | tuple[int, ...],
    *,
    precision: str | None = None,
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Sum of products over ``a_axes`` of a and ``b_axes`` of b; a's other axes come first.

    Args:
        a, b: arrays of one floating dtype.
        a_axes, b_axes: the contracted axes, pairwise of one size; negative counts from the end.
        precision: as ``jax.default_matmul_precision`` takes it.
        out_sharding: the result's sharding on a mesh with explicit axes.

    Returns:
        An array of a's dtype.
    """
    dims = (_axes(a, a_axes), _axes(b, b_axes))
    wide = a.dtype if a.dtype in _OWN_OUTPUT else jnp.float32
    return lax.dot_general(
        a,
        b,
        (dims, ((), ())),
        precision=precision,
        preferred_element_type=wide,
        out_sharding=out_sharding,
    ).astype(a.dtype)


def _axes(a: jax.Array, axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis % a.ndim for axis in ((axes,) if isinstance(axes, int) else axes))

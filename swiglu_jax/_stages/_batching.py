"""vmap over a stage: one more leading axis, more columns, or a loop, in this order."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching

from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._stage import Stage


def register(stage: Stage) -> None:
    """Register the stage's batching rule."""
    batching.primitive_batchers[stage.primitive] = functools.partial(_RULES[stage.name], stage)


def _size(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)


def _in_front(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    if dim is None:
        return jnp.broadcast_to(a, (size, *a.shape))
    return jnp.moveaxis(a, dim, 0)


def _loop(
    stage: Stage, operands: Sequence[Any], dims: Sequence[int | None], params: StageParams
) -> tuple[list[jax.Array], list[int]]:
    """One call an element, for batched activations against batched weights."""
    batched = [jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True) if d is not None]

    def one(elements: Sequence[jax.Array]) -> list[jax.Array]:
        element = iter(elements)
        full = [a if d is None else next(element) for a, d in zip(operands, dims, strict=True)]
        return stage.primitive.bind(*full, params=params)

    results = lax.map(one, batched)
    return results, [0] * len(results)


def _gate_up(
    stage: Stage, operands: Sequence[Any], dims: Sequence[int | None], *, params: StageParams
) -> tuple[list[jax.Array], list[int]]:
    x, w_gate, w_up = operands
    x_dim, gate_dim, up_dim = dims
    if x_dim is not None and gate_dim is None and up_dim is None:
        results = stage.primitive.bind(jnp.moveaxis(x, x_dim, 0), w_gate, w_up, params=params)
        return results, [0] * len(results)
    if x_dim is not None:
        return _loop(stage, operands, dims, params)
    size = _size(operands, dims)

    def fold(w: jax.Array, dim: int | None) -> jax.Array:
        """A batch of weights as one weight with size * I columns ("IO" needs a copy)."""
        w = _in_front(w, dim, size)
        if params.weight_layout == "OI":
            return w.reshape(-1, w.shape[-1])
        return jnp.moveaxis(w, 0, 1).reshape(w.shape[1], -1)

    results = stage.primitive.bind(x, fold(w_gate, gate_dim), fold(w_up, up_dim), params=params)
    results = [r.reshape(*r.shape[:-1], size, -1) for r in results]
    return results, [r.ndim - 2 for r in results]


def _down_dswiglu(
    stage: Stage, operands: Sequence[Any], dims: Sequence[int | None], *, params: StageParams
) -> tuple[list[jax.Array], list[int]]:
    if dims[1] is not None:
        return _loop(stage, operands, dims, params)
    size = _size(operands, dims)
    stacked = [
        a if k == 1 else _in_front(a, d, size)
        for k, (a, d) in enumerate(zip(operands, dims, strict=True))
    ]
    results = stage.primitive.bind(*stacked, params=params)
    return results, [0] * len(results)


_RULES = {"gate_up": _gate_up, "down_dswiglu": _down_dswiglu}

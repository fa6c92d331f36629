"""vmap over a stage: one more leading axis, or an axis over weights.

The first is nothing new to a kernel: more rows in one call. Weights that differ from call to call
stay one equation with ``StageParams.batched``, so that its lowering decides, for the shapes that
one device sees: a batched GEMM where XLA serves, else one wider call or a loop of fused calls.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._stage import Stage


def register(stage: Stage) -> None:
    """Register the stage's batching rule."""
    batching.primitive_batchers[stage.primitive] = functools.partial(_rule, stage)


def _rule(
    stage: Stage, operands: Sequence[Any], dims: Sequence[int | None], *, params: StageParams
) -> tuple[list[jax.Array], list[int]]:
    has_rows = stage.has_rows(params)
    mapped = [d is not None for d in dims]
    if mapped == has_rows and stage.keeps_rows:
        # The new axis is one more leading axis, behind the axis over weights if there is one.
        at = [int(bool(params.batched) and b) for b in params.batched or mapped]
        moved = [
            jnp.moveaxis(a, d, k) if d is not None else a
            for a, d, k in zip(operands, dims, at, strict=True)
        ]
        results = stage.primitive.bind(*moved, params=params)
        axis = int(bool(params.batched))
    else:
        results, axis = _over_weights(stage, operands, dims, params)
    return results, [axis] * len(results)


def _in_front(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    if dim is None:
        return jnp.broadcast_to(a, (size, *a.shape))
    return jnp.moveaxis(a, dim, 0)


def _size(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)


def _over_weights(
    stage: Stage, operands: Sequence[Any], dims: Sequence[int | None], params: StageParams
) -> tuple[list[jax.Array], int]:
    """The mapped axis becomes the axis over weights, or merges with the one that is there."""
    if not params.batched:
        moved = [
            jnp.moveaxis(a, d, 0) if d is not None else a
            for a, d in zip(operands, dims, strict=True)
        ]
        params = dataclasses.replace(params, batched=tuple(d is not None for d in dims))
        return stage.primitive.bind(*moved, params=params), 0

    outer = _size(operands, dims)
    inner = next(
        a.shape[int(d == 0)] for a, d, b in zip(operands, dims, params.batched, strict=True) if b
    )
    merged, batched = [], []
    for a, d, b in zip(operands, dims, params.batched, strict=True):
        if d is None and not b:
            merged.append(a)
        else:
            a = _in_front(a, d, outer)
            if not b:
                a = jnp.broadcast_to(a[:, None], (outer, inner, *a.shape[1:]))
            merged.append(a.reshape(outer * inner, *a.shape[2:]))
        batched.append(d is not None or b)
    params = dataclasses.replace(params, batched=tuple(batched))
    results = stage.primitive.bind(*merged, params=params)
    return [r.reshape(outer, inner, *r.shape[1:]) for r in results], 0

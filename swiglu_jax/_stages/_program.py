"""A stage at one local shape as a function of arrays: fused calls, or its XLA form."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swiglu_jax import _native, _routes
from swiglu_jax._candidate import Candidate, Choice, StageCall
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._stage import Stage


def program(
    stage: Stage,
    avals: Sequence[Any],
    params: StageParams,
    platform: str,
    *,
    overwrite: bool = True,
) -> tuple[Callable[..., Sequence[jax.Array]], bool]:
    """What serves the stage at the shapes of ``avals``, and whether that is fused.

    Args:
        stage: which stage.
        avals: its operands, of the shapes that one device sees.
        params: how it is asked to run.
        platform: the platform that it is lowered for.
        overwrite: whether a kernel that can writes over the stage's spent operands.

    Raises:
        NotImplementedError: implementation="fused" and every candidate declined.
    """
    if params.batched and not stage.keeps_rows:
        reason = "one small result for each element of vmap: a batched GEMM, not a loop of kernels"
        choice = Choice(None, _routes.all_decline(reason))
        _routes.logged(stage.call(avals, params), platform, choice)
        return functools.partial(stage.evaluate, params=params), False
    choice = _routes.choose(asked_call(stage, avals, params), params.implementation)
    if choice.candidate is None:
        return functools.partial(stage.evaluate, params=params), False
    if platform == "cuda":
        _native.register()
    candidate = choice.candidate
    candidate = replace(candidate, overwrites=candidate.overwrites and overwrite)
    run = _wide if _is_one_wider_call(stage, params) else _fused
    return functools.partial(run, stage, candidate, params), True


def asked_call(stage: Stage, avals: Sequence[Any], params: StageParams) -> StageCall:
    """What the routes are asked to serve: the call, or one of the calls, that a stage makes."""
    if _is_one_wider_call(stage, params):
        avals = [_widened(a, b) for a, b in zip(avals, params.batched, strict=True)]
        params = replace(params, batched=())
    return stage.call(avals, params)


def _is_one_wider_call(stage: Stage, params: StageParams) -> bool:
    """Whether one x meets several weights that lie behind each other in memory as one would."""
    has_rows = stage.has_rows(params)
    one_x = sum(has_rows) == 1 and params.batched == tuple(not rows for rows in has_rows)
    return one_x and params.weight_layout == "OI"


def _widened(aval: Any, batched: bool) -> Any:
    """The shape of weights [E, I, H] as one weight [E * I, H]."""
    if not batched:
        return aval
    *columns, width = aval.shape
    return jax.ShapeDtypeStruct((math.prod(columns), width), aval.dtype)


def _wide(
    stage: Stage, candidate: Candidate, params: StageParams, *operands: jax.Array
) -> Sequence[jax.Array]:
    count, hidden = next(a.shape[:2] for a, b in zip(operands, params.batched, strict=True) if b)
    one = [a.reshape(_widened(a, b).shape) for a, b in zip(operands, params.batched, strict=True)]
    results = _call(stage, candidate, replace(params, batched=()), one)
    return [jnp.moveaxis(r.reshape(*r.shape[:-1], count, hidden), -2, 0) for r in results]


def _fused(
    stage: Stage, candidate: Candidate, params: StageParams, *operands: jax.Array
) -> Sequence[jax.Array]:
    if not params.batched:
        return _call(stage, candidate, params, operands)
    mapped = [a for a, b in zip(operands, params.batched, strict=True) if b]

    def one(elements: Sequence[jax.Array]) -> Sequence[jax.Array]:
        element = iter(elements)
        full = [next(element) if b else a for a, b in zip(operands, params.batched, strict=True)]
        return _call(stage, candidate, params, full)

    return lax.map(one, mapped)


def _call(
    stage: Stage, candidate: Candidate, params: StageParams, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """The candidate as one custom call; its values for the asked outputs."""
    values = ffi_call(stage, candidate, params, operands, overwrite=candidate.overwrites)
    by_name = dict(zip(candidate.outputs, values, strict=False))
    return [by_name[name] for name in params.outputs]


def ffi_call(
    stage: Stage,
    candidate: Candidate,
    params: StageParams,
    operands: Sequence[jax.Array],
    *,
    overwrite: bool = False,
) -> Sequence[jax.Array]:
    """All that the candidate's call writes: its outputs, and its scratch if it has any.

    ``overwrite``: outputs in the memory of the stage's spent operands. Not for trials, which make
    the same call again: XLA would copy those operands first.
    """
    shapes = stage.result_shapes(candidate.outputs, [a.shape for a in operands], params)
    results = [jax.ShapeDtypeStruct(shape, operands[0].dtype) for shape in shapes]
    if candidate.scratch_bytes:
        results.append(jax.ShapeDtypeStruct((candidate.scratch_bytes,), np.uint8))
    attributes = {k: np.int64(v) if isinstance(v, int) else v for k, v in candidate.attributes}
    spent = [k for k in stage.spent if k < len(operands)] if overwrite else []
    in_place = dict(zip(spent, range(len(candidate.outputs)), strict=False))
    call = jax.ffi.ffi_call(candidate.ffi_target, results, input_output_aliases=in_place)
    return call(*operands, **attributes)

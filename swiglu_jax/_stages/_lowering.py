"""Lowering of a stage: one custom call where a fused candidate serves it, else its XLA form."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import ffi
from jax.core import ShapedArray
from jax.interpreters import mlir

from swiglu_jax import _routes
from swiglu_jax._candidate import Candidate
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._stage import Stage


def register(stage: Stage) -> None:
    """Register the stage's lowerings: CUDA asks for a route, every other platform is XLA's."""
    mlir.register_lowering(stage.primitive, functools.partial(_lower_elsewhere, stage))
    mlir.register_lowering(stage.primitive, functools.partial(_lower_cuda, stage), platform="cuda")


def _xla_form(stage: Stage, ctx: Any, operands: Sequence[Any], params: StageParams) -> Any:
    form = functools.partial(stage.form, params=params)
    return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)


def _lower_elsewhere(stage: Stage, ctx: Any, *operands: Any, params: StageParams) -> Any:
    if params.implementation == "fused":
        platforms = ctx.platforms or ctx.module_context.platforms
        raise _routes.not_served(stage.call(ctx.avals_in, params), _routes.no_gpu(platforms))
    return _xla_form(stage, ctx, operands, params)


def _lower_cuda(stage: Stage, ctx: Any, *operands: Any, params: StageParams) -> Any:
    choice = _routes.choose(stage.call(ctx.avals_in, params), params.implementation)
    if choice.candidate is None:
        return _xla_form(stage, ctx, operands, params)
    return custom_call(ctx, choice.candidate, operands, params)


def custom_call(
    ctx: Any, candidate: Candidate, operands: Sequence[Any], params: StageParams
) -> list[Any]:
    """The candidate as one ``stablehlo.custom_call``; its values for the asked outputs."""
    results = [ctx.avals_out[0]] * len(candidate.outputs)
    if candidate.scratch_bytes:
        results.append(ShapedArray((candidate.scratch_bytes,), np.dtype(np.uint8)))
    attributes = {k: np.int64(v) if isinstance(v, int) else v for k, v in candidate.attributes}
    call_ctx = ctx.replace(primitive=None, avals_out=results)
    values = ffi.ffi_lowering(candidate.ffi_target)(call_ctx, *operands, **attributes)
    by_name = dict(zip(candidate.outputs, values, strict=False))
    return [by_name[name] for name in params.outputs]

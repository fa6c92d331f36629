"""Lowering of a stage: fused calls where a candidate serves it, else its XLA form."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from swiglu_jax import _routes
from swiglu_jax._candidate import FUSED_STAGES, Choice
from swiglu_jax._compat import left_to_partitioner, lowering_platforms
from swiglu_jax._stages import _partitioning
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._program import program
from swiglu_jax._stages._stage import Stage


def register(stage: Stage) -> None:
    """Register the stage's lowerings: CUDA asks for a route, every other platform is XLA's."""
    mlir.register_lowering(stage.primitive, functools.partial(_lower_elsewhere, stage))
    cuda = functools.partial(lower_fused, stage, platform="cuda")
    mlir.register_lowering(stage.primitive, cuda, platform="cuda")


def _lower_elsewhere(stage: Stage, ctx: Any, *operands: Any, params: StageParams) -> Any:
    platforms = lowering_platforms(ctx)
    call, declined = stage.call(ctx.avals_in, params), _routes.no_gpu(platforms)
    if params.implementation == "fused" and stage.name in FUSED_STAGES:
        raise _routes.not_served(call, declined)
    _routes.logged(call, ", ".join(platforms), Choice(None, declined))
    return _xla_form(stage, ctx, operands, params)


def _xla_form(stage: Stage, ctx: Any, operands: Sequence[Any], params: StageParams) -> Any:
    form = functools.partial(stage.evaluate, params=params)
    return _inline(stage, form, ctx, operands)


def _inline(stage: Stage, function: Callable[..., Any], ctx: Any, operands: Sequence[Any]) -> Any:
    """Lower a function in the primitive's place, under its name, which profiles then show."""

    def named(*arrays: Any) -> Any:
        with jax.named_scope(stage.primitive.name):
            return function(*arrays)

    return mlir.lower_fun(named, multiple_results=True)(ctx, *operands)


def lower_fused(stage: Stage, ctx: Any, *operands: Any, params: StageParams, platform: str) -> Any:
    """Lower for a platform that has fused routes: "cuda", and in tests a CPU that poses as one.

    The route is chosen for the shapes that one device sees: at once where those are known, and
    by the partitioner's callback where XLA still has to divide the program among devices.
    """
    if params.implementation != "xla" and left_to_partitioner(ctx):
        if _partitioning.can_partition(stage, ctx, params):
            return _partitioning.lower(stage, ctx, operands, params, platform)
        return _xla_form(stage, ctx, operands, params)
    run, fused = program(stage, ctx.avals_in, params, platform)
    if not fused:
        return _xla_form(stage, ctx, operands, params)
    return _inline(stage, run, ctx, operands)

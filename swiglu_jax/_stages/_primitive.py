"""Makes a stage's primitive: shapes, evaluation and derivative all taken from its XLA form."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad

from swiglu_jax._compat import apply_primitive
from swiglu_jax._stages import _batching, _dce, _lowering, _partitioning, _remat
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._stage import Stage


def define(stage: Stage) -> Stage:
    """Give the stage's primitive all its rules."""
    primitive = stage.primitive
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    primitive.def_abstract_eval(functools.partial(_abstract, stage))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, stage)
    _lowering.register(stage)
    _partitioning.register(stage)
    _dce.register(stage)
    _remat.register(stage)
    _batching.register(stage)
    return stage


def _abstract(stage: Stage, *avals: Any, params: StageParams) -> list[Any]:
    # Tracing the form gives shapes and also shardings on explicit meshes and varying manual
    # axes; it is not cached by avals alone, since the mesh in context has a say too.
    form = functools.partial(stage.evaluate, params=params)
    return [aval.update(weak_type=False) for aval in jax.make_jaxpr(form)(*avals).out_avals]


def _jvp(
    stage: Stage, primals: Sequence[Any], tangents: Sequence[Any], *, params: StageParams
) -> tuple[Sequence[Any], Sequence[Any]]:
    # Reached by derivatives beyond the first only: custom_vjp serves the first.
    form = functools.partial(stage.evaluate, params=params, derivative=True)
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    results = stage.primitive.bind(*primals, params=params)
    _, tangents_out = jax.jvp(form, tuple(primals), tuple(tangents))
    return results, tangents_out

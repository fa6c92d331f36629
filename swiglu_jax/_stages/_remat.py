"""What jax.checkpoint keeps of a stage: policies that keep dots see the GEMMs inside it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import dot_general_p

from swiglu_jax._compat import Remat, offloaded_equations, register_remat_rule, remat_case
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._stage import Stage, dimensions


def register(stage: Stage) -> None:
    """Have remat policies asked about the stage's GEMMs as they are about plain ones."""
    register_remat_rule(stage.primitive, functools.partial(_rule, stage))


def _rule(
    stage: Stage,
    policy: Callable[..., Any],
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    eqn: Any,
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Split the stage between what runs now and what the backward pass runs (again).

    Returns:
        The equation for now and the one for later, each possibly None; which results are unknown
        now; which are made by the later equation; what that one needs from now.
    """
    every, none = [True] * len(eqn.outvars), [False] * len(eqn.outvars)
    needs = [
        v
        for v, there in zip(eqn.invars, instantiated, strict=True)
        if isinstance(v, core.Var) and not there
    ]
    if any(unknown):
        return None, eqn, every, every, needs
    case = _ask(stage, policy, eqn)
    if case is Remat.SAVE:
        return eqn, None, none, none, []
    if case is Remat.RECOMPUTE:
        return eqn, eqn, none, every, needs
    now, later, moved = offloaded_equations(eqn, case)
    return now, later, none, every, moved


def _ask(stage: Stage, policy: Callable[..., Any], eqn: Any) -> Any:
    params = eqn.params["params"]
    avals = [v.aval for v in eqn.invars]
    own = remat_case(policy(eqn.primitive, *avals, params=params))
    if own is not Remat.RECOMPUTE or not _has_gemm(stage, params):
        return own
    lhs, rhs = (avals[k] for k in stage.gemm)
    return remat_case(
        policy(
            dot_general_p,
            lhs,
            rhs,
            dimension_numbers=_dimension_numbers(stage, params, lhs.ndim),
            precision=params.precision,
            preferred_element_type=jnp.dtype(lhs.dtype),
            out_sharding=None,
        )
    )


def _has_gemm(stage: Stage, params: StageParams) -> bool:
    return stage.name != "down_dswiglu" or params.outputs != ("h",)


def _dimension_numbers(stage: Stage, params: StageParams, rank: int) -> Any:
    """Of ``stage.gemm``, whose left operand has this rank."""
    left, right = (
        dimensions(stage.operand_letters(params)[k], rank - 1 - _is_batched(params, stage.gemm[0]))
        for k in stage.gemm
    )
    lhs_batched, rhs_batched = (_is_batched(params, k) for k in stage.gemm)
    common = [name for name in left if name in right]
    contracted = (
        tuple(left.index(name) + lhs_batched for name in common),
        tuple(right.index(name) + rhs_batched for name in common),
    )
    batch = ((0,), (0,)) if lhs_batched and rhs_batched else ((), ())
    return (contracted, batch)


def _is_batched(params: StageParams, operand: int) -> bool:
    return bool(params.batched) and params.batched[operand]

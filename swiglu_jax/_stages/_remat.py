"""What jax.checkpoint keeps of a stage: policies see the GEMMs and the names inside it."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import dot_general_p, name_p
from jax.interpreters import partial_eval

from swiglu_jax._compat import Remat, offloaded_equations, register_remat_rule, remat_case
from swiglu_jax._stages._forms import compute_dtype
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
        if stage.name != "gate_up":
            return eqn, eqn, none, every, needs
        now, later, again, kept = _by_name(stage, policy, eqn)
        return now, later, none, again, needs + kept
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


def _by_name(
    stage: Stage, policy: Callable[..., Any], eqn: Any
) -> tuple[Any, Any, list[bool], list[core.Var]]:
    """Compute gate_up again, but for what the policy keeps by name; h from what is kept.

    The names are not equations behind the stage: h could not be made of what those keep.

    Returns:
        The equation for now and the one for later (possibly None); which results the later one
        makes; what is kept, where h is made of gate and up also such as are not asked.
    """
    params = eqn.params["params"]
    asked = dict(zip(params.outputs, eqn.outvars, strict=True))
    h = eqn.outvars[0].aval  # the type of gate and up too
    cases = {n: remat_case(policy(name_p, h, name=f"swiglu_{n}")) for n in stage.outputs}
    of_parts = "h" in asked and cases["h"] is Remat.RECOMPUTE
    kept: dict[str, core.Var] = {}
    for name, case in cases.items():
        if case is not Remat.RECOMPUTE and (name in asked or (of_parts and name != "h")):
            # Where it is offloaded, a variable in the memory that h would be moved to.
            saved = asked.get(name) or core.Var(h)
            kept[name] = saved if case is Remat.SAVE else offloaded_equations(eqn, case)[2][0]
    if not kept:
        return eqn, eqn, [True] * len(asked), []
    of_parts = of_parts and not kept.keys().isdisjoint(("gate", "up"))
    extra = {name: v for name, v in kept.items() if v is not asked.get(name)}
    again = [name for name, v in asked.items() if v is not kept.get(name)]
    missing = {*again, "gate", "up"} - {"h"} if of_parts else {*again}

    def made(names: Collection[str], operands: Sequence[jax.Array]) -> dict[str, jax.Array]:
        outputs = tuple(name for name in stage.outputs if name in names)
        asking = dataclasses.replace(params, outputs=outputs)
        return stage.bind(*operands, params=asking) if outputs else {}

    def move(a: jax.Array, here: Any, there: Any) -> jax.Array:
        near, far = here.memory_space, there.memory_space
        return a if near == far else jax.device_put(a, far, may_alias=False)

    def now(*operands: jax.Array) -> list[jax.Array]:
        results = made({*asked, *kept}, operands)
        moved = [move(results[name], h, v.aval) for name, v in extra.items()]
        return [*(results[name] for name in asked), *moved]

    def later(*given: jax.Array) -> list[jax.Array]:
        operands, moved = given[: -len(kept)], given[-len(kept) :]
        parts = {k: move(a, v.aval, h) for (k, v), a in zip(kept.items(), moved, strict=True)}
        parts |= made(missing - kept.keys(), operands)
        if of_parts:
            gate, up = (parts[name].astype(compute_dtype(h.dtype)) for name in ("gate", "up"))
            parts["h"] = (jax.nn.silu(gate) * up).astype(h.dtype)
        return [parts[name] for name in again]

    residuals = list(kept.values())
    return (
        called(now, eqn.invars, [*eqn.outvars, *extra.values()]),
        called(later, [*eqn.invars, *residuals], [asked[name] for name in again])
        if again
        else None,
        [name in again for name in asked],
        residuals,
    )


def called(function: Callable[..., Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An equation that calls ``function`` by jit, none of whose results may be an operand."""
    (eqn,) = jax.make_jaxpr(jax.jit(function))(*(v.aval for v in invars)).eqns
    return eqn.replace(invars=list(invars), outvars=list(outvars))


def split(
    policy: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    """What jax.checkpoint makes of an equation whose primitive has a rule for that, as jit's."""
    rule = partial_eval.partial_eval_jaxpr_custom_rules[eqn.primitive]
    return rule(policy, unknown, instantiated, eqn)


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

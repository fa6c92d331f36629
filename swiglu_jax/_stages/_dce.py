"""Dead-code elimination: unused outputs choose the smaller kernel, and unneeded operands go."""

import dataclasses
import functools
from typing import Any

from swiglu_jax._compat import register_dce_rule
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._stage import Stage


def register(stage: Stage) -> None:
    """Teach jaxpr DCE (jit, scan, cond, remat, ...) to ask this stage for fewer outputs."""
    register_dce_rule(stage.primitive, functools.partial(_rule, stage))


def _rule(stage: Stage, used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(eqn.invars), None
    params = eqn.params["params"]
    outputs = tuple(name for name, use in zip(params.outputs, used, strict=True) if use)
    before, after = stage.needed(params.outputs), stage.needed(outputs)
    keep = [need for need, had in zip(after, before, strict=True) if had]
    if params.batched and not any(b and k for b, k in zip(params.batched, keep, strict=True)):
        # The used results have the axis over weights too, and no operand left would give it.
        return [True] * len(eqn.invars), eqn
    eqn = eqn.replace(
        invars=[v for v, k in zip(eqn.invars, keep, strict=True) if k],
        outvars=[v for v, use in zip(eqn.outvars, used, strict=True) if use],
        params={"params": asking_for(params, outputs, keep)},
    )
    return keep, eqn


def asking_for(params: StageParams, outputs: tuple[str, ...], keep: list[bool]) -> StageParams:
    """The same stage with other outputs, of the operands that ``keep`` leaves it."""
    batched = tuple(b for b, k in zip(params.batched, keep, strict=False) if k)
    return dataclasses.replace(params, outputs=outputs, batched=batched)

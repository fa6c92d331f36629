"""Partitioning of a stage over the devices of an automatic mesh.

Where XLA divides a program among devices, a stage is lowered to a custom call that no device
runs: it carries a Shardy rule for the propagation of shardings, and its name has a partitioner
that replaces it, once the shardings are known, by the program for one device's share. So the
route is chosen for local shapes. Unlike jax.experimental.custom_partitioning, whose calls name a
Python object, everything the partitioner needs is text in the call: the persistent compilation
cache can key it, and an exported program can carry it to another process.

The rule: leading dimensions and I may be divided any way; H, the contracted one, must be whole.
What that asks of the operands (a whole weight under fully sharded data parallelism) XLA gathers,
as it does for plain JAX.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from swiglu_jax import _compat, _routes
from swiglu_jax._artifacts import digest_of_artifacts
from swiglu_jax._config import config
from swiglu_jax._device import lowering_target
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._program import program
from swiglu_jax._stages._stage import Stage
from swiglu_jax._target import CPU
from swiglu_jax._version import __version__


def register(stage: Stage) -> None:
    """Teach XLA to partition the stage's call."""
    _compat.register_partitioner(_target(stage), functools.partial(_partition, stage))


def _target(stage: Stage) -> str:
    return f"swiglu_jax_{stage.name}_partitioned"


def can_partition(stage: Stage, avals: Sequence[Any], params: StageParams) -> bool:
    """Whether the call's sharding is left to this partitioner; XLA divides its own form else.

    Raises:
        NotImplementedError: implementation="fused", where no device could run a fused kernel.
    """
    if not stage.divisible:
        return False
    call = stage.call(avals, params)
    if call.dtype not in _routes.FUSED_DTYPES or lowering_target() in (None, CPU):
        # No local shape could change that: XLA's form now, as on one device.
        _routes.choose(call, params.implementation)
        return False
    static = all(isinstance(size, int) for aval in avals for size in aval.shape)
    if not static or not _compat.shardy_partitions():
        reason = (
            "programs for several devices fuse with static shapes only; these are symbolic"
            if _compat.shardy_partitions()
            else "programs for several devices need JAX's Shardy partitioner, which is off"
        )
        if params.implementation == "fused":
            raise _routes.not_served(call, dict.fromkeys(_routes.PROVIDERS, reason))
        return False
    return True


def _dimensions(stage: Stage, params: StageParams, rank: int) -> tuple[list[list[str]], list[str]]:
    """A letter for each dimension of each operand, and of each result (they are all alike)."""
    batch = ["b"] if params.batched else []
    lead = [f"l{k}" for k in range(rank - len(batch) - 1)]
    names = []
    for k, letters in enumerate(stage.operand_letters(params)):
        own = batch if params.batched and params.batched[k] else []
        names.append([*own, *(n for c in letters for n in (lead if c == "l" else [c]))])
    return names, [*batch, *lead, "i"]


def lower(
    stage: Stage, ctx: Any, operands: Sequence[Any], params: StageParams, platform: str
) -> Sequence[Any]:
    """Lower to the call that the partitioner replaces."""
    message = {
        "params": dataclasses.asdict(params),
        "platform": platform,
        # Not read by anybody: what the partitioner's choice depends on must be in the text that
        # the persistent compilation cache keys.
        "for": [__version__, lowering_target(), config.frost_backward, digest_of_artifacts()],
    }
    names, result = _dimensions(stage, params, ctx.avals_out[0].ndim)
    return _compat.lower_partitioned_call(
        ctx,
        _target(stage),
        operands,
        json.dumps(message, sort_keys=True),
        operand_factors=names,
        result_factors=[result] * len(ctx.avals_out),
        replicated_factors=("h",),
    )


def _partition(
    stage: Stage, operands: list[Any], results: list[Any], sharding: Any, text: str
) -> tuple[bytes, list[Any], Any]:
    """The partitioner's callback.

    Args:
        stage: which stage.
        operands, results: their whole shapes.
        sharding: what Shardy gave the first result; the others get the same.
        text: the message of the call.

    Returns:
        The program for one device, the shardings that its operands need, and its results'.
    """
    message = json.loads(text)
    # JSON has lists where a parameter has tuples.
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in message["params"].items()
    }
    params = StageParams(**fields)
    names, result = _dimensions(stage, params, len(results[0].shape))
    division = _compat.Division.of(sharding, result)
    shardings = [division.of_tensor(n) for n in names]
    local = [_compat.local_shape(s, a) for s, a in zip(shardings, operands, strict=True)]
    module = _compat.in_clean_thread(_local_module, stage, local, params, message["platform"])
    return module, shardings, division.of_tensor(result)


def _local_module(stage: Stage, avals: Sequence[Any], params: StageParams, platform: str) -> bytes:
    run, _ = program(stage, avals, params, platform)

    def local(*operands: Any) -> Any:
        return run(*operands)

    local.__name__ = stage.name
    return _compat.lower_to_bytecode(local, avals, platform)

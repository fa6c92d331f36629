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
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from swiglu_jax import _compat, _routes
from swiglu_jax._artifacts import digest_of_artifacts
from swiglu_jax._candidate import FUSED_STAGES, Choice, StageCall
from swiglu_jax._config import config
from swiglu_jax._device import lowering_target
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._program import asked_call, program
from swiglu_jax._stages._stage import Stage, dimensions
from swiglu_jax._target import CPU
from swiglu_jax._version import __version__


def register(stage: Stage) -> None:
    """Teach XLA to partition the stage's call, if this partitioner can divide it."""
    if stage.divisible:
        _compat.register_partitioner(_target(stage), functools.partial(_partition, stage))


def _target(stage: Stage) -> str:
    return f"swiglu_jax_{stage.name}_partitioned"


def can_partition(stage: Stage, ctx: Any, params: StageParams) -> bool:
    """Whether the call's sharding is left to this partitioner; XLA divides its own form else.

    It is where a fused candidate serves some share of the call that a device can get. The
    partitioner asks again once the share is known, but by then H is whole on each device, which
    XLA need not have made it for a form of its own.

    Raises:
        NotImplementedError: implementation="fused", where no device could run a fused kernel.
    """
    call = asked_call(stage, ctx.avals_in, params)
    static = all(isinstance(size, int) for aval in ctx.avals_in for size in aval.shape)
    target = lowering_target()
    if target in (None, CPU):
        # As on one device, where this raises for "fused".
        _routes.choose(call, params.implementation)
        return False
    reason = ""
    if not stage.divisible:
        reason = "in a program for several devices XLA divides these products, with its own GEMMs"
    elif not _compat.shardy_partitions():
        reason = "programs for several devices need JAX's Shardy partitioner, which is off"
    elif not static:
        reason = "programs for several devices fuse with static shapes only; these are symbolic"
    declined = _routes.all_decline(reason)
    if not reason:
        found, declined = _routes.candidates(call, target)
        devices = _compat.device_count(ctx)
        if found or any(_routes.candidates(c, target)[0] for c in _shares(call, devices)):
            return True
    if params.implementation == "fused" and stage.name in FUSED_STAGES:
        raise _routes.not_served(call, declined)
    _routes.logged(call, target, Choice(None, declined))
    return False


def _shares(call: StageCall, devices: int) -> Iterator[StageCall]:
    """The calls that one of several devices may get: rows and columns over a few of them each."""
    assert call.m is not None and call.i is not None
    parts = [k for k in range(1, devices + 1) if devices % k == 0]
    for rows, columns in itertools.product(parts, parts):
        m, i = math.ceil(call.m / rows), math.ceil(call.i / columns)
        yield dataclasses.replace(call, m=m, i=i)


def _dimensions(stage: Stage, params: StageParams, rank: int) -> tuple[list[list[str]], list[str]]:
    """A letter for each dimension of each operand, and of each result (they are all alike)."""
    batch = ["b"] if params.batched else []
    leading = rank - len(batch) - 1
    names = []
    for k, letters in enumerate(stage.operand_letters(params)):
        own = batch if params.batched and params.batched[k] else []
        names.append([*own, *dimensions(letters, leading)])
    return names, [*batch, *dimensions("li", leading)]


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

"""JAX functions as contenders: called in turn on several input sets, or looped on the device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.timing import Contender
from swiglu_jax._repetition import repeated

SMALL_SECONDS = 5e-4
"""Calls predicted to be shorter are repeated inside one program: dispatch from Python takes tens
of microseconds a call."""

LOOP_SECONDS = 1e-2
"""Of one such program at best: against that its launch is small."""
MAX_REPEATS = 1024

Sets = Sequence[tuple[Any, ...]]


def predicted_seconds(flops: float, touched: float) -> float:
    """A lower estimate, from rates that today's fastest GPUs reach: it only picks the mode."""
    return max(flops / 8e14, touched / 5e12)


def contender(
    name: str, function: Callable[..., Any], sets: Sets, predicted: float, mode: str | None = None
) -> Contender:
    """Compile ``function`` for the sets and make it a contender.

    Args:
        name: its name in the results.
        function: of one set's arrays, traceable.
        sets: inputs of equal shapes, taken in turn.
        predicted: seconds a call may take at best; picks the mode.
        mode: "direct" or "loop", to say it instead.
    """
    if mode is None:
        # XLA drops optimization barriers early on the CPU, and then hoists a loop's work.
        short = predicted < SMALL_SECONDS and jax.default_backend() == "gpu"
        mode = "loop" if short else "direct"
    if mode == "direct":
        return _direct(name, function, sets)
    rounds = math.ceil(min(LOOP_SECONDS / predicted, MAX_REPEATS) / len(sets))
    return _looped(name, function, sets, rounds)


def _direct(name: str, function: Callable[..., Any], sets: Sets) -> Contender:
    compiled = jax.jit(function).lower(*sets[0]).compile()

    def run(launches: int) -> None:
        result = None
        for k in range(launches):
            # A result is dropped as soon as the next call is queued: a device runs calls in
            # order, so its memory can be taken again at once.
            result = compiled(*sets[k % len(sets)])
        jax.block_until_ready(result)

    return Contender(name, run)


def _looped(name: str, function: Callable[..., Any], sets: Sets, rounds: int) -> Contender:
    """One program that goes ``rounds`` times through the sets."""
    compiled = repeated(function, rounds).lower(list(sets)).compile()

    def run(launches: int) -> None:
        result = None
        for _ in range(launches):
            result = compiled(list(sets))
        jax.block_until_ready(result)

    return Contender(name, run, calls_per_launch=rounds * len(sets), mode="loop")

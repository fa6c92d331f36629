"""Medians of interleaved samples: the only kind of comparison that a power-limited GPU allows.

Contenders take turns, round after round, in an order that rotates; one sample is many launches
and one wait, so that the host's part and the wait are small against what is measured.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """Something that can be timed."""

    name: str
    run: Callable[[int], None]
    """Make so many launches, one after the other, and wait for the last to finish."""
    calls_per_launch: int = 1
    """How often one launch does what is being measured."""
    mode: str = "direct"
    """"direct", or how calls are repeated on the device: "loop" (XLA) or "graph" (CUDA)."""


@dataclass(frozen=True)
class Timing:
    """Samples of one contender, in milliseconds a call, in the order of the rounds."""

    samples_ms: tuple[float, ...]
    launches: int
    calls_per_launch: int
    mode: str

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def to_json(self) -> dict[str, object]:
        q1, median, q3 = quartiles(self.samples_ms)
        return {
            "median_ms": median,
            "q1_ms": q1,
            "q3_ms": q3,
            "samples_ms": list(self.samples_ms),
            "launches": self.launches,
            "calls_per_launch": self.calls_per_launch,
            "mode": self.mode,
        }


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, median, q3


def interleave(
    contenders: Sequence[Contender], rounds: int, sample_seconds: float
) -> dict[str, Timing]:
    """Time the contenders in turns.

    Args:
        contenders: compiled already; each is warmed up here.
        rounds: samples of each that count; one round before them does not.
        sample_seconds: how long one sample should last at least.

    Returns:
        Contender's name to its timing.
    """
    launches: dict[str, int] = {}
    for contender in contenders:
        contender.run(2)
        few = 2
        seconds = _seconds(contender, few) / few
        launches[contender.name] = max(1, math.ceil(sample_seconds / seconds))
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    for k in range(rounds + 1):
        turn = k % max(1, len(contenders))
        for contender in (*contenders[turn:], *contenders[:turn]):
            n = launches[contender.name]
            seconds = _seconds(contender, n)
            if k:
                per_call = seconds / (n * contender.calls_per_launch)
                samples[contender.name].append(1e3 * per_call)
    return {
        c.name: Timing(tuple(samples[c.name]), launches[c.name], c.calls_per_launch, c.mode)
        for c in contenders
    }


def _seconds(contender: Contender, launches: int) -> float:
    start = time.perf_counter()
    contender.run(launches)
    return time.perf_counter() - start

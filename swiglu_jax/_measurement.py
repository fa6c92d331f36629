"""One measurement of a stage call: every candidate's time, XLA's own, and who wins."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swiglu_jax._candidate import Candidate

PREFERENCE = 0.995
"""A fused candidate must take at most this share of XLA's time: ties go to XLA, whose form fuses
with its neighbours and which every profiler knows."""

TIE = 1.02
"""Kernels that take at most this multiple of the fastest's time are as fast as it: of those the one
that comes first where nothing was timed serves, so that noise does not choose. In a sweep on an
H200, trials put another tile first by up to 2 % where in steps it is 2 to 3 % slower."""


def for_want_of_memory(reason: str) -> bool:
    """Whether that is why a trial failed; XLA's errors have their status in their text alone."""
    return "RESOURCE_EXHAUSTED" in reason


@dataclass(frozen=True)
class Measurement:
    """Median times in microseconds of one stage call, all taken in one interleaved run."""

    xla_us: float
    candidates: tuple[tuple[Candidate, float], ...]
    failed: dict[str, str] = field(default_factory=dict)
    """Kernel to the reason why its trial failed: a decline."""

    def best(self, within: float = math.inf) -> tuple[Candidate, float] | None:
        """The fastest fused candidate and its time; of those that tie, the first offered.

        Args:
            within: microseconds that it may take at most.
        """
        least = min((us for _, us in self.candidates), default=math.inf)
        limit = min(TIE * least, within)
        return next((timed for timed in self.candidates if timed[1] <= limit), None)

    def preferred(self) -> Candidate | None:
        """The fastest fused candidate if it beats XLA's form, else None."""
        best = self.best(PREFERENCE * self.xla_us)
        return best and best[0]

    @property
    def lacked_memory(self) -> bool:
        """Whether a trial failed for want of memory, which another process may well have."""
        return any(map(for_want_of_memory, self.failed.values()))

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it back."""
        return {
            "xla_us": self.xla_us,
            "candidates": [{"candidate": asdict(c), "us": us} for c, us in self.candidates],
            "failed": self.failed,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measurement":
        """Raises KeyError, TypeError or ValueError where ``data`` is not a measurement."""
        return cls(
            xla_us=float(data["xla_us"]),
            candidates=tuple(
                (_candidate(timed["candidate"]), float(timed["us"])) for timed in data["candidates"]
            ),
            failed={str(k): str(v) for k, v in data["failed"].items()},
        )

    def restricted_to(self, offered: Sequence[Candidate]) -> "Measurement":
        """Without the candidates that are no longer offered, timed or failed."""
        names = {(c.route, c.kernel, c.ffi_target) for c in offered}
        kept = [t for t in self.candidates if (t[0].route, t[0].kernel, t[0].ffi_target) in names]
        kernels = {c.kernel for c in offered}
        failed = {kernel: reason for kernel, reason in self.failed.items() if kernel in kernels}
        return Measurement(self.xla_us, tuple(kept), failed)


def _candidate(data: dict[str, Any]) -> Candidate:
    return Candidate(
        **data
        | {
            "attributes": tuple((str(k), v) for k, v in data["attributes"]),
            "outputs": tuple(data["outputs"]),
        }
    )

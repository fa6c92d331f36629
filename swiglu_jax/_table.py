"""Measurements shipped with the package, for lowerings that cannot measure for themselves."""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from swiglu_jax._candidate import Candidate, StageCall

MARGIN = 0.98
"""A kernel must have taken at most this share of XLA's time at a neighbouring shape."""

REACH = math.log(2.0)
"""How far, as a ratio in each of M, H and I, a measured shape speaks for another."""


@dataclass(frozen=True)
class Row:
    """One measured call: XLA's time and each fused kernel's, in microseconds."""

    call: StageCall
    xla_us: float
    kernels: dict[str, float]


@functools.cache
def rows(target: str) -> tuple[Row, ...]:
    """The rows shipped for a target; none where it was never measured."""
    file = resources.files("swiglu_jax") / "tables" / f"{target}.json"
    if not file.is_file():
        return ()
    return tuple(_row(data) for data in json.loads(file.read_text())["rows"])


def _row(data: dict[str, Any]) -> Row:
    call = data["call"] | {"outputs": tuple(data["call"]["outputs"])}
    return Row(StageCall(**call), data["xla_us"], data["kernels"])


def lookup(call: StageCall, offered: Sequence[Candidate], target: str) -> Row | None:
    """The nearest row that speaks for ``call``, restricted to offered kernels.

    A row that knows none of them says nothing: they were not there to lose when it was measured.
    """
    names = {c.kernel for c in offered}
    near = [
        (distance, Row(row.call, row.xla_us, {k: row.kernels[k] for k in known}))
        for row in rows(target)
        if (distance := _distance(row.call, call)) is not None
        and (known := [kernel for kernel in row.kernels if kernel in names])
    ]
    return min(near, key=lambda pair: pair[0], default=(0.0, None))[1]


def ranked(row: Row, offered: Sequence[Candidate]) -> list[Candidate]:
    """The offered candidates, the row's fastest first; those it does not know come last."""
    order = sorted(row.kernels, key=lambda kernel: row.kernels[kernel])
    position = {kernel: k for k, kernel in enumerate(order)}
    return sorted(offered, key=lambda c: position.get(c.kernel, len(position)))


def preferred(row: Row, offered: Sequence[Candidate]) -> Candidate | None:
    """The row's fastest offered candidate if it clearly beat XLA's form, else None."""
    best = next(iter(ranked(row, offered)), None)
    if best is None or row.kernels.get(best.kernel, math.inf) > MARGIN * row.xla_us:
        return None
    return best


def _distance(measured: StageCall, asked: StageCall) -> float | None:
    """How far two calls are apart; None where one does not speak for the other."""
    same = ("stage", "outputs", "weight_layout")
    if any(getattr(measured, name) != getattr(asked, name) for name in same):
        return None
    total = 0.0
    for name in ("m", "h", "i"):
        a, b = getattr(measured, name), getattr(asked, name)
        if a is None or b is None:
            return None
        ratio = abs(math.log(a / b))
        if ratio > REACH:
            return None
        total += ratio
    # bfloat16 and float16 run at one speed; an exact match still comes first.
    return total + (measured.dtype != asked.dtype) * 1e-3

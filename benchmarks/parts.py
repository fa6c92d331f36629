"""The parts of a step alone: its nine GEMMs, and each fused stage against its plain GEMMs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from benchmarks.problems import Arrays, Problem
from swiglu_jax import _stages
from swiglu_jax._stages._program import program


@dataclass(frozen=True)
class Part:
    """One program, and how often its work occurs in a step (0: not one of the nine GEMMs)."""

    name: str
    layout: str
    function: Callable[..., Any]
    sets: Sequence[Arrays]
    times: int
    gemms: int
    """How many GEMMs of size M x H x I it does, for predicting its time."""

    @property
    def key(self) -> str:
        return f"{self.name}/{self.layout}"


def _dot(a: Any, a_axis: int, b: Any, b_axis: int) -> Any:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))


def gemms(problem: Problem, layout: str) -> Iterator[Part]:
    """The six different GEMMs of a step; three of them occur twice."""
    io = layout == "IO"
    into = 0 if io else 1  # the axis of a weight that its input is contracted with
    out = 1 - into

    def forward(a: Any, w: Any) -> Any:
        return _dot(a, 1, w, into)

    def dgrad(d: Any, w: Any) -> Any:
        return _dot(d, 1, w, out)

    def wgrad(a: Any, d: Any) -> Any:
        return _dot(a, 0, d, 0) if io else _dot(d, 0, a, 0)

    picked = [(*arrays, *hidden) for arrays, hidden in zip(problem.sets(layout), problem.hidden,
                                                            strict=True)]  # fmt: skip

    def part(name: str, times: int, function: Callable[..., Any], pick: Callable[..., Arrays]):
        return Part(name, layout, function, [pick(*p) for p in picked], times, 1)

    yield part("gate", 2, forward, lambda x, wg, wu, wd, dy, g, u, h: (x, wg))
    yield part("down", 1, forward, lambda x, wg, wu, wd, dy, g, u, h: (h, wd))
    yield part("dh", 1, dgrad, lambda x, wg, wu, wd, dy, g, u, h: (dy, wd))
    yield part("dx", 2, dgrad, lambda x, wg, wu, wd, dy, g, u, h: (g, wg))
    yield part("dw_gate", 2, wgrad, lambda x, wg, wu, wd, dy, g, u, h: (x, g))
    yield part("dw_down", 1, wgrad, lambda x, wg, wu, wd, dy, g, u, h: (h, dy))


def gate_and_up_gemms(problem: Problem, layout: str) -> Part:
    """Two plain GEMMs in one program: what the fused ``gate_up`` is compared with."""
    into = 0 if layout == "IO" else 1

    def function(x: Any, w_gate: Any, w_up: Any) -> Any:
        return _dot(x, 1, w_gate, into), _dot(x, 1, w_up, into)

    return Part("gate+up", layout, function, [s[:3] for s in problem.sets(layout)], 0, 2)


def stages(problem: Problem, layout: str, implementation: str | None) -> Iterator[Part]:
    """Both stages with three outputs, by implementation."""

    def function(stage: _stages.Stage) -> Callable[..., Any]:
        params = _stages.StageParams(stage.outputs, layout, implementation)
        platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()

        def run(*operands: Any) -> dict[str, Any]:
            # In a step the backward stage writes over gate and up. Here the next call reads them
            # again, and XLA would copy them first.
            served, _ = program(stage, operands, params, platform, overwrite=False)
            return dict(zip(params.outputs, served(*operands), strict=True))

        return run

    suffix = f"-{implementation}" if implementation else ""
    sets = problem.sets(layout)
    gate_up = function(_stages.gate_up)
    yield Part(f"gate_up{suffix}", layout, gate_up, [s[:3] for s in sets], 0, 2)
    operands = [(s[4], s[3], *h[:2]) for s, h in zip(sets, problem.hidden, strict=True)]
    down_dswiglu = function(_stages.down_dswiglu)
    yield Part(f"down_dswiglu{suffix}", layout, down_dswiglu, operands, 0, 1)

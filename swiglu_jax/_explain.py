"""explain: which route serves each stage of a call, why the others do not, and what is kept."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
import numpy as np

from swiglu_jax import _routes
from swiglu_jax._advice import advice, decline_lines, said_once
from swiglu_jax._arguments import check_arrays, check_options, dtype_of
from swiglu_jax._candidate import Choice
from swiglu_jax._config import config
from swiglu_jax._device import lowering_target
from swiglu_jax._residuals import ARGUMENTS, residual_plan
from swiglu_jax._stages import STAGES, StageParams, stage_named
from swiglu_jax._target import CPU, parse_target

_TITLES = {"input_gradient": "dx", "weight_gradients": "dw"}


@dataclass(frozen=True)
class StageReport:
    """How one stage of a call runs."""

    outputs: tuple[str, ...]
    """What the stage is asked for; empty where the pass has no fused stage."""
    route: str
    """"exported", "cudnn" or "xla"."""
    kernel: str
    """The kernel's name, with cuDNN what its graph computes; what XLA does, where it serves."""
    declined: dict[str, str] = field(hash=False)
    """Route to the reason why it does not serve this call; "<kernel> (trial)" to the reason why a
    kernel's trial failed."""
    advice: dict[str, str] = field(hash=False)
    """For each of those, what to do about it."""


@dataclass(frozen=True)
class Residual:
    """One activation kept for the backward pass."""

    name: str
    """As remat policies name it, without "swiglu_"."""
    shape: tuple[int | str, ...]
    """Text stands for a symbolic size."""
    dtype: str
    """NumPy's name of it."""
    bytes: int | None
    """None where a size is symbolic."""


@dataclass(frozen=True)
class Explanation:
    """What a call of swiglu_mlp does; prints as a table. Equal ones have one hash."""

    target: str
    """What was asked about: "cpu", or a GPU's architecture such as "sm_90a"."""
    forward: StageReport
    """gate_up: both first products, SiLU and multiply."""
    backward: StageReport
    """down_dswiglu: ``dy @ w_down`` and what gate's and up's gradients are made of."""
    gradients: dict[str, StageReport] = field(hash=False)
    """The products that give the gradients: "input_gradient" (x's), "weight_gradients"."""
    residuals: tuple[Residual, ...]
    """What the forward pass keeps for the backward one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """A table for people."""
        lines = [f"swiglu_mlp on {self.target}"]
        stages = {"forward": self.forward, "backward": self.backward}
        stages |= {_TITLES[name]: stage for name, stage in self.gradients.items()}
        declines = said_once(decline_lines(s.declined, s.advice) for s in stages.values())
        for (title, stage), declined in zip(stages.items(), declines, strict=True):
            asked = ", ".join(stage.outputs) or "no fused stage"
            lines.append(f"  {title:<9} {stage.route:<9} {stage.kernel}  ({asked})")
            lines += [f"    {line}" for line in declined]
        lines.append("  kept for the backward pass")
        for r in self.residuals:
            shape = ", ".join(map(str, r.shape))
            lines.append(f"    {r.name:<5} {r.dtype}[{shape}]  {_bytes(r.bytes)}")
        sizes = [r.bytes for r in self.residuals]
        total = sum(s for s in sizes if s is not None)
        lines.append(f"    total {_bytes(None if None in sizes else total)}" if sizes
                     else "    nothing")  # fmt: skip
        return "\n".join(lines)


def _bytes(size: int | None) -> str:
    return "? bytes (a size is symbolic)" if size is None else f"{size:,} bytes"


def explain(
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    weight_layout: str = "OI",
    implementation: str | None = None,
    forward_mode: bool = False,
    wrt: str | Iterable[str] = ARGUMENTS,
    target: str | None = None,
) -> Explanation:
    """Say how ``swiglu_mlp`` would serve these arguments; the op itself does not run.

    On the GPU that is asked about, a stage that was never measured at this shape is timed, as
    compiling the call would time it (unless SWIGLU_JAX_TUNE=0); the choice is kept.

    Args:
        x, w_gate, w_up, w_down: arrays or ``jax.ShapeDtypeStruct`` (symbolic sizes too), as
            swiglu_mlp takes them.
        weight_layout, implementation, forward_mode: as swiglu_mlp takes them.
        wrt: the names of the arguments that are differentiated, or one name; empty for a
            forward pass alone.
        target: the machine to ask about: "sm_90a", "sm_100a" or "cpu"; None asks about the
            platform that JAX runs on here (or SWIGLU_JAX_TARGET).

    Returns:
        An Explanation.

    Raises:
        TypeError, ValueError: as swiglu_mlp does, and for an unknown name in ``wrt``.
        NotImplementedError: implementation="fused" and no fused kernel serves a stage.
    """
    implementation = check_options(weight_layout, implementation, forward_mode)
    check_arrays(x, w_gate, w_up, w_down, weight_layout)
    x, w_gate, w_up, w_down = (
        jax.ShapeDtypeStruct(a.shape, dtype_of(a)) for a in (x, w_gate, w_up, w_down)
    )
    if not isinstance(wrt, Iterable):
        raise TypeError(f"wrt: expected names of {', '.join(ARGUMENTS)}, got {wrt!r}")
    wrt = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in wrt:
        if name not in ARGUMENTS:
            raise ValueError(f"wrt: expected names of {', '.join(ARGUMENTS)}, got {name!r}")
    target = _asked_target(target)
    plan = residual_plan(frozenset(wrt))
    hidden = w_gate.shape[1 if weight_layout == "IO" else 0]
    inner = jax.ShapeDtypeStruct((*x.shape[:-1], hidden), x.dtype)

    def report(stage: str, outputs: tuple[str, ...], operands: tuple[Any, ...]) -> StageReport:
        params = StageParams(outputs, weight_layout, implementation)
        asked = stage_named(stage)
        call = asked.call(asked.used(operands, params), params)
        if forward_mode and stage != "gate_up":
            declined = _routes.all_decline(
                "forward_mode=True: the backward pass is the transpose of XLA's tangent",
                "leave forward_mode out where reverse mode is all that is used",
            )
            choice = Choice(None, declined)
        elif target == CPU:
            choice = Choice(None, _routes.no_gpu((CPU,)))
            if implementation == "fused" and stage in STAGES:
                raise _routes.not_served(call, choice.declined)
        else:
            choice = _routes.choose(call, implementation, target)
        if choice.candidate:
            kernel = choice.candidate.kernel
        elif _routes.nothing_to_compute(call):
            kernel = "no kernel: there is nothing to compute"
        else:
            kernel = "XLA's own GEMMs and fusions"
        reasons = {route: why.reason for route, why in choice.declined.items()}
        todo = {route: advice(route, why, call, target) for route, why in choice.declined.items()}
        return StageReport(outputs, choice.route, kernel, reasons, todo)

    forward = report("gate_up", plan.forward, (x, w_gate, w_up))
    if plan.backward:
        backward = report("down_dswiglu", plan.backward, (x, w_down, inner, inner))
    else:
        work = "nothing but dw" if "w_down" in wrt else "no backward pass"
        backward = StageReport((), "xla", work, {}, {})
    gradients: dict[str, StageReport] = {}
    if "x" in wrt:
        operands = (inner, inner, w_gate, w_up)
        gradients["input_gradient"] = report("input_gradient", ("x",), operands)
    if weights := tuple(name for name in ARGUMENTS[1:] if name in wrt):
        operands = (x, inner, inner, inner, x)
        gradients["weight_gradients"] = report("weight_gradients", weights, operands)
    shapes = {name: inner.shape for name in ("h", "gate", "up")} | {"x": tuple(x.shape)}
    residuals = tuple(_residual(name, shapes[name], x.dtype) for name in plan.kept)
    return Explanation(target, forward, backward, gradients, residuals)


def _residual(name: str, shape: tuple[Any, ...], dtype: Any) -> Residual:
    # NumPy's integers are sizes too; a symbolic one is neither.
    sizes = tuple(int(size) if isinstance(size, Integral) else str(size) for size in shape)
    known = [size for size in sizes if isinstance(size, int)]
    count = math.prod(known) * np.dtype(dtype).itemsize if len(known) == len(sizes) else None
    return Residual(name, sizes, str(dtype), count)


def _asked_target(target: str | None) -> str:
    if target is not None:
        return parse_target(target, "target")
    if jax.default_backend() == "gpu":
        return lowering_target() or CPU
    return config.target or CPU

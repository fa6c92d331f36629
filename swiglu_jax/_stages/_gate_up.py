"""The forward's fused stage: (x, w_gate, w_up) to any subset of h, gate and up."""

import functools

from jax.extend import core

from swiglu_jax._stages import _forms, _primitive
from swiglu_jax._stages._stage import Stage


def _needed(outputs: tuple[str, ...]) -> tuple[bool, ...]:
    # Also gate or up alone keeps both weights: they are there anyway, and the kernels take both.
    return True, True, True


def _letters(weight_layout: str) -> tuple[str, ...]:
    weight = "hi" if weight_layout == "IO" else "ih"
    return "lh", weight, weight


gate_up = _primitive.define(
    Stage(
        name="gate_up",
        form=_forms.gate_up,
        derivative_form=functools.partial(_forms.gate_up, exact=False),
        needed=_needed,
        letters=_letters,
        result_letters=lambda _: ("li",) * 3,
        primitive=core.Primitive("swiglu_gate_up"),
    )
)

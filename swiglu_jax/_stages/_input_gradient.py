"""The gradient in x: (dgate, dup, w_gate, w_up) to dx = dgate @ w_gate + dup @ w_up."""

from jax.extend import core

from swiglu_jax._stages import _gradient_forms, _primitive
from swiglu_jax._stages._stage import Stage


def _needed(outputs: tuple[str, ...]) -> tuple[bool, ...]:
    return True, True, True, True


def _letters(weight_layout: str) -> tuple[str, ...]:
    weight = "hi" if weight_layout == "IO" else "ih"
    return "li", "li", weight, weight


input_gradient = _primitive.define(
    Stage(
        name="input_gradient",
        form=_gradient_forms.input_gradient,
        derivative_form=_gradient_forms.input_gradient,
        needed=_needed,
        letters=_letters,
        result_letters=lambda _: ("lh",),
        primitive=core.Primitive("swiglu_input_gradient"),
        gemm=(0, 2),
        divisible=False,
    )
)

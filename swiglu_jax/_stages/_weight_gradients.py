"""The weights' gradients, those asked: (x, dgate, dup, h, dy) to w_gate's, w_up's, w_down's."""

from jax.extend import core

from swiglu_jax._stages import _gradient_forms, _primitive
from swiglu_jax._stages._stage import Stage


def _needed(outputs: tuple[str, ...]) -> tuple[bool, ...]:
    gate, up, down = (name in outputs for name in ("w_gate", "w_up", "w_down"))
    return gate or up, gate, up, down, down


def _letters(weight_layout: str) -> tuple[str, ...]:
    return "lh", "li", "li", "li", "lh"


def _result_letters(weight_layout: str) -> tuple[str, ...]:
    return ("hi", "hi", "ih") if weight_layout == "IO" else ("ih", "ih", "hi")


weight_gradients = _primitive.define(
    Stage(
        name="weight_gradients",
        form=_gradient_forms.weight_gradients,
        derivative_form=_gradient_forms.weight_gradients,
        needed=_needed,
        letters=_letters,
        result_letters=_result_letters,
        primitive=core.Primitive("swiglu_weight_gradients"),
        divisible=False,
    )
)

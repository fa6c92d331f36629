"""The backward's fused stage: (dy, w_down, gate, up) to any subset of dgate, dup and h."""

from jax.extend import core

from swiglu_jax._stages import _forms, _primitive
from swiglu_jax._stages._stage import Stage


def _needed(outputs: tuple[str, ...]) -> tuple[bool, ...]:
    return True, True, True, "dgate" in outputs or "h" in outputs


def _letters(weight_layout: str) -> tuple[str, ...]:
    return "lh", "ih" if weight_layout == "IO" else "hi", "li", "li"


down_dswiglu = _primitive.define(
    Stage(
        name="down_dswiglu",
        form=_forms.down_dswiglu,
        derivative_form=_forms.down_dswiglu,
        needed=_needed,
        letters=_letters,
        result_letters=lambda _: ("li",) * 3,
        spent=(2, 3),
        primitive=core.Primitive("swiglu_down_dswiglu"),
    )
)

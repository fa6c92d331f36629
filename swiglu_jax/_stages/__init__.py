"""The op's stages as JAX primitives; the down projection alone is a plain product."""

from swiglu_jax._stages._absent import absent
from swiglu_jax._stages._down_dswiglu import down_dswiglu
from swiglu_jax._stages._gate_up import gate_up
from swiglu_jax._stages._input_gradient import input_gradient
from swiglu_jax._stages._params import StageParams
from swiglu_jax._stages._program import ffi_call
from swiglu_jax._stages._stage import Stage
from swiglu_jax._stages._weight_gradients import weight_gradients

STAGES = {stage.name: stage for stage in (gate_up, down_dswiglu)}
"""The two fused stages: what implementation="fused" is about."""
GRADIENT_STAGES = {stage.name: stage for stage in (input_gradient, weight_gradients)}
"""GEMMs without an epilogue: a kernel serves them where it measured faster than XLA's."""


def stage_named(name: str) -> Stage:
    """The stage of that name."""
    return (STAGES | GRADIENT_STAGES)[name]


__all__ = [
    "GRADIENT_STAGES",
    "STAGES",
    "Stage",
    "StageParams",
    "absent",
    "down_dswiglu",
    "ffi_call",
    "gate_up",
    "input_gradient",
    "stage_named",
    "weight_gradients",
]

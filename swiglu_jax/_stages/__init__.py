"""The two fused stages as JAX primitives; everything else of the op stays XLA's."""

from swiglu_jax._stages._absent import absent
from swiglu_jax._stages._down_dswiglu import down_dswiglu
from swiglu_jax._stages._gate_up import gate_up
from swiglu_jax._stages._params import StageParams

STAGES = {stage.name: stage for stage in (gate_up, down_dswiglu)}

__all__ = ["STAGES", "StageParams", "absent", "down_dswiglu", "gate_up"]

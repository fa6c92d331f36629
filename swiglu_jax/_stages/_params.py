"""The static parameter of both stage primitives: the only place that grows with a new option."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StageParams:
    """How a stage is asked to run; hashable, so that it can be a primitive's parameter."""

    outputs: tuple[str, ...]
    """What is asked, in the stage's canonical order."""
    weight_layout: str
    """"OI" or "IO"."""
    implementation: str | None = None
    """None (best route), "xla" or "fused"."""
    precision: str | None = None
    """``jax.default_matmul_precision`` at the call: lowering happens after its context is gone."""
    batched: tuple[bool, ...] = ()
    """Which operands carry a leading axis that runs over calls with weights of their own (vmap
    over weights); every result then has that axis in front. Empty where there is none."""
    out_shardings: tuple[tuple[str, Any], ...] = ()
    """On meshes with explicit axes, output name to the sharding that a gradient must have."""

    def out_sharding(self, name: str) -> Any:
        """The sharding that an output must have, or None."""
        return dict(self.out_shardings).get(name)

"""The buffers of a stage's call: names and shapes of operands and results, in their order."""

from collections.abc import Sequence

from swiglu_jax.kernels._variant import KernelVariant

Shapes = dict[str, tuple[int, ...]]


def stage_shapes(
    variant: KernelVariant, lead: Sequence[int], h: int, i: int
) -> tuple[Shapes, Shapes]:
    """Operands and results of ``variant``'s stage for tokens of any leading dimensions."""
    oi = variant.weight_layout == "OI"
    gate_or_up = (i, h) if oi else (h, i)
    every: Shapes = dict.fromkeys(("h", "gate", "up", "dgate", "dup"), (*lead, i))
    every |= {"x": (*lead, h), "dy": (*lead, h)}
    every |= {"w_gate": gate_or_up, "w_up": gate_or_up, "w_down": (h, i) if oi else (i, h)}
    results = {output: every[output] for output in variant.outputs}
    return {name: every[name] for name in _operands(variant)}, results


def _operands(variant: KernelVariant) -> tuple[str, ...]:
    outputs = set(variant.outputs)
    if variant.stage == "gate_up":
        return ("x", "w_gate", "w_up")
    if variant.stage == "down_dswiglu":
        up = ("up",) if outputs & {"dgate", "h"} else ()
        return ("dy", "w_down", "gate", *up)
    if variant.stage == "input_gradient":
        return ("dgate", "dup", "w_gate", "w_up")
    reads = {"x": {"w_gate", "w_up"}, "dgate": {"w_gate"}, "dup": {"w_up"}}
    reads |= {"h": {"w_down"}, "dy": {"w_down"}}
    return tuple(name for name, of in reads.items() if of & outputs)

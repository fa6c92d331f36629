"""What the backward pass needs, for each set of differentiated arguments, as data."""

from dataclasses import dataclass

ARGUMENTS = ("x", "w_gate", "w_up", "w_down")


@dataclass(frozen=True)
class ResidualPlan:
    """One row of the residual table."""

    forward: tuple[str, ...]
    """Outputs of the gate_up stage."""
    kept: tuple[str, ...]
    """Activations kept for the backward pass: of "h", "gate", "up" ([M, I]) and "x" ([M, H])."""
    backward: tuple[str, ...]
    """Outputs of the down_dswiglu stage; empty where the backward pass has no such stage."""


def residual_plan(differentiated: frozenset[str]) -> ResidualPlan:
    """The row of the table for a set of differentiated arguments.

    ==================  ===============  ============  =========================
    differentiated      gate_up emits    [M, I] kept   down_dswiglu emits
    ==================  ===============  ============  =========================
    nothing             h                none
    w_down only         h                h
    w_up only           h, gate          gate          dup
    w_up and w_down     h, gate          h, gate       dup
    x or w_gate in it   h, gate, up      gate, up      what is asked of dgate,
                                                       dup, and h for w_down
    ==================  ===============  ============  =========================

    ``x`` is kept too where w_gate or w_up is differentiated. h is recomputed from gate and up
    rather than kept wherever both are there anyway: a third [M, I] tensor would buy nothing,
    since the fused backward recomputes it in registers.
    """
    x, w_gate, w_up, w_down = (name in differentiated for name in ARGUMENTS)
    keep_x = ("x",) if w_gate or w_up else ()
    if x or w_gate:
        # x needs both gradients of the first layer; w_gate alone needs dgate alone.
        backward = ("dgate",) + ("dup",) * (x or w_up) + ("h",) * w_down
        return ResidualPlan(("h", "gate", "up"), ("gate", "up", *keep_x), backward)
    if w_up:
        kept = ("h",) * w_down + ("gate",)
        return ResidualPlan(("h", "gate"), kept + keep_x, ("dup",))
    return ResidualPlan(("h",), ("h",) * w_down, ())

"""The words in which a stage and a route speak: a call to serve, a candidate, a decline."""

from dataclasses import dataclass, field

FUSED_STAGES = ("gate_up", "down_dswiglu")
"""The stages that implementation="fused" insists on. The gradients' GEMMs have no epilogue to
fuse: a kernel serves them only where it is known to be faster than XLA's."""


@dataclass(frozen=True)
class StageCall:
    """One stage at one (local) shape: what a route is asked to serve."""

    stage: str
    """"gate_up", "down_dswiglu", "input_gradient" or "weight_gradients"."""
    outputs: tuple[str, ...]
    """What is asked, in the stage's canonical order."""
    weight_layout: str
    """"OI" (as ``torch.nn.Linear``) or "IO" (as a Flax kernel)."""
    dtype: str
    """NumPy name of the one dtype of operands and outputs."""
    m: int | None
    """Rows: the product of all leading dimensions; None where export leaves it symbolic."""
    h: int | None
    """Model width; None where export leaves it symbolic."""
    i: int | None
    """Hidden width; None where export leaves it symbolic."""


@dataclass(frozen=True)
class Candidate:
    """One way of serving a StageCall: one XLA FFI custom call."""

    route: str
    """"exported" or "cudnn"."""
    kernel: str
    """What a person reads in ``explain``."""
    ffi_target: str
    attributes: tuple[tuple[str, int | str], ...]
    """The call's attributes: integers travel as i64, text as strings."""
    outputs: tuple[str, ...]
    """What the call writes, in canonical order: a superset of what was asked."""
    scratch_bytes: int = 0
    """Size in bytes of a trailing uint8 result that the kernel uses as workspace."""


class Declined(Exception):
    """A route does not serve a call, for a reason known before launch."""


@dataclass(frozen=True)
class Choice:
    """What serves a stage: a candidate, or XLA's own form where ``candidate`` is None."""

    candidate: Candidate | None
    declined: dict[str, str] = field(default_factory=dict)
    """Route to the reason why it does not serve this call."""

    @property
    def route(self) -> str:
        """ "exported", "cudnn" or "xla"."""
        return self.candidate.route if self.candidate else "xla"

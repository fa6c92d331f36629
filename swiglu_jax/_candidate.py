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

    @property
    def sized(self) -> bool:
        """Whether every size is known."""
        return None not in (self.m, self.h, self.i)


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
    overwrites: bool = False
    """Whether its first outputs may take the memory of the stage's ``spent`` operands: it reads
    each element of those before it writes what takes its place."""


@dataclass(frozen=True)
class Decline:
    """Why a route, or a kernel whose trial failed, does not serve a call."""

    reason: str
    advice: str | None = None
    """One sentence on what to do about it, or why there is nothing to do; None leaves that to
    what is known of the call and the machine."""


class Declined(Exception):
    """A route does not serve a call, for a reason known before launch."""

    def __init__(self, reason: str, advice: str | None = None) -> None:
        super().__init__(reason)
        self.decline = Decline(reason, advice)


def padding(call: StageCall, **multiples: int) -> str | None:
    """The advice to pad those sizes of a call that are no multiples; None where all are.

    Args:
        call: the stage call; a symbolic size of it is left alone.
        multiples: m, h or i to what it must be a multiple of.
    """
    sizes = [
        f"pad {name.upper()}={size} to {-(-size // multiple) * multiple}"
        for name, multiple in multiples.items()
        if (size := getattr(call, name)) is not None and size % multiple
    ]
    return f"{', '.join(sizes)} with zeros, and slice the result if H grew" if sizes else None


@dataclass(frozen=True)
class Choice:
    """What serves a stage: a candidate, or XLA's own form where ``candidate`` is None."""

    candidate: Candidate | None
    declined: dict[str, Decline] = field(default_factory=dict)
    """Route to why it does not serve this call; "<kernel> (trial)" where a trial failed."""

    @property
    def route(self) -> str:
        """ "exported", "cudnn" or "xla"."""
        return self.candidate.route if self.candidate else "xla"

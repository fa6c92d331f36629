"""One kernel to export: everything that a build step, the manifest and the launcher must know."""

from collections.abc import Iterable
from dataclasses import dataclass

STAGE_OUTPUTS = {
    "gate_up": ("h", "gate", "up"),
    "down_dswiglu": ("dgate", "dup", "h"),
    "input_gradient": ("x",),
    "weight_gradients": ("w_gate", "w_up", "w_down"),
}
"""A stage's outputs in canonical order: the order of an entry's outputs and of XLA's results.

The native library has the same list (ffi/stage_call.cc)."""

ABIS = ("cute2d", "frost", "frost_stg")


def outputs_mask(stage: str, outputs: Iterable[str]) -> int:
    """A set of a stage's outputs as the native library takes it: bit n for the n-th of them.

    Raises:
        ValueError: for an output that the stage does not have.
    """
    return sum(1 << STAGE_OUTPUTS[stage].index(output) for output in outputs)


@dataclass(frozen=True)
class KernelVariant:
    """A kernel at one tile shape, for one architecture, layout, dtype and set of outputs."""

    name: str
    """A C identifier, unique over all architectures; the entry is ``__tvm_ffi_<name>``."""
    stage: str
    """A key of ``STAGE_OUTPUTS``."""
    arch: str
    """What it is compiled for: "sm_90a", "sm_100a", ..."""
    outputs: tuple[str, ...]
    """What it writes, in canonical order."""
    weight_layout: str
    """"OI" or "IO": how its weights lie in memory."""
    dtype: str
    """NumPy name of the one dtype of operands and outputs: "bfloat16" or "float16"."""
    tile: tuple[int, int, int]
    """(M, N, K) of an output tile; K in elements."""
    cluster: tuple[int, int] = (1, 1)
    """Thread blocks of a cluster along (M, N)."""
    ctas: int = 1
    """Thread blocks that share one tensor-core instruction (2 on SM100 only)."""
    abi: str = "cute2d"
    """"cute2d", "frost" or "frost_stg": README.md says what the entry takes."""
    entry_outputs: tuple[str, ...] = ()
    """The order in which the entry takes its outputs; empty: the canonical order."""
    m_multiple: int = 1
    """M must be a multiple of this."""
    h_multiple: int = 8
    """H must be a multiple of this (TMA asks for rows of 16 bytes)."""
    i_multiple: int = 8
    """I must be a multiple of this."""
    alignment: int = 16
    """Bytes that every pointer must be a multiple of."""
    residual_alignment: int = 16
    """Likewise for gate and up where they are operands."""
    fixed_i: int | None = None
    """The one I that the kernel serves, where a row pitch is compiled in."""

    @property
    def overwrites(self) -> bool:
        """Whether outputs may take the memory of gate and up, which the epilogue reads.

        What a store writes, its own block alone has read, and before: in SM90's kernels and in
        FROST's with TMA stores a whole group of columns is read, by every thread of the block that
        has a part in it, before any of it is stored. FROST's other kernels read gate and up anew
        for each output.
        """
        return self.stage == "down_dswiglu" and self.abi != "frost_stg"

    def __post_init__(self) -> None:
        """Refuse what could only be a typing error.

        Raises:
            ValueError: naming the field.
        """
        canonical = STAGE_OUTPUTS.get(self.stage)
        if canonical is None:
            raise ValueError(f"stage: expected one of {tuple(STAGE_OUTPUTS)}, got {self.stage!r}")
        if not self.outputs or tuple(o for o in canonical if o in self.outputs) != self.outputs:
            raise ValueError(
                f"outputs: expected some of {canonical} in that order, got {self.outputs}"
            )
        if self.entry_outputs and sorted(self.entry_outputs) != sorted(self.outputs):
            raise ValueError(
                f"entry_outputs: expected {self.outputs} in some order, got {self.entry_outputs}"
            )
        if self.abi not in ABIS:
            raise ValueError(f"abi: expected one of {ABIS}, got {self.abi!r}")
        if self.abi != "cute2d" and self.stage not in ("gate_up", "down_dswiglu"):
            raise ValueError(f"abi: FROST has no {self.stage}, got {self.abi!r}")
        if self.weight_layout not in ("OI", "IO"):
            raise ValueError(f'weight_layout: expected "OI" or "IO", got {self.weight_layout!r}')
        if not self.name.isidentifier() or not self.name.isascii():
            raise ValueError(f"name: expected a C identifier, got {self.name!r}")

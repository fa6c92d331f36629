"""The exported route: one kernel, compiled when the package was built, serves a whole stage.

On SM100 the kernels are FROST's, on SM90 this project's own (swiglu_jax/kernels). Which ones are
there is read from the manifest; no GPU is needed to choose one.
"""

from swiglu_jax import _native
from swiglu_jax._candidate import Candidate, Declined, StageCall, padding
from swiglu_jax._config import config
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant, outputs_mask
from swiglu_jax.kernels.sm90 import _variants as sm90

SMALL_M = 128
"""Up to this many rows one CTA's tile holds them all: a pair of CTAs would leave one idle."""
NARROW_I = 256
"""Below this a tile 256 wide is mostly empty."""


def candidates(call: StageCall, target: str) -> list[Candidate]:
    """The exported kernels that serve a stage call, the one preferred without measurement first.

    Args:
        call: the stage call.
        target: the GPU architecture that the call is lowered for; the GPU need not be here.

    Raises:
        Declined: with the reason.
    """
    reason = _native.unavailable_reason()
    if reason is not None:
        raise Declined(reason, _native.ADVICE)
    if call.stage == "down_dswiglu" and not config.frost_backward:
        raise Declined(
            "SWIGLU_JAX_FROST_BWD=0 asks for a separate GEMM and pointwise graph; unset it to "
            "fuse the backward stage",
            "unset SWIGLU_JAX_FROST_BWD",
        )
    found = _serving(call, target)
    _native.register()
    return [_candidate(variant) for variant in found]


def _serving(call: StageCall, target: str) -> list[KernelVariant]:
    shipped = [kernel.variant for kernel in _manifest.installed().kernels]
    found = _of_the_right_sizes(_narrowed(shipped, call, target), call)
    smallest = min(len(variant.outputs) for variant in found)
    found = [variant for variant in found if len(variant.outputs) == smallest]
    outputs = found[0].outputs  # of several supersets of one size, the first that is shipped
    return _ordered([variant for variant in found if variant.outputs == outputs], call)


def _narrowed(shipped: list[KernelVariant], call: StageCall, target: str) -> list[KernelVariant]:
    """Filter by everything but sizes; the first filter that leaves nothing is the reason."""
    archs = ", ".join(_manifest.installed().architectures) or "none"
    asked = ", ".join(call.outputs)
    filters = (
        (lambda v: v.arch == target,
         f"no kernel is exported for {target}; there are kernels for: {archs}"),
        (lambda v: v.stage == call.stage, f"no {call.stage} kernel is exported for {target}"),
        (lambda v: v.dtype == call.dtype,
         f"no {call.stage} kernel is exported for {call.dtype} on {target}"),
        (lambda v: v.weight_layout == call.weight_layout,
         f'no {call.stage} kernel on {target} reads weight_layout "{call.weight_layout}"'),
        (lambda v: set(call.outputs) <= set(v.outputs) and _operands(v.stage, v.outputs)
         == _operands(call.stage, call.outputs),
         f"no {call.stage} kernel on {target} writes {asked}"),
    )  # fmt: skip
    for keep, reason in filters:
        shipped = [variant for variant in shipped if keep(variant)]
        if not shipped:
            raise Declined(reason)
    return shipped


def _operands(stage: str, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Which operands a set of outputs needs beyond those that every set does."""
    if stage == "down_dswiglu":
        return ("up",) if {"dgate", "h"} & set(outputs) else ()
    return outputs if stage == "weight_gradients" else ()


def _of_the_right_sizes(found: list[KernelVariant], call: StageCall) -> list[KernelVariant]:
    if call.h is None or call.i is None:
        raise Declined("exported kernels need H and I to be known; here one is symbolic")
    reasons = []
    fitting = []
    for variant in found:
        wrong = [
            f"{name}={size} is not a multiple of {multiple}"
            for name, size, multiple in (
                ("M", call.m, variant.m_multiple),
                ("H", call.h, variant.h_multiple),
                ("I", call.i, variant.i_multiple),
            )
            # A symbolic M may turn out to be anything.
            if (multiple > 1 if size is None else size % multiple)
        ]
        if variant.fixed_i not in (None, call.i):
            wrong.append(f"I={call.i} is not {variant.fixed_i}")
        if wrong:
            reasons.append(f"{variant.name}: {', '.join(wrong)}")
        else:
            fitting.append(variant)
    if not fitting:
        multiples = {
            letter: min(getattr(variant, f"{letter}_multiple") for variant in found)
            for letter in "mhi"
        }
        raise Declined(
            f"{reasons[0]}; pad it, or let another route serve it", padding(call, **multiples)
        )
    return fitting


def _ordered(found: list[KernelVariant], call: StageCall) -> list[KernelVariant]:
    """By each architecture's own rule; else the order of the manifest."""
    if found[0].arch == sm90.ARCHITECTURE:
        return _ordered_for_sm90(found, call)
    if not all(variant.abi == "frost" for variant in found):
        return found
    pairs = [variant for variant in found if variant.ctas == 2]
    small = call.m is not None and call.m <= SMALL_M
    if pairs and not small:
        found = pairs
    elif small:
        found = [variant for variant in found if variant.ctas == 1] or found
    assert call.i is not None
    width = 128 if call.i < NARROW_I else 256
    return sorted(found, key=lambda variant: variant.tile[1] != width)


def _ordered_for_sm90(found: list[KernelVariant], call: StageCall) -> list[KernelVariant]:
    assert call.h is not None and call.i is not None
    many = 1 << 16  # a symbolic M: what serves a large one is merely slow at a small one
    m = many if call.m is None else call.m
    tiles = sm90.preferred_tiles(call.stage, m, call.h, call.i)
    return sorted(found, key=lambda variant: tiles.index(sm90.label_of(variant)))


def _candidate(variant: KernelVariant) -> Candidate:
    return Candidate(
        route="exported",
        kernel=variant.name,
        ffi_target=f"swiglu_jax_exported_{variant.stage}",
        attributes=(
            ("outputs", outputs_mask(variant.stage, variant.outputs)),
            ("weight_layout", variant.weight_layout),
            ("kernel", variant.name),
        ),
        outputs=variant.outputs,
        overwrites=variant.overwrites,
    )

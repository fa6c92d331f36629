"""Which candidate serves a stage on a target, and why the others decline."""

import logging
from collections.abc import Sequence

from swiglu_jax import _tuning
from swiglu_jax._candidate import FUSED_STAGES, Candidate, Choice, Decline, Declined, StageCall
from swiglu_jax._config import config
from swiglu_jax._device import lowering_target
from swiglu_jax._providers import PROVIDERS, SUPERSEDED, preference, provider
from swiglu_jax._target import CPU

logger = logging.getLogger("swiglu_jax")

FUSED_DTYPES = ("bfloat16", "float16")


def all_decline(reason: str, advice: str | None = None) -> dict[str, Decline]:
    """Every fused route declines, for one reason."""
    return dict.fromkeys(PROVIDERS, Decline(reason, advice))


def no_gpu(platforms: Sequence[str]) -> dict[str, Decline]:
    """Declines of every fused route for a lowering to other platforms than CUDA."""
    return all_decline(
        f"fused kernels run on CUDA GPUs; this program is lowered for {', '.join(platforms)}",
        "run on an NVIDIA GPU (the cuda13 extra brings JAX for it), or ask about one from here: "
        'explain(..., target="sm_90a"), SWIGLU_JAX_TARGET=sm_90a',
    )


def nothing_to_compute(call: StageCall) -> dict[str, Decline] | None:
    """Declines of every fused route for a call without work; None where there is some.

    An empty last batch is such a call. Its results are empty, or sums of nothing, and XLA writes
    those without a product.
    """
    sizes = {"M": call.m, "H": call.h, "I": call.i}
    zero = ", ".join(f"{letter}=0" for letter, size in sizes.items() if size == 0)
    if not zero:
        return None
    return all_decline(f"nothing to compute: {zero}", "nothing; an empty product costs nothing")


def insists(call: StageCall, implementation: str | None) -> bool:
    """Whether a fused kernel must serve, or else an error: "fused", of a stage with work to do.

    The gradients' GEMMs take "fused" for None: XLA's form is theirs where nothing beats it.
    """
    fusible = call.stage in FUSED_STAGES and nothing_to_compute(call) is None
    return implementation == "fused" and fusible


def candidates(call: StageCall, target: str) -> tuple[list[Candidate], dict[str, Decline]]:
    """Every candidate of every fused route, and the decline of each route that has none.

    The candidate that is taken where none was measured comes first.

    A route's module answers with candidates or raises Declined; any other exception is a defect
    and propagates.
    """
    found: list[Candidate] = []
    declined = nothing_to_compute(call)
    if declined is not None:
        return found, declined
    declined = {}
    for route in preference(call, target):
        try:
            if call.dtype not in FUSED_DTYPES:
                raise Declined(
                    f"fused kernels take {' or '.join(FUSED_DTYPES)}; the arguments are "
                    f"{call.dtype}",
                    "compute in bfloat16: cast the arguments, or give the Flax module "
                    "dtype=jnp.bfloat16",
                )
            if route == "cudnn" and found and target in SUPERSEDED:
                raise Declined(SUPERSEDED[target])
            found += provider(route).candidates(call, target)
        except Declined as refusal:
            declined[route] = refusal.decline
    return found, declined


def choose(call: StageCall, implementation: str | None, target: str | None = None) -> Choice:
    """What serves ``call`` in a CUDA lowering.

    Args:
        call: the stage and its local shape.
        implementation: None takes the best route that serves the call, "xla" XLA's form,
            "fused" a fused candidate, as far as it ``insists`` on one.
        target: the GPU architecture; None takes SWIGLU_JAX_TARGET or this machine's GPU.

    Raises:
        NotImplementedError: for "fused", where every candidate declined, listing why.
    """
    if implementation == "xla":
        declined = all_decline(
            'implementation="xla" was asked for',
            "leave implementation (and SWIGLU_JAX_IMPLEMENTATION) unset to take the best route",
        )
        return logged(call, target or lowering_target() or "CUDA", Choice(None, declined))
    target = target or lowering_target()
    fused = insists(call, implementation)
    empty = nothing_to_compute(call)
    if empty is not None:
        choice = Choice(None, empty)
    elif target is None:
        declined = all_decline(
            "no GPU is visible and no target is set; set SWIGLU_JAX_TARGET (for example "
            '"sm_90a" or "sm_100a") to lower for a GPU from this machine'
        )
        choice = Choice(None, declined)
    elif target == CPU:
        choice = Choice(None, no_gpu((CPU,)))
    else:
        choice = _choose_on_gpu(call, target, fused=fused)
    if choice.candidate is None and fused:
        raise not_served(call, choice.declined)
    return logged(call, target or "CUDA", choice)


def logged(call: StageCall, where: str, choice: Choice) -> Choice:
    """The choice; with SWIGLU_JAX_LOG=1 it is logged, one line a stage that is lowered."""
    if config.log:
        logger.warning(
            "%s (%s) M=%s H=%s I=%s %s %s on %s: %s%s%s",
            call.stage, ", ".join(call.outputs), call.m, call.h, call.i, call.dtype,
            call.weight_layout, where, choice.route,
            f" {choice.candidate.kernel}" if choice.candidate else "",
            "".join(f"; not {route}: {why.reason}" for route, why in choice.declined.items()),
        )  # fmt: skip
    return choice


def _choose_on_gpu(call: StageCall, target: str, *, fused: bool) -> Choice:
    found, declined = candidates(call, target)
    if not found:
        return Choice(None, declined)
    candidate, lost = _tuning.decide(call, found, target, fused=fused)
    return Choice(candidate, declined | lost)


def not_served(call: StageCall, declined: dict[str, Decline]) -> NotImplementedError:
    """The error of implementation="fused" where no fused candidate serves a call."""
    reasons = "\n".join(f"  {route}: {why.reason}" for route, why in declined.items())
    return NotImplementedError(
        f'implementation="fused": no fused kernel serves {call.stage} with outputs '
        f"{', '.join(call.outputs)} at M={call.m}, H={call.h}, I={call.i}, {call.dtype}, "
        f'layout "{call.weight_layout}":\n{reasons}\n'
        "Leave implementation unset to run these through XLA where nothing fuses."
    )

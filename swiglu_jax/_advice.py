"""What a user can do about a decline: the second half of every reason that ``explain`` gives."""

import re
from collections.abc import Iterable, Iterator, Mapping

from swiglu_jax import _native
from swiglu_jax._candidate import FUSED_STAGES, StageCall
from swiglu_jax._cudnn import OLDEST_SM, ROW_MULTIPLE
from swiglu_jax._routes import FUSED_DTYPES
from swiglu_jax._target import CPU
from swiglu_jax.kernels import _manifest

FORCE = 'implementation="fused" takes the fastest kernel all the same'


def advice(route: str, reason: str, call: StageCall, target: str) -> str:
    """One sentence on what would let ``route`` serve ``call``, or why there is nothing to do.

    Args:
        route: the route that declined.
        reason: why, in its own words.
        call: the stage call.
        target: the machine that was asked about.
    """
    return _from_the_words(route, reason, call) or _from_the_facts(route, reason, call, target)


def _from_the_words(route: str, reason: str, call: StageCall) -> str:
    """Where an option, a measurement or a library is the reason."""
    force = f" ({FORCE})" if call.stage in FUSED_STAGES else ""
    if reason.startswith("implementation="):
        return "leave implementation (and SWIGLU_JAX_IMPLEMENTATION) unset to take the best route"
    if reason.startswith("SWIGLU_JAX_FROST_BWD"):
        return "unset SWIGLU_JAX_FROST_BWD"
    if reason.startswith("forward_mode=True"):
        return "leave forward_mode out where reverse mode is all that is used"
    if route.endswith("(trial)"):
        if "RESOURCE_EXHAUSTED" in reason:
            return "compile before memory fills up: a new process tries this kernel again"
        return "nothing; its trial failed, and that of what serves did not (do report it)"
    if "never measured" in reason:
        return "compile the call on such a GPU: it is timed there unless SWIGLU_JAX_TUNE=0"
    if "shipped table has" in reason:
        return f"nothing; XLA was faster where the table was measured{force}"
    if " measured " in reason:
        return f"nothing; the faster one serves{force}"
    if reason.startswith(("cuDNN can't be opened", "cuDNN has no")) or "is older than" in reason:
        return "pip install 'swiglu-jax[cuda13]' brings the cuDNN that JAX uses too"
    return ""


def _from_the_facts(route: str, reason: str, call: StageCall, target: str) -> str:
    if target == CPU:
        return (
            "run on an NVIDIA GPU (the cuda13 extra brings JAX for it), or ask about one from "
            'here: explain(..., target="sm_90a"), SWIGLU_JAX_TARGET=sm_90a'
        )
    if call.dtype not in FUSED_DTYPES:
        return "compute in bfloat16: cast the arguments, or give the Flax module dtype=jnp.bfloat16"
    if reason == _native.unavailable_reason():
        return "on Linux x86-64 reinstall the package with gcc at hand, or `make build` a checkout"
    sm = re.match(r"sm_(\d+)", target)
    if sm is None or int(sm[1]) < OLDEST_SM:
        return "nothing; fused kernels need Hopper or newer, and XLA serves this GPU"
    if None in (call.m, call.h, call.i):
        return "give the sizes as numbers where the fused kernel is wanted"
    if 0 in (call.m, call.h, call.i):
        return "nothing; an empty product costs nothing"
    if "not a multiple" in reason:
        padded = ", ".join(_paddings(route, call, target))
        return f"{padded} with zeros, and slice the result if H grew"
    if route == "exported" and not _manifest.installed().kernels:
        return "install with the kernels: `make build` in a checkout, or a wheel for Linux x86-64"
    return "nothing; another route serves the call"


def _paddings(route: str, call: StageCall, target: str) -> Iterator[str]:
    needed = {"M": 1, "H": ROW_MULTIPLE, "I": ROW_MULTIPLE}
    if route == "exported":
        kernels = [
            k.variant for k in _manifest.installed().kernels
            if (k.variant.arch, k.variant.stage) == (target, call.stage)
        ]  # fmt: skip
        for letter in "MHI":
            multiples = [getattr(k, f"{letter.lower()}_multiple") for k in kernels]
            needed[letter] = min(multiples, default=needed[letter])
    for letter, size in (("M", call.m), ("H", call.h), ("I", call.i)):
        multiple = needed[letter]
        if size is not None and size % multiple:
            yield f"pad {letter}={size} to {-(-size // multiple) * multiple}"


def said_once(declines: Iterable[list[str]]) -> Iterator[list[str]]:
    """The lines of each stage's declines; those of the stage before are not repeated."""
    before: list[str] = []
    for lines in declines:
        yield ["declined as above"] if lines and lines == before else lines
        before = lines


def decline_lines(declined: Mapping[str, str], advices: Mapping[str, str]) -> list[str]:
    """Declines for a person: routes of one reason together, and below it what to do."""
    routes: dict[tuple[str, str], list[str]] = {}
    for route, reason in declined.items():
        routes.setdefault((reason, advices.get(route, "")), []).append(route)
    lines = []
    for (reason, todo), names in routes.items():
        lines.append(f"not {', '.join(names)}: {reason}")
        if todo:
            lines.append(f"  to do: {todo}")
    return lines

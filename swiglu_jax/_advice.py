"""What a user can do about a decline: the second half of every reason that ``explain`` gives."""

import re
from collections.abc import Iterable, Iterator, Mapping

from swiglu_jax._candidate import Decline, StageCall
from swiglu_jax._cudnn import OLDEST_SM
from swiglu_jax.kernels import _manifest


def advice(route: str, decline: Decline, call: StageCall, target: str) -> str:
    """One sentence on what would let ``route`` serve ``call``, or why there is nothing to do.

    Args:
        route: the route that declined.
        decline: its own advice goes before what call and machine suggest.
        call: the stage call.
        target: the GPU that was asked about.
    """
    return decline.advice or _from_the_facts(route, call, target)


def _from_the_facts(route: str, call: StageCall, target: str) -> str:
    sm = re.match(r"sm_(\d+)", target)
    if sm is None or int(sm[1]) < OLDEST_SM:
        return "nothing; fused kernels need Hopper or newer, and XLA serves this GPU"
    if not call.sized:
        return "give the sizes as numbers where the fused kernel is wanted"
    if route == "exported" and not _manifest.installed().kernels:
        return "install with the kernels: `make build` in a checkout, or a wheel for Linux x86-64"
    return "nothing; another route serves the call"


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

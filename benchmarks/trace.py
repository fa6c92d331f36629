"""Kernel time by module: a profiler trace, joined with the scopes in the compiled program."""

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

OTHER = "other"

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", re.MULTILINE)


def module_of_instructions(hlo: str, modules: Sequence[str]) -> dict[str, str]:
    """HLO instruction to the named scope (one of ``modules``) that it was traced in."""
    found = {}
    for name, op_name in _INSTRUCTION.findall(hlo):
        # Scopes of a backward pass read like "transpose(jvp(mlp))".
        words = re.findall(r"[\w\-]+", op_name)
        found[name] = next((w for w in words if w in modules), OTHER)
    return found


def kernel_seconds(
    run: Callable[[], Any], hlo: str, modules: Sequence[str], calls: int = 1
) -> dict[str, float]:
    """Device seconds a call, by module; "other" is what no scope claims.

    Args:
        run: does ``calls`` calls and waits.
        hlo: text of the compiled program.
        modules: scope names.
        calls: to divide by.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        owner = module_of_instructions(hlo, modules)
        seconds = dict.fromkeys((*modules, OTHER), 0.0)
        for name, nanoseconds in _device_events(profile.planes):
            seconds[owner.get(name, OTHER)] += nanoseconds * 1e-9 / calls
    return seconds


def _device_events(planes: Iterable[Any]) -> Iterable[tuple[str, float]]:
    """(HLO instruction, nanoseconds) of each kernel; on the CPU of each thunk."""
    planes = list(planes)
    gpu = [p for p in planes if p.name.startswith("/device:GPU")]
    for plane in gpu or planes:
        for line in plane.lines:
            # Lines that XLA derives from the kernels' own would count them twice.
            if gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    yield str(stats["hlo_op"]), event.duration_ns
                elif gpu:
                    yield "", event.duration_ns

"""The environment report: versions, devices, and which routes serve this machine."""

import os
import platform
from collections import Counter
from importlib import metadata
from typing import Any

import jax

from swiglu_jax import _routes
from swiglu_jax._advice import advice, decline_lines, said_once
from swiglu_jax._candidate import StageCall
from swiglu_jax._config import config
from swiglu_jax._device import lowering_target
from swiglu_jax._target import CPU
from swiglu_jax._version import __version__
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS

PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "flax", "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "apache-tvm-ffi",
)  # fmt: skip


def environment_report(target: str | None = None) -> dict[str, Any]:
    """Versions, devices, settings and, for each stage of a bf16 training step, its routes.

    Args:
        target: the machine to ask about, as ``explain`` takes it; None takes this one.

    Returns:
        Plain data. Where JAX finds no device at all, "jax_error" says why, and there are no stages:
        which route serves is asked of JAX's devices too.
    """
    devices, jax_error = _devices()
    if target is None:
        target = (lowering_target() if devices else config.target) or CPU
    return {
        "swiglu_jax": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": devices,
        "jax_error": jax_error,
        "settings": {
            "implementation": config.implementation,
            "target": config.target,
            "frost_backward": config.frost_backward,
            "tune": config.tune,
            "cache_dir": str(config.cache_dir),
            "log": config.log,
        },
        "target": target,
        "stages": {stage: _routes_of(stage, target) for stage in STAGE_OUTPUTS if devices},
        "kernels": _manifest.summary(_manifest.installed()),
        "kernels_compiled_with": _manifest.installed().versions,
    }


def _devices() -> tuple[list[str], str | None]:
    """This process's devices, or why JAX has none."""
    try:
        return [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.local_devices()], None
    except (RuntimeError, AssertionError) as error:
        # JAX asserts, without a word, where it was told to use a platform that is not there.
        asked = os.environ.get("JAX_PLATFORMS")
        return [], str(error) or f"none of JAX_PLATFORMS={asked!r} could be started"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _routes_of(stage: str, target: str) -> dict[str, Any]:
    # As a full training step asks it, at a width that every kernel takes.
    call = StageCall(stage, STAGE_OUTPUTS[stage], "IO", "bfloat16", m=8192, h=4096, i=14336)
    if target == CPU:
        found, declined = [], _routes.no_gpu((CPU,))
    else:
        found, declined = _routes.candidates(call, target)
    serving: dict[str, list[str]] = {}
    for candidate in found:
        serving.setdefault(candidate.route, []).append(candidate.kernel)
    return {
        "serving": serving | {"xla": ["XLA's own GEMMs and fusions"]},
        "declined": {route: why.reason for route, why in declined.items()},
        "advice": {route: advice(route, why, call, target) for route, why in declined.items()},
    }


def format_report(report: dict[str, Any], kernels: bool = False) -> str:
    """The report as lines for a person.

    Args:
        report: from ``environment_report``.
        kernels: whether every exported kernel gets a line, or each architecture.
    """
    lines = [f"swiglu_jax {report['swiglu_jax']}, Python {report['python']}, {report['system']}"]
    lines += [f"  {n:<22} {v or 'not installed'}" for n, v in report["packages"].items()]
    found = ", ".join(report["devices"]) or f"none; {report['jax_error']}"
    lines.append(f"devices: {found}")
    lines.append("settings: " + ", ".join(f"{k}={v}" for k, v in report["settings"].items()))
    stages = report["stages"]
    if stages:
        lines.append(f"routes of a bf16 training step on {report['target']}:")
    declines = said_once(decline_lines(r["declined"], r["advice"]) for r in stages.values())
    for (stage, routes), declined in zip(stages.items(), declines, strict=True):
        lines.append(f"  {stage}")
        for route, names in routes["serving"].items():
            lines += [f"    {route:<9} {name}" for name in names]
        lines += [f"    {line}" for line in declined]
    compilers = ", ".join(f"{k} {v}" for k, v in report["kernels_compiled_with"].items())
    lines.append(f"exported kernels: {len(report['kernels'])}, compiled with {compilers or '-'}")
    lines += _each(report["kernels"]) if kernels else _counted(report["kernels"])
    return "\n".join(lines)


def _each(kernels: list[dict[str, Any]]) -> list[str]:
    return [
        f"  {k['name']:<60} {k['tile']}, cluster {k['cluster']}, "
        f"{k['residual_alignment'] or k['alignment']}-byte aligned, {k['digest']}"
        for k in kernels
    ]


def _counted(kernels: list[dict[str, Any]]) -> list[str]:
    stages: dict[str, Counter[str]] = {}
    for kernel in kernels:
        stages.setdefault(kernel["architecture"], Counter())[kernel["stage"]] += 1
    return [
        f"  {architecture:<9} " + ", ".join(f"{n} {stage}" for stage, n in counts.items())
        for architecture, counts in stages.items()
    ]

"""The environment variables, read once when the package is imported.

Changing one later has no effect: what a program was lowered to must not depend on when in its
life a variable was set.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from swiglu_jax._target import parse_target

IMPLEMENTATIONS = ("xla", "fused")


@dataclass(frozen=True)
class Config:
    """What the user asked of this process."""

    implementation: str | None
    """Default for ``swiglu_mlp(implementation=None)``: "xla", "fused" or None (best route)."""
    target: str | None
    """GPU architecture to lower for ("sm_90a", "sm_100a"), from any machine; None: this GPU's."""
    frost_backward: bool
    """Whether a fused kernel may serve down_dswiglu; else a GEMM and a pointwise one."""
    cache_dir: Path
    """Where measured choices are kept."""
    tune: bool
    """Whether routes may be timed on this machine's GPU when XLA compiles."""
    log: bool
    """Whether each route is logged as it is chosen."""


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "")
    if text == "":
        return default
    if text not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {text!r}")
    return text == "1"


def _implementation() -> str | None:
    text = os.environ.get("SWIGLU_JAX_IMPLEMENTATION", "")
    if text == "":
        return None
    if text not in IMPLEMENTATIONS:
        raise ValueError(
            f"SWIGLU_JAX_IMPLEMENTATION: expected one of {', '.join(IMPLEMENTATIONS)} "
            f"(or unset, to take the best route), got {text!r}"
        )
    return text


def _target() -> str | None:
    text = os.environ.get("SWIGLU_JAX_TARGET", "")
    return parse_target(text, "SWIGLU_JAX_TARGET") if text else None


def _cache_dir() -> Path:
    text = os.environ.get("SWIGLU_JAX_CACHE_DIR", "")
    if text:
        return _directory("SWIGLU_JAX_CACHE_DIR", text)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # a relative one is to be ignored, says the XDG specification
        return Path(base) / "swiglu_jax"
    try:
        home = Path.home()
    except RuntimeError:
        # A user without a home (a container's). Nothing is kept, rather than in a directory that
        # others can write.
        home = Path("/nonexistent")
    return home / ".cache" / "swiglu_jax"


def _directory(name: str, text: str) -> Path:
    """A path that is a directory or can become one; a relative one, from where we are now.

    Whether it can be written is not asked: a cache that others filled is of use unwritten.
    """

    def refusal(why: str) -> ValueError:
        return ValueError(
            f"{name}: expected a directory, absolute, relative or below ~, got {text!r}: {why}"
        )

    if text != text.strip():
        raise refusal("it begins or ends with white space")
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise refusal("whose home that is, is not known") from error
    except FileNotFoundError as error:
        raise refusal("the working directory, which it starts from, is gone") from error
    # os.path asks without raising where a directory above cannot be searched.
    there = next((p for p in (path, *path.parents) if os.path.exists(p)), None)
    if there is not None and not os.path.isdir(there):
        raise refusal(f"{there} is there and no directory")
    return path


def read_environment() -> Config:
    """Read the variables now; a malformed one raises ValueError that names it."""
    return Config(
        implementation=_implementation(),
        target=_target(),
        frost_backward=_flag("SWIGLU_JAX_FROST_BWD", True),
        cache_dir=_cache_dir(),
        tune=_flag("SWIGLU_JAX_TUNE", True),
        log=_flag("SWIGLU_JAX_LOG", False),
    )


config = read_environment()

"""What the SM100 recipe leans on in other people's packages, and the error when it moves."""

import importlib.metadata

PINNED = {
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
}
"""The versions that the recipe was written against. It replaces a function of FROST and rewrites
lines that FROST generates, so another version is refused until somebody has read its source."""


class SeamMoved(RuntimeError):
    """FROST or the DSL is not what this recipe expects; nothing was exported."""


def check_versions() -> None:
    """Refuse other versions than the pinned ones.

    Raises:
        SeamMoved: naming each package that is missing or of another version.
    """
    problems = []
    for package, expected in PINNED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{package} {expected} is not installed")
            continue
        if found != expected:
            problems.append(f"{package} is {found}, the recipe knows {expected}")
    if problems:
        raise SeamMoved(
            "; ".join(problems) + ". Install what is pinned, or read swiglu_jax/kernels/sm100 "
            "against the new source and move the pin."
        )

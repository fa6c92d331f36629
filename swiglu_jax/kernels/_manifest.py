"""swiglu_jax/lib/kernels.json: which exported kernels are installed, and what each one is."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiglu_jax.kernels._variant import KernelVariant

FORMAT = 1
LIB = Path(__file__).parents[1] / "lib"
MANIFEST = LIB / "kernels.json"


def library_name(arch: str) -> str:
    """File name of the library of an architecture's kernels."""
    return f"libswiglu_jax_kernels_{arch}.so"


@dataclass(frozen=True)
class Kernel:
    """An installed kernel."""

    variant: KernelVariant
    digest: str
    """Of its sources and of the compilers' versions."""


@dataclass(frozen=True)
class Manifest:
    """What a folder of kernel libraries holds."""

    folder: Path
    kernels: tuple[Kernel, ...]
    versions: dict[str, str]
    """Of the packages that compiled the kernels."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Every architecture with a kernel, each once."""
        return tuple(dict.fromkeys(kernel.variant.arch for kernel in self.kernels))

    def libraries(self) -> list[Path]:
        """The libraries to register with the launcher."""
        return [self.folder / library_name(arch) for arch in self.architectures]


def summary(manifest: Manifest) -> list[dict[str, Any]]:
    """What is installed, for a report: a JSON object for each kernel, in the manifest's order."""
    return [
        {
            "name": v.name,
            "architecture": v.arch,
            "stage": v.stage,
            "outputs": list(v.outputs),
            "weight_layout": v.weight_layout,
            "dtype": v.dtype,
            "tile": "x".join(map(str, v.tile)),
            "cluster": "x".join(map(str, v.cluster)),
            "multiples": {"M": v.m_multiple, "H": v.h_multiple, "I": v.i_multiple},
            "alignment": v.alignment,
            "residual_alignment": v.residual_alignment if v.stage == "down_dswiglu" else None,
            "digest": kernel.digest,
        }
        for kernel in manifest.kernels
        for v in (kernel.variant,)
    ]


def _decode_variant(entry: dict[str, Any]) -> KernelVariant:
    known = {field.name for field in dataclasses.fields(KernelVariant)}
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k in known
    }
    return KernelVariant(**values)


def read(path: Path = MANIFEST) -> Manifest:
    """The manifest at ``path``; an empty one where there is none.

    Raises:
        ValueError: for a manifest of another format.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return Manifest(path.parent, (), {})
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected format {FORMAT}, got {content.get('format')}; "
            "build the kernels again"
        )
    kernels = tuple(Kernel(_decode_variant(e), e["digest"]) for e in content["kernels"])
    return Manifest(path.parent, kernels, content["versions"])


@functools.cache
def installed() -> Manifest:
    """The package's own manifest, read once."""
    return read()


def write(manifest: Manifest) -> None:
    """Write ``kernels.json`` into the manifest's folder, in one step."""
    entries = [
        {**dataclasses.asdict(kernel.variant), "digest": kernel.digest}
        for kernel in manifest.kernels
    ]
    content = {"format": FORMAT, "versions": manifest.versions, "kernels": entries}
    manifest.folder.mkdir(parents=True, exist_ok=True)
    staged = manifest.folder / ".kernels.json.new"
    staged.write_text(json.dumps(content, indent=1) + "\n")
    staged.replace(manifest.folder / MANIFEST.name)

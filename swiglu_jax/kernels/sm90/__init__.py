"""Kernels for SM90 (H100, H200): one CuTe DSL GEMM, three epilogues, a few tiles."""

from pathlib import Path

from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90._tile import Tile
from swiglu_jax.kernels.sm90._variants import variants

__all__ = ["compile_and_export", "variants"]


def compile_and_export(variant: KernelVariant, path: Path, tile: Tile | None = None) -> None:
    """Compile ``variant`` and write its object file at ``path``; needs no GPU.

    Args:
        variant: what to compile.
        path: of the object file.
        tile: one to try; None: the shipped one that the variant's name ends in.

    Raises:
        KeyError: where no shipped tile has that name.
    """
    from swiglu_jax.kernels.sm90 import _compile  # noqa: PLC0415 - it imports the DSL

    _compile.compile_and_export(variant, path, tile)

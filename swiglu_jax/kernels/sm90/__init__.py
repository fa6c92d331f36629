"""Kernels for SM90 (H100, H200): one CuTe DSL GEMM, three epilogues, a few tiles."""

from pathlib import Path

from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90._variants import variants

__all__ = ["compile_and_export", "variants"]


def compile_and_export(variant: KernelVariant, path: Path) -> None:
    """Compile ``variant`` and write its object file at ``path``; needs no GPU.

    Raises:
        KeyError: where no tile has the variant's name.
    """
    from swiglu_jax.kernels.sm90 import _compile  # noqa: PLC0415 - it imports the DSL

    _compile.compile_and_export(variant, path)

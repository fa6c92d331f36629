"""Kernels for SM100 (B200): cuDNN graphs that NVIDIA's FROST compiles to CuTe DSL kernels.

The backward stage is one GEMM with the dSwiGLU epilogue, the forward stage a dual GEMM with the
SwiGLU epilogue. FROST ships in nvidia-cudnn-frontend; it is driven here with no GPU present.
"""

from pathlib import Path

from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm100._variants import variants

__all__ = ["compile_and_export", "variants"]


def compile_and_export(variant: KernelVariant, path: Path) -> None:
    """Compile ``variant`` with FROST and write its object file at ``path``.

    Raises:
        SeamMoved: where FROST is not the version, or does not behave as, this recipe leans on.
    """
    from swiglu_jax.kernels.sm100 import _recipe  # noqa: PLC0415 - it imports the compilers

    _recipe.compile_and_export(variant, path)

"""Kernels for SM120 (RTX-class Blackwell), from FROST's SM120 family by the recipe of ../sm100."""

from swiglu_jax.kernels.sm100 import compile_and_export
from swiglu_jax.kernels.sm120._variants import variants

__all__ = ["compile_and_export", "variants"]

"""SwiGLU MLPs as Flax modules, and converters for checkpoints stored as PyTorch stores them.

The modules are in ``swiglu_jax.flax.nnx`` and ``swiglu_jax.flax.linen``. Needs the ``flax`` extra.
"""

try:
    import flax as _flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "swiglu_jax.flax needs Flax, which is not installed: pip install 'swiglu-jax[flax]'"
    ) from error

from swiglu_jax.flax._checkpoints import (
    kernels_from_fused,
    kernels_from_torch,
    kernels_to_torch,
)

__all__ = ["kernels_from_fused", "kernels_from_torch", "kernels_to_torch"]

"""SwiGLU MLP for JAX: one custom_vjp function, fused GPU kernels through XLA FFI, XLA elsewhere."""

from swiglu_jax._explain import explain
from swiglu_jax._mlp import swiglu_mlp
from swiglu_jax._version import __version__

__all__ = ["__version__", "explain", "swiglu_mlp"]

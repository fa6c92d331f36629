"""SwiGLU MLP for JAX."""

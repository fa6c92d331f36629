"""Benchmarks of swiglu_jax against plain JAX and its peers; ``python -m benchmarks --help``."""

"""The GPU that CUDA lowerings are for: the one asked for, or the one in this machine."""

import functools

import jax

from swiglu_jax._config import config
from swiglu_jax._target import target_of_capability


@functools.cache
def local_gpu_target() -> str | None:
    """The architecture of this process's first CUDA GPU, or None where JAX sees none."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    return target_of_capability(device.compute_capability)


def local_gpu_ordinal() -> int:
    """The CUDA ordinal of this process's first CUDA GPU; 0 where JAX sees none.

    It need not be 0: JAX can be told to use some of the GPUs that CUDA shows.
    """
    try:
        return jax.local_devices(backend="cuda")[0].local_hardware_id
    except RuntimeError:
        return 0


def lowering_target() -> str | None:
    """The GPU that a CUDA lowering is for: SWIGLU_JAX_TARGET, else this machine's, else None."""
    return config.target or local_gpu_target()

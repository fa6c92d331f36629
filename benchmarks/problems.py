"""Inputs: random, made on the device, and as many sets as it takes to leave the L2 cache."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.shapes import Shape

ROTATION_BYTES = 256_000_000
"""Twice the L2 of the largest GPU of today, about: calls in turn on sets this large in sum find
none of their inputs cached."""

MAX_SETS = 8

Arrays = tuple[Any, ...]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    # Never zeros: a GPU's power, and so its clocks, depend on the bits that flip.
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


class Problem:
    """One shape's inputs: x, weights in both layouts, and the cotangent dy."""

    def __init__(self, shape: Shape, seed: int, rotate: bool = True):
        self.shape = shape
        count = math.ceil(ROTATION_BYTES / shape.touched_bytes()) if rotate else 1
        self.keys = jax.random.split(jax.random.key(seed), min(MAX_SETS, max(1, count)))

    @functools.cached_property
    def oi(self) -> list[Arrays]:
        """Sets of (x, w_gate, w_up, w_down, dy) with weights as torch.nn.Linear stores them."""
        return [self._set(key) for key in self.keys]

    @functools.cached_property
    def io(self) -> list[Arrays]:
        """The same numbers with weights as a Flax kernel."""
        transpose = jax.jit(jnp.transpose)
        return [(x, *map(transpose, ws), dy) for x, *ws, dy in self.oi]

    def sets(self, layout: str) -> Sequence[Arrays]:
        return self.oi if layout == "OI" else self.io

    @functools.cached_property
    def hidden(self) -> list[Arrays]:
        """A set's [M, I] tensors, as a step has them: gate, up, h (any numbers of such a size)."""
        m, i = self.shape.m, self.shape.i
        return [
            tuple(normal(k, (m, i), self.shape.dtype, 0.5) for k in jax.random.split(key, 3))
            for key in self.keys
        ]

    def _set(self, key: jax.Array) -> Arrays:
        m, h, i, dtype = self.shape.m, self.shape.h, self.shape.i, self.shape.dtype
        kx, kg, ku, kd, ky = jax.random.split(key, 5)
        return (
            normal(kx, (m, h), dtype, 1.0),
            normal(kg, (i, h), dtype, h**-0.5),
            normal(ku, (i, h), dtype, h**-0.5),
            normal(kd, (h, i), dtype, i**-0.5),
            normal(ky, (m, h), dtype, 1.0),
        )

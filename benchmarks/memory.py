"""What a layer keeps for its backward pass under lax.scan, from the compiled program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.absent import NotMade
from benchmarks.mlps import JaxMlp
from benchmarks.shapes import Shape

LAYERS = 16


def kept_memory(
    mlp: JaxMlp, shape: Shape, wrt: Sequence[str] | None = None, layers: int = LAYERS
) -> dict[str, float]:
    """Compile (and do not run) the gradients of a scan over residual layers.

    Args:
        mlp: packed weights are stacked over layers.
        shape: of one layer.
        wrt: which of "x", "w_gate", "w_up", "w_down" are differentiated; None for all.
        layers: in the longer of the two programs whose difference counts.

    Returns:
        temp_bytes of the program with ``layers`` layers; kept_bytes_per_layer, from the
        difference to one of half as many; and that in [M, I] tensors, with and without the
        [M, H] tensor that the scan keeps for a layer's own input.
    """
    few = layers // 2
    many_bytes, few_bytes = (_temp_bytes(mlp, shape, n, wrt) for n in (layers, few))
    per_layer = (many_bytes - few_bytes) / (layers - few)
    size = np.dtype(jnp.dtype(shape.dtype)).itemsize
    return {
        "layers": layers,
        "temp_bytes": many_bytes,
        "kept_bytes_per_layer": per_layer,
        "hidden_tensors_and_x": per_layer / (shape.m * shape.i * size),
        "hidden_tensors": (per_layer / size - shape.m * shape.h) / (shape.m * shape.i),
    }


def _temp_bytes(mlp: JaxMlp, shape: Shape, layers: int, wrt: Sequence[str] | None) -> int:
    m, h, i = shape.m, shape.h, shape.i
    first, down = ((i, h), (h, i)) if mlp.layout == "OI" else ((h, i), (i, h))
    plain = [jax.ShapeDtypeStruct((layers, *s), shape.dtype) for s in (first, first, down)]
    stacked = jax.eval_shape(jax.vmap(mlp.pack), *plain)
    x = jax.ShapeDtypeStruct((m, h), shape.dtype)
    names = ("x", "w_gate", "w_up", "w_down")
    differentiated = tuple(k for k, name in enumerate(names) if wrt is None or name in wrt)
    if len(stacked) != 3:
        if wrt is not None:
            raise ValueError("wrt: this contender packs its weights; leave wrt unset")
        differentiated = tuple(range(1 + len(stacked)))

    def loss(x: Any, *weights: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return x + mlp.apply(x, *w), None

        y, _ = lax.scan(layer, x, weights)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    program = jax.jit(jax.value_and_grad(loss, argnums=differentiated))
    analysis = program.lower(x, *stacked).compile().memory_analysis()
    if analysis is None:
        raise NotMade("this platform gives no memory analysis")
    return int(analysis.temp_size_in_bytes)

"""Train SwiGLU layers sharded over a mesh of devices: data and tensor parallel.

    python examples/train_sharded.py                 # all GPUs
    python examples/train_sharded.py --cpu-devices 8 # a CPU that poses as eight devices

The kernels carry axis names, rules say over which mesh axis each name is split, and XLA does the
rest. The same training on one device runs beside it, to compare. Needs the `demo` extra.
"""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from swiglu_jax.flax.nnx import SwiGLUMLP

RULES = (("embed", None), ("mlp", "tensor"))


class Model(nnx.Module):
    """Residual SwiGLU layers. With `names`, their kernels are split as the rules say."""

    def __init__(self, layers: int, width: int, hidden: int, names: bool, rngs: nnx.Rngs):
        metadata = {"out_sharding": ("embed", "mlp"), "sharding_rules": RULES} if names else {}
        self.layers = nnx.List(
            [SwiGLUMLP(width, hidden, kernel_metadata=metadata, rngs=rngs) for _ in range(layers)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[batch, width]` to the same shape."""
        for layer in self.layers:
            x = x + layer(x)
        return x


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """One update in place; returns the loss before it."""

    def loss(model: Model) -> jax.Array:
        return jnp.mean(jnp.square(model(x) - y))

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def fit(model: Model, x: jax.Array, y: jax.Array, steps: int) -> list[float]:
    """Train `model` in place; return the loss of each step."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return [float(train_step(model, optimizer, x, y)) for _ in range(steps)]


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """A mesh of `devices` devices with axes data and tensor, as square as may be."""
    data = max(d for d in range(1, math.isqrt(devices) + 1) if devices % d == 0)
    shape, names = (data, devices // data), ("data", "tensor")
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2)


def run(layers: int, width: int, hidden: int, batch: int, steps: int, seed: int) -> dict[str, Any]:
    """Train on all devices and on one; return both loss curves and how a kernel was split."""
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (batch, width))
    y = jnp.roll(x, 1, axis=-1)
    alone = Model(layers, width, hidden, False, nnx.Rngs(seed))
    mesh = mesh_of(jax.device_count())
    with jax.set_mesh(mesh):
        # Under jit, so that each device makes its own part and no kernel is ever whole anywhere.
        spread = nnx.jit(lambda: Model(layers, width, hidden, True, nnx.Rngs(seed)))()
        split = NamedSharding(mesh, PartitionSpec("data"))
        losses = fit(spread, jax.device_put(x, split), jax.device_put(y, split), steps)
    kernel = spread.layers[0].down_proj.kernel[...]
    return {
        "mesh": dict(mesh.shape),
        "kernel": kernel.shape,
        "kernel_on_one_device": kernel.sharding.shard_shape(kernel.shape),
        "losses": losses,
        "losses_on_one_device": fit(alone, x, y, steps),
    }


def main() -> None:
    """Train, compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = (("layers", 4), ("width", 64), ("hidden", 256), ("batch", 256), ("steps", 50))
    for name, default in (*sizes, ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu-devices", type=int, help="use the CPU, as that many devices")
    given = vars(parser.parse_args())
    if (count := given.pop("cpu_devices")) is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    result = run(**given)
    print(
        f"mesh {result['mesh']}; a down kernel {result['kernel']}, of which a device holds "
        f"{result['kernel_on_one_device']}\n"
        f"loss {result['losses'][0]:.4f} to {result['losses'][-1]:.4f}; on one device "
        f"{result['losses_on_one_device'][0]:.4f} to {result['losses_on_one_device'][-1]:.4f}"
    )


if __name__ == "__main__":
    main()

"""Train the demo's language model on meshes of devices, and compare the loss curves.

    python examples/train_sharded.py                             # every way below, side by side
    python examples/train_sharded.py --mesh dp=4,tp=2 --mesh fsdp=8
    JAX_PLATFORMS=cpu python examples/train_sharded.py           # where there are GPUs, too

A mesh is written as its axes and their sizes, of

    dp    data parallel: the batch is split, the weights are copied
    fsdp  fully sharded data parallel: the batch is split, and every weight too; XLA gathers a
          weight where it is used
    tp    tensor parallel: heads and the MLP's hidden columns are split

Nothing here is about the MLP's kernels: arrays are placed, and `jax.jit` does the rest, with fused
calls on each device's share where the GPU has them. The same batches and the same initial weights
give the same losses on each mesh, to rounding. Uses the GPUs, or a CPU that poses as eight devices.
Needs the `demo` extra.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lm.data import VOCABULARY, load_corpus, sample_batches
from lm.model import LanguageModel, ModelConfig
from lm.train import TrainConfig, custom_calls, make_optimizer, train_step

CPU_DEVICES = 8
MESHES = ("dp=1", "dp=8", "tp=8", "fsdp=8", "dp=4,tp=2", "fsdp=4,tp=2")
TENSOR_AXIS = {
    # which dimension of a kernel belongs to one head or one hidden column
    "qkv": 2,  # [width, 3, heads, head width]
    "out": 0,  # [heads, head width, width]
    "gate_proj": 1,  # [width, hidden]
    "up_proj": 1,
    "down_proj": 0,  # [hidden, width]
}


def parse_mesh(text: str) -> dict[str, int]:
    """Read "dp=4,tp=2".

    Raises:
        ValueError: for anything else than distinct axes of dp, fsdp, tp with sizes from 1.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("dp", "fsdp", "tp") or name in axes or not size.isdigit() or size == "0":
            raise ValueError(f'mesh: expected axes of dp, fsdp, tp as in "dp=4,tp=2", got {text!r}')
        axes[name] = int(size)
    return axes


def make_mesh(axes: Mapping[str, int]) -> jax.sharding.Mesh:
    """A mesh of the first devices, its axes left to XLA's partitioner."""
    devices = jax.devices()[: math.prod(axes.values())]
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def weight_spec(path: Sequence[Any], shape: tuple[int, ...], axes: Mapping[str, int]) -> P:
    """How a weight of this name and shape is split over a mesh.

    Over tp by the table above; over fsdp along the longest dimension that is left and divides.
    """
    spec: list[str | None] = [None] * len(shape)
    for name, dimension in TENSOR_AXIS.items():
        if "tp" in axes and name in path:
            spec[dimension] = "tp"
    if "fsdp" in axes:
        free = [d for d, s in enumerate(shape) if spec[d] is None and s % axes["fsdp"] == 0]
        if free:
            spec[max(free, key=lambda d: shape[d])] = "fsdp"
    return P(*spec)


def place(model: LanguageModel, mesh: jax.sharding.Mesh) -> dict[str, tuple[int, ...]]:
    """Split the model's weights over the mesh; name to what one device holds of them."""
    graph, state = nnx.split(model)
    del graph
    held: dict[str, tuple[int, ...]] = {}
    placed = []
    for path, weight in nnx.to_flat_state(state):
        sharding = NamedSharding(mesh, weight_spec(path, weight.shape, dict(mesh.shape)))
        placed.append((path, weight.replace(jax.device_put(weight[...], sharding))))
        held[".".join(map(str, path))] = sharding.shard_shape(weight.shape)
    nnx.update(model, nnx.from_flat_state(placed))
    return held


def run(
    axes: Mapping[str, int], model: ModelConfig, training: TrainConfig, data: np.ndarray
) -> dict[str, Any]:
    """Train on one mesh, on the bytes ``data``.

    Returns:
        "losses", one a step; "held", what a device holds of each weight; "custom_calls" of this
        package in the lowered step.
    """
    mesh = make_mesh(axes)
    network = LanguageModel(model, nnx.Rngs(training.seed))
    held = place(network, mesh)
    optimizer = make_optimizer(network, training, nnx.Param)
    rows = NamedSharding(mesh, P(tuple(name for name in axes if name != "tp")))
    batches = sample_batches(data, training.batch, training.length, training.seed)
    first = jax.device_put(next(batches), rows)
    lowered = train_step.lower(network, optimizer, first)
    step = lowered.compile()
    losses = [float(step(network, optimizer, first))]
    for _ in range(training.steps - 1):
        losses.append(float(step(network, optimizer, jax.device_put(next(batches), rows))))
    return {"losses": losses, "held": held, "custom_calls": custom_calls(lowered.as_text())}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", action="append", help="axes and sizes; may be given again")
    sizes = {"steps": 20, "batch": 16, "length": 64, "layers": 2, "width": 128, "hidden": 384}
    for name, default in {**sizes, "heads": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--implementation", choices=["auto", "xla", "fused"], default="auto")
    return parser.parse_args()


def main() -> None:
    """Train on each mesh and print the curves side by side."""
    arguments = parse_arguments()
    asked = [m for m in MESHES if math.prod(parse_mesh(m).values()) <= jax.device_count()]
    meshes = arguments.mesh or asked
    implementation = None if arguments.implementation == "auto" else arguments.implementation
    model = ModelConfig(
        VOCABULARY, arguments.layers, arguments.width, arguments.hidden, arguments.heads,
        arguments.dtype, implementation,
    )  # fmt: skip
    training = TrainConfig(
        arguments.steps, arguments.batch, arguments.length, learning_rate=3e-3, seed=arguments.seed
    )
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, {arguments.dtype}")
    corpus = load_corpus().train
    results = {}
    for text in meshes:
        results[text] = run(parse_mesh(text), model, training, corpus)
        held = results[text]["held"]["blocks.0.mlp.up_proj.kernel"]
        calls = ", ".join(results[text]["custom_calls"]) or "none"
        print(f"{text}: of an up kernel {(model.width, model.hidden)} a device holds {held}; "
              f"custom calls: {calls}")  # fmt: skip
    print("step  " + "  ".join(f"{text:>12}" for text in meshes))
    for step in range(training.steps):
        row = (f"{results[text]['losses'][step]:12.5f}" for text in meshes)
        print(f"{step:4}  " + "  ".join(row))
    curves = np.array([results[text]["losses"] for text in meshes])
    apart = np.abs(curves - curves[0]).max() / curves[0].max()
    print(f"largest difference from the first curve: {apart:.1e} of the loss")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)  # says nothing to GPUs
    main()

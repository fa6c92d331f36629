"""Fine-tune a language model with its weights frozen, and see what that spares.

    python examples/finetune_frozen.py

A small model learns the Python standard library without its `encodings` package. Then low-rank
adapters beside the attention's input projections (LoRA, arXiv:2106.09685) learn that package while
every weight of the model stays as it is. Only the adapters are differentiated, so no MLP computes a
weight gradient or keeps its input; the memory of a step is printed for several choices of what is
trained. Needs the `demo` extra.
"""

import argparse
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from lm.data import (
    STANDARD_LIBRARY,
    VOCABULARY,
    load_corpus,
    spread_batches,
    unigram_entropy,
)
from lm.model import LanguageModel, Layer, ModelConfig
from lm.train import TrainConfig, held_out_loss, loss_fn, train

_TARGET = "encodings"

FROZEN = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
CHOICES = {
    "everything": nnx.Param,
    "the MLPs' down projections": nnx.PathContains("down_proj"),
    "the adapters": nnx.LoRAParam,
    "the last layer's norm, the head": nnx.Any(nnx.PathContains("norm"), nnx.PathContains("head")),
}
"""What may be trained, as NNX filters."""


class Adapted(nnx.Module):
    """A layer and a low-rank update of its result."""

    def __init__(self, base: Layer, inputs: int, rank: int, outputs: int, rngs: nnx.Rngs):
        self.base = base
        self.update = nnx.LoRA(inputs, rank, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's result plus the update, which starts at zero."""
        y = self.base(x)
        return y + self.update(x).reshape(y.shape)


def adapt(model: LanguageModel, width: int, rank: int, rngs: nnx.Rngs) -> None:
    """Put an adapter beside each layer's projection to queries, keys and values."""
    for block in model.blocks:
        block.attention.qkv = Adapted(block.attention.qkv, width, rank, 3 * width, rngs)


def step_bytes(model: LanguageModel, trained: Any, windows: jax.Array) -> int:
    """Temporary bytes of a forward and backward pass that differentiates ``trained`` alone."""
    gradient = nnx.jit(nnx.grad(loss_fn, argnums=nnx.DiffState(0, trained)))
    analysis = gradient.lower(model, windows).compile().compiled.memory_analysis()
    assert analysis is not None, "this platform does not tell"
    return analysis.temp_size_in_bytes


def run(config: ModelConfig, base: TrainConfig, adapters: TrainConfig, rank: int) -> dict[str, Any]:
    """Train, adapt with the weights frozen, and measure; losses are on held-out files."""
    rngs = nnx.Rngs(base.seed)
    model = LanguageModel(config, rngs)
    train(model, load_corpus(without=[_TARGET]), base)

    target = load_corpus(STANDARD_LIBRARY / _TARGET)
    watched = list(spread_batches(target.held_out, adapters.batch, adapters.length, 8))
    adapt(model, config.width, rank, rngs)
    before = held_out_loss(model, watched)
    frozen = nnx.to_pure_dict(nnx.state(model, FROZEN))
    train(model, target, adapters, nnx.LoRAParam)
    after = nnx.to_pure_dict(nnx.state(model, FROZEN))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), frozen, after)
    return {
        "target_loss_before": before,
        "target_loss_after": held_out_loss(model, watched),
        "target_unigram_entropy": unigram_entropy(target.held_out),
        "adapter_parameters": size_of(model, nnx.LoRAParam),
        "frozen_parameters": size_of(model, FROZEN),
        "frozen_parameters_moved": any(jax.tree.leaves(moved)),
        "step_bytes": {
            name: step_bytes(model, trained, watched[0]) for name, trained in CHOICES.items()
        },
    }


def size_of(model: nnx.Module, filter_: Any) -> int:
    """Number of parameters that a filter picks."""
    return sum(p.size for p in jax.tree.leaves(nnx.state(model, filter_)))


def main() -> None:
    """Train, adapt, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = (("steps", 150), ("adapter-steps", 100), ("rank", 8), ("layers", 4), ("width", 128))
    for name, default in (*sizes, ("hidden", 384), ("batch", 8), ("length", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    heads = max(1, given.width // 64)
    config = ModelConfig(VOCABULARY, given.layers, given.width, given.hidden, heads, given.dtype)
    base = TrainConfig(given.steps, given.batch, given.length, 3e-3, given.seed)
    adapters = replace(base, steps=given.adapter_steps, learning_rate=1e-2)
    result = run(config, base, adapters, given.rank)
    print(
        f"on {_TARGET}, whose byte-unigram entropy is {result['target_unigram_entropy']:.3f}: loss "
        f"{result['target_loss_before']:.3f} nats per byte before, "
        f"{result['target_loss_after']:.3f} after training {result['adapter_parameters']:,} "
        f"parameters of adapters; {result['frozen_parameters']:,} stayed as they were\n"
        "temporary memory of a forward and backward pass"
    )
    for name, size in result["step_bytes"].items():
        print(f"  {name:<32} {size / 1e6:6.1f} MB")


if __name__ == "__main__":
    main()

"""Train a byte-level transformer language model whose MLPs are `swiglu_jax.flax.nnx.SwiGLUMLP`.

    python examples/train_lm.py                          # sizes that suit the machine
    python examples/train_lm.py --steps 50 --implementation xla

The text is the Python standard library's own sources, split by file. The loss on the held-out
files is printed beside their byte-unigram entropy, which is the best that a model blind to context
can do. The loss curve and a JSON summary go to `examples/out/`. Needs the `demo` extra.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from flax import nnx

import swiglu_jax
from lm.data import VOCABULARY, load_corpus, unigram_entropy
from lm.model import LanguageModel, ModelConfig
from lm.plot import plot_losses
from lm.train import TrainConfig, sample, train


@dataclass(frozen=True)
class Defaults:
    """Sizes that train in about a minute and a half on the kind of machine they are named for."""

    steps: int
    batch: int
    length: int
    layers: int
    width: int
    hidden: int
    dtype: str


DEFAULTS = {
    "cpu": Defaults(500, 8, 128, layers=4, width=128, hidden=384, dtype="float32"),
    "gpu": Defaults(3000, 32, 512, layers=8, width=512, hidden=1536, dtype="bfloat16"),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line; sizes that are not given suit the platform JAX runs on."""
    platform = "cpu" if jax.default_backend() == "cpu" else "gpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--implementation",
        choices=["auto", "xla", "fused"],
        default="auto",
        help="route of the MLPs: the best that serves them, XLA, or fused kernels or an error",
    )
    for name, value in asdict(DEFAULTS[platform]).items():
        kind = type(value)
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"default: {value}")
    parser.add_argument("--heads", type=int, help="default: one for every 64 of the width")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default: 3e-3")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    return parser.parse_args()


def route_of(config: ModelConfig, tokens: int) -> dict[str, str]:
    """The route that serves the MLPs' forward and backward stage in a training step."""
    dtype = config.dtype
    up = jax.ShapeDtypeStruct((config.width, config.hidden), dtype)
    down = jax.ShapeDtypeStruct((config.hidden, config.width), dtype)
    x = jax.ShapeDtypeStruct((tokens, config.width), dtype)
    explained = swiglu_jax.explain(
        x, up, up, down, weight_layout="IO", implementation=config.implementation
    )
    return {"forward": explained.forward.route, "backward": explained.backward.route}


def main() -> None:
    """Train, then print and write what came of it."""
    arguments = parse_arguments()
    corpus = load_corpus()
    unigram = unigram_entropy(corpus.held_out)
    model_config = ModelConfig(
        vocabulary=VOCABULARY,
        layers=arguments.layers,
        width=arguments.width,
        hidden=arguments.hidden,
        heads=arguments.heads or max(1, arguments.width // 64),
        dtype=arguments.dtype,
        implementation=None if arguments.implementation == "auto" else arguments.implementation,
    )
    train_config = TrainConfig(
        arguments.steps, arguments.batch, arguments.length, arguments.learning_rate, arguments.seed
    )
    route = route_of(model_config, train_config.batch * train_config.length)
    print(
        f"{len(corpus.train):,} bytes of {corpus.train_files} files to train on, "
        f"{len(corpus.held_out):,} of {corpus.held_out_files} held out\n"
        f"on {jax.devices()[0].device_kind}, {arguments.dtype}; MLP routes: "
        f"forward {route['forward']}, backward {route['backward']}"
    )

    started = time.perf_counter()
    model = LanguageModel(model_config, nnx.Rngs(arguments.seed))
    history = train(model, corpus, train_config)
    seconds = time.perf_counter() - started

    step, loss = history.held_out[-1]
    summary = {
        "held_out_loss": loss,
        "held_out_unigram_entropy": unigram,
        "nats_below_unigram": unigram - loss,
        "route": route,
        "custom_calls": history.custom_calls,
        "implementation": arguments.implementation,
        "tokens_per_second": history.tokens_per_second,
        "seconds": seconds,
        "parameters": sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": asdict(model_config),
        "training": asdict(train_config),
        "losses": history.losses,
        "held_out": history.held_out,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    picture, report = arguments.out / "train_lm.png", arguments.out / "train_lm.json"
    plot_losses(history, unigram, f"{summary['parameters']:,} parameters", picture)
    report.write_text(json.dumps(summary, indent=1) + "\n")

    print(
        f"held-out loss {loss:.3f} nats per byte after {step} steps; byte-unigram entropy of the "
        f"same files {unigram:.3f}; {unigram - loss:.3f} below\n"
        f"{history.tokens_per_second:,.0f} tokens/s, {seconds:.0f} s in all\n"
        f"{picture}\n{report}\n"
        "--- a sample ---\n" + sample(model, "def ", arguments.length, arguments.seed)
    )


if __name__ == "__main__":
    main()

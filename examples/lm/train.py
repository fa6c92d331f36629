"""One training run: the step, the loop with its progress bar, the held-out loss, a sample."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from lm.data import Corpus, sample_batches, spread_batches
from lm.model import LanguageModel

_STEPS_PER_REPORT = 10
_HELD_OUT_BATCHES = 16
_EVALUATIONS = 8


@dataclass(frozen=True)
class TrainConfig:
    """How long and on what to train. `batch` counts windows of `length` bytes."""

    steps: int
    batch: int
    length: int
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class History:
    """What one run did. Losses are in nats per byte.

    Attributes:
      losses: one a step, on the batch of that step.
      held_out: (steps done, loss) pairs, the last one after the last step.
      tokens_per_second: of the training steps; neither compilation nor evaluations count.
      custom_calls: custom calls of this package in the lowered step, by name. Empty where the
        step runs through XLA alone.
    """

    losses: list[float]
    held_out: list[tuple[int, float]]
    tokens_per_second: float
    custom_calls: list[str]


def loss_fn(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """Mean cross entropy in nats of int32 windows `[batch, length + 1]`: a float32 scalar."""
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@nnx.jit
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """Update `model` and `optimizer` in place; return the loss before the update.

    Only what the optimizer trains is differentiated.
    """
    trained = nnx.DiffState(0, optimizer.wrt)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=trained)(model, windows)
    optimizer.update(model, grads)
    return loss


held_out_step = nnx.jit(loss_fn)


def held_out_loss(model: LanguageModel, batches: Iterable[jax.Array]) -> float:
    """Mean of the loss over `batches`."""
    return float(np.mean([held_out_step(model, windows) for windows in batches]))


def make_optimizer(model: LanguageModel, config: TrainConfig, trained: Any) -> nnx.Optimizer:
    """AdamW under a linear warm-up and a cosine decay to a tenth, of what the filter picks."""
    warmup = max(1, config.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(config.steps, warmup + 1), config.learning_rate / 10
    )
    update = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05)
    )
    return nnx.Optimizer(model, update, wrt=trained)


def train(
    model: LanguageModel, corpus: Corpus, config: TrainConfig, trained: Any = nnx.Param
) -> History:
    """Train `model` in place on `corpus.train`, watching the loss on `corpus.held_out`.

    `trained` is an NNX filter: what it does not pick is frozen.
    """
    optimizer = make_optimizer(model, config, trained)
    batches = sample_batches(corpus.train, config.batch, config.length, config.seed)
    watched = list(spread_batches(corpus.held_out, config.batch, config.length, _HELD_OUT_BATCHES))
    lowered = train_step.lower(model, optimizer, watched[0])
    step = lowered.compile()
    evaluate_every = -(-config.steps // _EVALUATIONS)
    tokens = config.batch * config.length
    losses: list[jax.Array] = []
    held_out: list[tuple[int, float]] = []
    seconds = 0.0
    with tqdm(total=config.steps * tokens, unit="tok", unit_scale=True, mininterval=0.5) as bar:
        for first in range(0, config.steps, evaluate_every):
            started = time.perf_counter()
            for _ in range(min(evaluate_every, config.steps - first)):
                losses.append(step(model, optimizer, next(batches)))
                # Reading a loss waits for its step: a bar that showed each one would leave a GPU
                # idle between steps.
                if len(losses) % _STEPS_PER_REPORT == 0:
                    bar.set_postfix_str(f"loss {float(losses[-1]):.3f}", refresh=False)
                    bar.update(len(losses) * tokens - bar.n)
            losses[-1].block_until_ready()
            seconds += time.perf_counter() - started
            held_out.append((len(losses), held_out_loss(model, watched)))
        bar.update(len(losses) * tokens - bar.n)
    return History(
        losses=[float(loss) for loss in losses],
        held_out=held_out,
        tokens_per_second=config.steps * tokens / seconds,
        custom_calls=custom_calls(lowered.as_text()),
    )


def custom_calls(text: str) -> list[str]:
    """Names of this package's custom calls in a lowered program."""
    return sorted(set(re.findall(r"@(swiglu_jax_\w+)", text)))


def sample(model: LanguageModel, prompt: str, length: int, seed: int) -> str:
    """Continue `prompt` up to `length` bytes in all, drawing each byte from the model."""
    start = np.frombuffer(prompt.encode(), np.uint8)
    tokens = jnp.zeros((1, length), jnp.int32).at[0, : start.size].set(start)

    @nnx.jit
    def draw(model: LanguageModel, tokens: jax.Array) -> jax.Array:
        def body(place, carry):
            tokens, key = carry
            key, use = jax.random.split(key)
            byte = jax.random.categorical(use, model(tokens)[0, place - 1] / 0.8)
            return tokens.at[0, place].set(byte), key

        carry = tokens, jax.random.key(seed)
        return jax.lax.fori_loop(start.size, length, body, carry)[0]

    drawn = np.asarray(draw(model, tokens)[0], np.uint8)
    return drawn.tobytes().decode(errors="replace")

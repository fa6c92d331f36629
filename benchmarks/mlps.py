"""The MLPs in JAX that are compared: this package, and what a user writes without it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from swiglu_jax import swiglu_mlp


@dataclass(frozen=True)
class JaxMlp:
    """One way to compute the MLP in JAX."""

    name: str
    layout: str
    apply: Callable[..., jax.Array]
    """Of x and the packed weights."""
    pack: Callable[..., tuple[Any, ...]] = lambda *weights: weights
    """From w_gate, w_up, w_down in ``layout`` to the weights that ``apply`` takes."""
    around: Callable[..., AbstractContextManager[Any]] = lambda *_: nullcontext()
    """Of the measure, the function to compile and its arguments: a context to compile it in."""

    @property
    def key(self) -> str:
        return f"{self.name}/{self.layout}"

    def arguments(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """From (x, w_gate, w_up, w_down, dy) to the arguments of ``step``."""
        x, *weights, dy = arrays
        return (x, *self.pack(*weights), dy)

    def forward(self, x: Any, *weights_and_dy: Any) -> jax.Array:
        return self.apply(x, *weights_and_dy[:-1])

    def step(self, x: Any, *weights_and_dy: Any) -> tuple[Any, ...]:
        """The result and the gradients of x and all weights."""
        *weights, dy = weights_and_dy
        y, pull = jax.vjp(self.apply, x, *weights)
        return y, *pull(dy)


def plain(x: Any, w_gate: Any, w_up: Any, w_down: Any, layout: str = "OI") -> jax.Array:
    """As a JAX user writes it."""
    if layout == "OI":
        w_gate, w_up, w_down = w_gate.T, w_up.T, w_down.T
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def jax_mlps() -> Iterator[JaxMlp]:
    """Plain JAX, with and without jax.checkpoint, and this package by implementation."""
    for layout in ("OI", "IO"):
        in_layout = functools.partial(plain, layout=layout)
        yield JaxMlp("plain", layout, in_layout)
        yield JaxMlp("plain-checkpoint", layout, jax.checkpoint(in_layout))
        for implementation in (None, "fused", "xla"):
            name = f"swiglu_jax-{implementation}" if implementation else "swiglu_jax"
            apply = functools.partial(
                swiglu_mlp, weight_layout=layout, implementation=implementation
            )
            yield JaxMlp(name, layout, apply)

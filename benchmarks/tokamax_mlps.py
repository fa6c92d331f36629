"""tokamax's gated_linear_unit followed by the down projection, by implementation, autotuned."""

# A peer is imported where it is asked for, so that one that is missing costs no other.
# ruff: noqa: PLC0415

import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.absent import NotMade, reason
from benchmarks.mlps import JaxMlp

IMPLEMENTATIONS = ("xla", "mosaic", "triton", "cutedsl")


def tokamax_mlps() -> Iterator[JaxMlp]:
    """One MLP for each implementation that tokamax has here.

    Raises:
        NotMade: tokamax cannot be imported.
    """
    _without_xprof()
    try:
        import tokamax
        from tokamax._src.ops.gated_linear_unit.api import IMPLEMENTATIONS as there
    except Exception as error:  # whatever importing a foreign package raises
        raise NotMade(f"tokamax cannot be imported: {reason(error)}") from error

    def autotuned(measure: str, function: Any, *arguments: Any) -> AbstractContextManager[Any]:
        # With gradients asked, its GPU kernels are not used for the forward pass where they
        # can't give residuals, and a thousand trials would choose nothing.
        if jax.default_backend() != "gpu" or measure != "forward":
            return nullcontext()
        return tokamax.autotune(function, *arguments, progress_bar=False)

    for implementation in IMPLEMENTATIONS:
        if implementation not in there:
            continue

        def apply(x: Any, *weights: Any, implementation: str = implementation) -> jax.Array:
            *first, w_down = weights
            h = tokamax.gated_linear_unit(
                x,
                first[0] if len(first) == 1 else tuple(first),
                activation=jax.nn.silu,
                implementation=implementation,
            )
            return h @ w_down

        # The GPU kernels take one [H, 2, I] array and would stack a pair at every call.
        pack = _pair if implementation == "xla" else _stacked
        yield JaxMlp(f"tokamax-{implementation}", "IO", apply, pack, autotuned)


def _without_xprof() -> None:
    """Let tokamax be imported where xprof is not installed.

    tokamax imports one module of xprof, for a timer that only TPUs need; with its dependencies it
    is larger than everything else together.
    """
    try:
        import xprof.cli.tools  # noqa: F401
    except ImportError:
        tools = types.ModuleType("xprof.cli.tools")
        tools.get_kernel_stats_tool = None  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules["xprof.cli.tools"] = tools


def _pair(w_gate: Any, w_up: Any, w_down: Any) -> tuple[Any, ...]:
    return w_gate, w_up, w_down


def _stacked(w_gate: Any, w_up: Any, w_down: Any) -> tuple[Any, ...]:
    return jnp.stack((w_gate, w_up), axis=1), w_down

"""What the test files share: random problems, plain JAX, a float64 reference, error bounds."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ARGUMENTS = ("x", "w_gate", "w_up", "w_down")
LAYOUTS = ("OI", "IO")
SUBSETS = [s for k in range(5) for s in itertools.combinations(ARGUMENTS, k)]
"""All sixteen sets of differentiated arguments."""

BOUNDS = {"bfloat16": 6e-3, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}
"""Largest relative L2 error against float64 from the same inputs."""


def problem(
    rng: np.random.Generator,
    lead: Sequence[int] = (6,),
    width: int = 24,
    hidden: int = 40,
    dtype: Any = jnp.float32,
    layout: str = "OI",
) -> tuple[jax.Array, ...]:
    """Random x, w_gate, w_up, w_down; weights scaled so that activations are of order one."""

    def weight(outputs: int, inputs: int) -> np.ndarray:
        w = rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
        return w.T if layout == "IO" else w

    x = rng.standard_normal((*lead, width))
    arrays = x, weight(hidden, width), weight(hidden, width), weight(width, hidden)
    return tuple(jnp.asarray(a, dtype) for a in arrays)


def plain(x: Any, w_gate: Any, w_up: Any, w_down: Any, layout: str = "OI") -> Any:
    """The op as a JAX user writes it without this package."""
    if layout == "OI":
        w_gate, w_up, w_down = w_gate.T, w_up.T, w_down.T
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def float64(a: Any) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def _as_stored(a: np.ndarray, dtype: Any) -> np.ndarray:
    return a.astype(dtype).astype(np.float64)


def reference(
    arrays: Sequence[Any], dy: Any | None = None, layout: str = "OI", rounded: bool = False
) -> tuple[np.ndarray, ...]:
    """The result and, given its cotangent, the four gradients, in float64 NumPy.

    With ``rounded``, gate and up are rounded to x's dtype, as every route rounds them.
    """
    dtype = np.asarray(arrays[0]).dtype
    x, w_gate, w_up, w_down = map(float64, arrays)
    if layout == "OI":
        w_gate, w_up, w_down = w_gate.T, w_up.T, w_down.T
    gate, up = x @ w_gate, x @ w_up
    if rounded:
        gate, up = _as_stored(gate, dtype), _as_stored(up, dtype)
    s = 1 / (1 + np.exp(-gate))
    h = gate * s * up
    y = h @ w_down
    if dy is None:
        return (y,)
    dy = float64(dy)
    rows = tuple(range(x.ndim - 1))
    dh = dy @ w_down.T
    dgate, dup = dh * up * s * (1 + gate * (1 - s)), dh * gate * s
    weight = [np.tensordot(a, b, (rows, rows)) for a, b in ((x, dgate), (x, dup), (h, dy))]
    if layout == "OI":
        weight = [w.T for w in weight]
    return y, dgate @ w_gate.T + dup @ w_up.T, *weight


def error(got: Any, want: np.ndarray) -> float:
    """Relative L2 error; NaN never passes a bound."""
    got, want = float64(got), np.asarray(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    scale = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (scale if scale else 1.0))


def check(got: Sequence[Any], want: Sequence[np.ndarray], bound: float) -> None:
    """Every array within the bound of its reference."""
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        e = error(a, b)
        assert e <= bound, f"array {k}: relative L2 error {e:.3g} over {bound:.3g}"


def value_and_gradients(f: Callable[..., Any], arrays: Sequence[Any], dy: Any) -> tuple[Any, ...]:
    """f's result and all its gradients for the cotangent ``dy``."""
    y, pull = jax.vjp(f, *arrays)
    return y, *pull(dy)


def kept_activations(pull: Any, arrays: Sequence[Any], hidden: int) -> dict[str, int]:
    """Count the activation-sized leaves that a vjp function keeps: "hidden" [M, I], "x" [M, H]."""
    lead = arrays[0].shape[:-1]
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull) if hasattr(leaf, "shape")]
    return {
        "hidden": sum(s == (*lead, hidden) for s in shapes),
        "x": sum(s == arrays[0].shape for s in shapes),
    }

"""Relative L2 errors against float64 from the same inputs, on sampled rows.

A whole float64 reference of a large shape would take as long as everything else together, so y
and dx are compared on some tokens, and the weight gradients on some hidden units: those parts
are exact functions of all inputs, computed in float64 without rounding in between.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problems import Arrays

SAMPLES = 64


def sampled_reference(arrays: Arrays, seed: int = 0) -> tuple[dict[str, Any], Any, Any]:
    """y, dx and the weight gradients in float64, on sampled rows.

    Args:
        arrays: x, w_gate, w_up, w_down, dy, weights in layout "OI".
        seed: of the sample.

    Returns:
        Values by name, and the indices of the tokens and of the hidden units.
    """
    rng = np.random.default_rng(seed)
    x, w_gate, w_up, w_down, dy = arrays
    rows = np.sort(rng.choice(x.shape[0], min(SAMPLES, x.shape[0]), replace=False))
    units = np.sort(rng.choice(w_gate.shape[0], min(SAMPLES, w_gate.shape[0]), replace=False))
    with jax.enable_x64(True):
        return (
            jax.tree.map(np.asarray, _reference(x, w_gate, w_up, w_down, dy, rows, units)),
            rows,
            units,
        )


@jax.jit
def _reference(x: Any, w_gate: Any, w_up: Any, w_down: Any, dy: Any, rows: Any, units: Any) -> Any:
    def wide(a: Any) -> Any:
        return a.astype(jnp.float64)

    def parts(gate: Any, up: Any, dh: Any) -> tuple[Any, Any, Any]:
        s = 1 / (1 + jnp.exp(-gate))
        return gate * s * up, dh * up * s * (1 + gate * (1 - s)), dh * gate * s

    x_rows, dy_rows = wide(x[rows]), wide(dy[rows])
    gate, up = x_rows @ wide(w_gate).T, x_rows @ wide(w_up).T
    h, dgate, dup = parts(gate, up, dy_rows @ wide(w_down))
    found = {"y": h @ wide(w_down).T, "dx": dgate @ wide(w_gate) + dup @ wide(w_up)}

    x64, dy64 = wide(x), wide(dy)
    gate, up = x64 @ wide(w_gate[units]).T, x64 @ wide(w_up[units]).T
    h, dgate, dup = parts(gate, up, dy64 @ wide(w_down[:, units]))
    return found | {
        "dw_gate": dgate.T @ x64,
        "dw_up": dup.T @ x64,
        "dw_down": dy64.T @ h,
    }


def errors(step_results: tuple[Any, ...], layout: str, reference: Any) -> dict[str, float]:
    """Relative L2 error of each result of a step: y, dx, dw_gate, dw_up, dw_down.

    Args:
        step_results: as ``JaxMlp.step`` gives them, weights unpacked in ``layout``.
        layout: of the weights.
        reference: from ``sampled_reference``.
    """
    values, rows, units = reference
    y, dx, dw_gate, dw_up, dw_down = step_results
    if layout == "IO":
        dw_gate, dw_up, dw_down = dw_gate.T, dw_up.T, dw_down.T
    got = {
        "y": y[rows],
        "dx": dx[rows],
        "dw_gate": dw_gate[units],
        "dw_up": dw_up[units],
        "dw_down": dw_down[:, units],
    }
    return {name: _relative(np.asarray(got[name]), values[name]) for name in got}


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))

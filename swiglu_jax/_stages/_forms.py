"""The XLA forms of the two stages: the definition of right, and what runs where nothing fuses.

With s = sigmoid(gate), silu(gate) = gate * s and d silu / d gate = s * (1 + gate * (1 - s))
(Elfwing, Uchibe and Doya, 2018, arXiv:1702.03118; SwiGLU: Shazeer, 2020, arXiv:2002.05202).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from swiglu_jax._dot import contract
from swiglu_jax._stages._params import StageParams


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which the activation is evaluated: at least float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _as_stored(a: jax.Array) -> jax.Array:
    """``a`` in its compute dtype with the value that it has in memory.

    XLA may skip the rounding to a narrow dtype between two ops that it fuses (its excess
    precision), and then the h of one route would come from another gate than the one kept.
    reduce_precision is the rounding that it must not skip; it flushes subnormals, so those of
    float16 are rounded to the grid by hand.
    """
    wide = a.astype(compute_dtype(a.dtype))
    if a.dtype in (jnp.float32, jnp.float64):
        return wide
    if a.dtype == jnp.bfloat16:
        return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    if a.dtype == jnp.float16:
        step = 2.0**-24
        on_grid = lax.round(wide / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
        normal = lax.reduce_precision(wide, exponent_bits=5, mantissa_bits=10)
        return jnp.where(jnp.abs(wide) < 2.0**-14, on_grid, normal)
    # The 8-bit formats have ranges of their own; a barrier costs nothing that matters there.
    return lax.optimization_barrier(a).astype(wide.dtype)


def gate_up(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, params: StageParams, exact: bool = True
) -> list[jax.Array]:
    """h = silu(gate) * up, gate = x @ w_gate.T and up = x @ w_up.T, as ``params.outputs`` asks.

    Args:
        x: [..., H].
        w_gate, w_up: [I, H] in layout "OI", [H, I] in "IO".
        params: which outputs, and how.
        exact: whether gate and up are rounded to x's dtype before the activation; False for
            derivatives, which rounding would make zero almost everywhere.

    Returns:
        The asked outputs, each [..., I] of x's dtype, in the order h, gate, up.
    """
    side = 0 if params.weight_layout == "IO" else 1
    asked = params.outputs
    made: dict[str, jax.Array] = {}
    for name, weight in (("gate", w_gate), ("up", w_up)):
        if name in asked or "h" in asked:
            made[name] = contract(x, -1, weight, side, precision=params.precision)
    if "h" in asked:
        widen = _as_stored if exact else lambda a: a.astype(compute_dtype(a.dtype))
        gate, up = widen(made["gate"]), widen(made["up"])
        made["h"] = (jax.nn.silu(gate) * up).astype(x.dtype)
    return [made[name] for name in asked]


def down_dswiglu(
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array | None = None,
    *,
    params: StageParams,
) -> list[jax.Array]:
    """dgate, dup and the recomputed h, from dh = dy @ w_down, as ``params.outputs`` asks.

    Args:
        dy: [..., H], the cotangent of the op's result.
        w_down: [H, I] in layout "OI", [I, H] in "IO".
        gate, up: [..., I], as the forward stage gave them; ``up`` only where dgate or h is asked.
        params: which outputs, and how.

    Returns:
        The asked outputs, each [..., I] of gate's dtype, in the order dgate, dup, h.
    """
    side = 1 if params.weight_layout == "IO" else 0
    asked = params.outputs
    wide = compute_dtype(gate.dtype)
    g = gate.astype(wide)
    s = jax.nn.sigmoid(g)
    made: dict[str, jax.Array] = {}
    if "dgate" in asked or "dup" in asked:
        dh = contract(dy, -1, w_down, side, precision=params.precision).astype(wide)
        if "dgate" in asked:
            assert up is not None
            made["dgate"] = dh * up.astype(wide) * (s * (1 + g * (1 - s)))
        if "dup" in asked:
            made["dup"] = dh * (s * g)
    if "h" in asked:
        assert up is not None
        made["h"] = s * g * up.astype(wide)
    return [made[name].astype(gate.dtype) for name in asked]

"""The XLA forms of the gradients' GEMMs: plain products, which XLA tunes, fuses and divides."""

from collections.abc import Sequence

import jax

from swiglu_jax._dot import contract
from swiglu_jax._stages._params import StageParams


def input_gradient(
    dgate: jax.Array,
    dup: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    params: StageParams,
) -> list[jax.Array]:
    """dx = dgate @ w_gate + dup @ w_up (weights as in layout "OI").

    Args:
        dgate, dup: [..., I].
        w_gate, w_up: [I, H] in layout "OI", [H, I] in "IO".
        params: how.

    Returns:
        dx [..., H], of dgate's dtype.
    """
    side = 1 if params.weight_layout == "IO" else 0

    def part(cotangent: jax.Array, weight: jax.Array) -> jax.Array:
        return contract(cotangent, -1, weight, side, precision=params.precision,
                        out_sharding=params.out_sharding("x"))  # fmt: skip

    with jax.named_scope("swiglu_dx"):
        return [part(dgate, w_gate) + part(dup, w_up)]


def weight_gradients(*operands: jax.Array, params: StageParams) -> list[jax.Array]:
    """The asked of the gradients in w_gate, w_up and w_down.

    Args:
        operands: those of x [..., H], dgate, dup, h [..., I] and dy [..., H] that are needed, in
            this order.
        params: which outputs, and how.

    Returns:
        Each [I, H] (w_down: [H, I]) in layout "OI", the transpose in "IO".
    """
    given = iter(operands)
    first = {"w_gate", "w_up"} & set(params.outputs)
    x = next(given) if first else None
    factors: dict[str, Sequence[jax.Array]] = {}
    for name in ("w_gate", "w_up"):
        if name in first:
            assert x is not None
            factors[name] = (x, next(given))
    if "w_down" in params.outputs:
        factors["w_down"] = (next(given), next(given))
    results = []
    for name in params.outputs:
        inputs, cotangent = factors[name]
        rows = tuple(range(inputs.ndim - 1))
        # Operands in the order that gives the weight's own layout, so nothing is transposed.
        a, b = (inputs, cotangent) if params.weight_layout == "IO" else (cotangent, inputs)
        with jax.named_scope(f"swiglu_d{name}"):
            results.append(
                contract(a, rows, b, rows, precision=params.precision,
                         out_sharding=params.out_sharding(name))
            )  # fmt: skip
    return results

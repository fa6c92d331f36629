"""The tangent of the op, from what the residual table keeps; JAX's transpose gives reverse mode."""

import functools
from collections.abc import Callable, Mapping

import jax

from swiglu_jax._dot import contract
from swiglu_jax._stages._forms import compute_dtype

Arrays = Mapping[str, jax.Array]


def tangent(
    kept: Arrays,
    weights: Arrays,
    tangents: Arrays,
    *,
    weight_layout: str,
    precision: str | None,
    down: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The tangent [..., H] of the op's result, linear in ``tangents``.

    Args:
        kept: what the residual table keeps for the names in ``tangents``: of h, gate and up
            [..., I], and x [..., H].
        weights: w_gate, w_up and w_down, in ``weight_layout``.
        tangents: by argument, those that are not zero; at least one.
        weight_layout, precision: as swiglu_mlp and ``jax.default_matmul_precision`` take them.
        down: the down projection of (h, w_down).
    """
    side = 0 if weight_layout == "IO" else 1

    def of_first(weight: str) -> jax.Array | None:
        """The tangent of gate or up, in the dtype of the activation; None if it is zero."""
        terms = []
        if "x" in tangents:
            terms.append((tangents["x"], weights[weight]))
        if weight in tangents:
            terms.append((kept["x"], tangents[weight]))
        products = [contract(a, -1, w, side, precision=precision) for a, w in terms]
        return _sum(products).astype(compute_dtype(products[0].dtype)) if products else None

    wide = {k: kept[k].astype(compute_dtype(kept[k].dtype)) for k in ("gate", "up") if k in kept}
    h, hidden = kept.get("h"), []
    if "gate" in wide:
        s = jax.nn.sigmoid(wide["gate"])
        silu = s * wide["gate"]
        gate_tangent, up_tangent = of_first("w_gate"), of_first("w_up")
        if gate_tangent is not None:
            hidden.append(gate_tangent * wide["up"] * (s * (1 + wide["gate"] * (1 - s))))
        if up_tangent is not None:
            hidden.append(up_tangent * silu)
        if h is None and "up" in wide:
            h = (silu * wide["up"]).astype(kept["gate"].dtype)
    results = []
    if hidden:
        results.append(down(_sum(hidden).astype(kept["gate"].dtype), weights["w_down"]))
    if "w_down" in tangents:
        assert h is not None
        results.append(down(h, tangents["w_down"]))
    return _sum(results)


def _sum(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(jax.numpy.add, terms)

"""What the GPU tests share: the handlers as JAX functions, and what they must compute."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiglu_jax import _cudnn, _native
from swiglu_jax._candidate import StageCall
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, outputs_mask

ERROR_BOUND = 6e-3
"""Largest relative L2 error of any output against float64 from the same inputs."""
PLAIN_FACTOR = 1.1
"""And at most this many times plain JAX's own error."""

TARGETS = {
    "swiglu_jax_cudnn_gate_up": "gate_up",
    "swiglu_jax_cudnn_down_dswiglu": "down_dswiglu",
    "swiglu_jax_cudnn_down_dswiglu_two_step": "down_dswiglu",
}


def names(stage: str, mask: int) -> tuple[str, ...]:
    return tuple(n for k, n in enumerate(STAGE_OUTPUTS[stage]) if mask >> k & 1)


SETS = {"gate_up": range(1, 8), "down_dswiglu": (1, 2, 3, 6, 7)}
"""Output sets that the route serves as they are, as bitmasks."""


def first_plan(target: str, call: StageCall) -> str:
    """The first of the heuristics' plans that is right; it costs a build or two."""
    _native.register()
    found = [c for c in _cudnn.candidates(call, "sm_90a") if c.ffi_target == target]
    return "|".join(_cudnn.tune(g, call, plans=2)["plan"] for g in _cudnn.graphs(found[0]))


def pool(graph: str, call: StageCall, plan: str, device: int = 0) -> dict[str, Any]:
    """What the native library's pool for a graph and plan says of itself."""
    spec = _cudnn.native_graph(graph, call)
    return _native.call_json("swiglu_jax_cudnn_pool", spec, device, plan.encode())


def handler(
    target: str, call: StageCall, lead: Sequence[int], plan: str = ""
) -> Callable[..., Any]:
    """The FFI call as a function of the stage's operands."""
    _native.register()
    assert call.m is not None and call.i is not None
    dtype = jnp.dtype(call.dtype)
    results = [jax.ShapeDtypeStruct((*lead, call.i), dtype)] * len(call.outputs)
    if target.endswith("_two_step"):
        results.append(jax.ShapeDtypeStruct((2 * call.m * call.i,), np.uint8))

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        written = jax.ffi.ffi_call(target, results)(
            *operands,
            outputs=np.int64(outputs_mask(call.stage, call.outputs)),
            weight_layout=call.weight_layout,
            plan=plan,
        )
        return tuple(written[: len(call.outputs)])

    return run


def operands(
    rng: np.random.Generator, call: StageCall, lead: Sequence[int]
) -> tuple[jax.Array, ...]:
    """Random operands of order one, weights scaled so that products are too."""
    assert call.h is not None and call.i is not None
    dtype = jnp.dtype(call.dtype)

    def tokens(width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((*lead, width)), dtype)

    def weight(rows: int, columns: int, scale: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((rows, columns)) / np.sqrt(scale), dtype)

    out_in = call.weight_layout == "OI"
    if call.stage == "gate_up":
        shape = (call.i, call.h) if out_in else (call.h, call.i)
        return tokens(call.h), weight(*shape, call.h), weight(*shape, call.h)
    shape = (call.h, call.i) if out_in else (call.i, call.h)
    all_of_them = tokens(call.h), weight(*shape, call.h), tokens(call.i), tokens(call.i)
    reads_up = bool({"dgate", "h"} & set(call.outputs))
    return all_of_them if reads_up else all_of_them[:3]


def formulas(call: StageCall, arrays: Sequence[Any], xp: Any) -> dict[str, Any]:
    """The stage's outputs by the definition, in the arrays' own dtype or NumPy's float64.

    In float64 nothing is rounded in between; in jnp this is the stage as a JAX user writes it.
    """
    if xp is np:
        arrays = [np.asarray(a).astype(np.float64) for a in arrays]
    out_in = call.weight_layout == "OI"

    def sigmoid(a: Any) -> Any:
        return 1 / (1 + xp.exp(-a)) if xp is np else jax.nn.sigmoid(a)

    if call.stage == "gate_up":
        x, w_gate, w_up = arrays
        gate, up = (x @ (w.T if out_in else w) for w in (w_gate, w_up))
        return {"h": gate * sigmoid(gate) * up, "gate": gate, "up": up}
    dy, w_down, gate, *rest = arrays
    dh = dy @ (w_down if out_in else w_down.T)
    s = sigmoid(gate)
    found = {"dup": dh * gate * s}
    if rest:
        found |= {"dgate": dh * rest[0] * s * (1 + gate * (1 - s)), "h": gate * s * rest[0]}
    return found


def error(found: Any, true: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(np.asarray(found).astype(np.float64) - true) / np.linalg.norm(true))


def check(call: StageCall, arrays: Sequence[jax.Array], found: Sequence[jax.Array]) -> None:
    """Every output is within the bounds of the float64 value."""
    true = formulas(call, arrays, np)
    plain = jax.jit(lambda *a: formulas(call, a, jnp))(*arrays)
    for name, got in zip(call.outputs, found, strict=True):
        ours, theirs = error(got, true[name]), error(plain[name], true[name])
        assert got.dtype == arrays[0].dtype
        assert ours <= ERROR_BOUND, f"{name}: {ours}"
        assert ours <= PLAIN_FACTOR * theirs, f"{name}: {ours} against plain JAX's {theirs}"

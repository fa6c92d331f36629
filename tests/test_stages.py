"""The XLA forms of the two stages: every subset of outputs, rounding, agreement with each other."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import BOUNDS, LAYOUTS, error, float64, problem

from swiglu_jax._stages import STAGES, StageParams, down_dswiglu, gate_up

DTYPES = ("bfloat16", "float16", "float32")


def _subsets(names):
    return [s for k in range(1, len(names) + 1) for s in itertools.combinations(names, k)]


def _ulps_apart(a, b) -> np.ndarray:
    """Distance in units in the last place of two arrays of one 16- or 32-bit dtype."""
    bits = np.dtype(f"int{8 * a.dtype.itemsize}")

    def ordered(v):
        i = np.asarray(v).view(bits).astype(np.int64)
        return np.where(i < 0, np.iinfo(bits).min - i, i)

    return np.abs(ordered(a) - ordered(b))


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["normal", "subnormal-in-float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_h_is_the_activation_of_the_returned_gate_and_up(rng, dtype, scale):
    x, w_gate, w_up, _ = problem(rng, (64,), width=96, hidden=80, dtype=dtype)
    x = (x * scale).astype(dtype)
    run = jax.jit(lambda *a: gate_up.bind(*a, params=StageParams(("h", "gate", "up"), "OI")))
    made = run(x, w_gate, w_up)
    gate, up = float64(made["gate"]), float64(made["up"])
    want = jnp.asarray(gate / (1 + np.exp(-gate)) * up, dtype)
    # An activation evaluated in float32 may round to the neighbour of the exact value's rounding.
    bound = 1 if dtype != "float32" else 8
    assert _ulps_apart(np.asarray(made["h"]), np.asarray(want)).max() <= bound


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outputs", _subsets(gate_up.outputs), ids="+".join)
def test_gate_up_gives_any_subset(rng, outputs, layout):
    x, w_gate, w_up, _ = problem(rng, (2, 5), layout=layout)
    made = gate_up.bind(x, w_gate, w_up, params=StageParams(outputs, layout))
    a, b, c = map(float64, (x, w_gate, w_up))
    gate, up = (a @ b, a @ c) if layout == "IO" else (a @ b.T, a @ c.T)
    want = {"gate": gate, "up": up, "h": gate / (1 + np.exp(-gate)) * up}
    assert tuple(made) == outputs
    for name in outputs:
        assert error(made[name], want[name]) <= BOUNDS["float32"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outputs", _subsets(down_dswiglu.outputs), ids="+".join)
def test_down_dswiglu_gives_any_subset(rng, outputs, layout):
    dy, _, _, w_down = problem(rng, (2, 5), layout=layout)
    gate, up = (jnp.asarray(rng.standard_normal((2, 5, 40)), jnp.float32) for _ in range(2))
    made = down_dswiglu.bind(dy, w_down, gate, up, params=StageParams(outputs, layout))
    w = float64(w_down)
    dh = float64(dy) @ (w.T if layout == "IO" else w)
    g, u = float64(gate), float64(up)
    s = 1 / (1 + np.exp(-g))
    want = {"dgate": dh * u * s * (1 + g * (1 - s)), "dup": dh * g * s, "h": g * s * u}
    assert tuple(made) == outputs
    for name in outputs:
        assert error(made[name], want[name]) <= BOUNDS["float32"]


def test_a_call_reads_its_sizes_off_the_operands():
    shape = jax.ShapeDtypeStruct
    x, inner = shape((2, 3, 8), jnp.bfloat16), shape((2, 3, 32), jnp.bfloat16)
    for layout, first, second in (("OI", (32, 8), (8, 32)), ("IO", (8, 32), (32, 8))):
        calls = [
            STAGES["gate_up"].call(
                (x, shape(first, x.dtype), shape(first, x.dtype)), StageParams(("h",), layout)
            ),
            STAGES["down_dswiglu"].call(
                (x, shape(second, x.dtype), inner), StageParams(("dup",), layout)
            ),
        ]
        for call in calls:
            assert (call.m, call.h, call.i, call.dtype) == (6, 8, 32, "bfloat16")
            assert call.weight_layout == layout

"""Values and all four gradients against float64, over leads, layouts, dtypes and odd sizes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    ARGUMENTS,
    BOUNDS,
    LAYOUTS,
    SUBSETS,
    check,
    error,
    float64,
    plain,
    problem,
    reference,
    value_and_gradients,
)

from swiglu_jax import swiglu_mlp
from swiglu_jax._stages import StageParams, down_dswiglu

LEADS = [(), (1,), (7,), (2, 3), (2, 1, 5)]
EMPTY_LEADS = [(0,), (3, 0), (0, 2, 2)]


def _precise(dtype: str) -> contextlib.ExitStack:
    """float64 needs x64; float32 is checked at its highest matmul precision."""
    stack = contextlib.ExitStack()
    if dtype == "float64":
        stack.enter_context(jax.enable_x64(True))
    stack.enter_context(jax.default_matmul_precision("highest"))
    return stack


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_value_and_gradients_match_float64(rng, dtype, layout, lead):
    with _precise(dtype):
        # Odd sizes, and wide enough that rounding errors of one row average out.
        arrays = problem(rng, lead, width=201, hidden=299, dtype=dtype, layout=layout)
        dy = jnp.asarray(rng.standard_normal(arrays[0].shape), dtype)

        def op(*a):
            return swiglu_mlp(*a, weight_layout=layout)

        got = jax.jit(lambda dy, *a: value_and_gradients(op, a, dy))(dy, *arrays)
        check(got, reference(arrays, dy, layout), BOUNDS[dtype])
        for g, a in zip(got[1:], arrays, strict=True):
            assert (g.shape, g.dtype) == (a.shape, a.dtype)
        assert (got[0].shape, got[0].dtype) == (arrays[0].shape, arrays[0].dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_errors_are_no_larger_than_plain_jax(rng, dtype):
    arrays = problem(rng, (96,), width=256, hidden=384, dtype=dtype)
    dy = jnp.asarray(rng.standard_normal(arrays[0].shape), dtype)
    want = reference(arrays, dy)
    ours = jax.jit(lambda dy, *a: value_and_gradients(swiglu_mlp, a, dy))(dy, *arrays)
    theirs = jax.jit(lambda dy, *a: value_and_gradients(plain, a, dy))(dy, *arrays)
    for name, a, b, c in zip(("y", *ARGUMENTS), ours, theirs, want, strict=True):
        assert error(a, c) <= 1.1 * error(b, c) + 1e-5, name


@pytest.mark.parametrize("lead", EMPTY_LEADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_batches_give_empty_results_and_zero_gradients(rng, lead, layout):
    arrays = problem(rng, lead, layout=layout)
    y, *gradients = value_and_gradients(
        lambda *a: swiglu_mlp(*a, weight_layout=layout), arrays, jnp.zeros(arrays[0].shape)
    )
    assert y.shape == arrays[0].shape
    for g, a in zip(gradients, arrays, strict=True):
        assert g.shape == a.shape
        assert not np.any(np.asarray(g))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_each_set_of_differentiated_arguments_gives_the_same_gradients(rng, subset, layout):
    arrays = problem(rng, (3, 4), layout=layout)
    dy = jnp.asarray(rng.standard_normal(arrays[0].shape), jnp.float32)
    want = dict(zip(ARGUMENTS, reference(arrays, dy, layout)[1:], strict=True))
    fixed = dict(zip(ARGUMENTS, arrays, strict=True))

    def op(chosen):
        return swiglu_mlp(*(fixed | chosen).values(), weight_layout=layout)

    y, pull = jax.vjp(op, {name: fixed[name] for name in subset})
    (got,) = pull(dy)
    assert error(y, reference(arrays, layout=layout)[0]) <= BOUNDS["float32"]
    assert set(got) == set(subset)
    for name in subset:
        assert error(got[name], want[name]) <= BOUNDS["float32"], name


@pytest.mark.parametrize("dtype", BOUNDS)
def test_gradients_are_finite_for_every_finite_gate(dtype):
    with _precise(dtype):
        largest = float(jnp.finfo(dtype).max)
        gates = [0.0, 1.0, -1.0, 17.0, -17.0, 88.0, -88.0, 104.0, -104.0, 745.0, -745.0]
        gates += [1e4, -1e4, largest, -largest]
        gate = jnp.asarray(gates, dtype)[:, None]
        one = jnp.ones((1, 1), dtype)
        made = down_dswiglu.bind(
            jnp.ones_like(gate), one, gate, jnp.ones_like(gate),
            params=StageParams(("dgate", "dup", "h"), "OI"),
        )  # fmt: skip
        for name, a in made.items():
            assert np.isfinite(float64(a)).all(), name
        # Through the whole op, with up = 0 so that nothing overflows by right.
        dx = jax.grad(lambda x: swiglu_mlp(x, one, 0 * one, one).sum())(gate)
        assert np.isfinite(float64(dx)).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_go_through_xla(rng, dtype):
    arrays = problem(rng, (16,), width=32, hidden=48, dtype=dtype)
    dy = jnp.ones(arrays[0].shape, dtype)
    y, *gradients = jax.jit(lambda dy, *a: value_and_gradients(swiglu_mlp, a, dy))(dy, *arrays)
    assert all(a.dtype == arrays[0].dtype for a in (y, *gradients))
    assert all(np.isfinite(float64(a)).all() for a in gradients)
    # One rounding each of gate, up, h and the result at 2 or 3 bits of mantissa.
    assert error(y, reference(arrays)[0]) <= 0.2


def test_numpy_arrays_are_taken(rng):
    arrays = [np.asarray(a) for a in problem(rng)]
    check([swiglu_mlp(*arrays)], reference(arrays), BOUNDS["float32"])


def test_disabled_jit_runs_the_same_op(rng):
    arrays = problem(rng)
    dy = jnp.ones_like(arrays[0])
    with jax.disable_jit():
        got = value_and_gradients(swiglu_mlp, arrays, dy)
    check(got, reference(arrays, dy), BOUNDS["float32"])

"""vmap: any subset of operands and axes, nested, of gradients and under gradients."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from narrow import check_narrow
from support import ARGUMENTS, BOUNDS, LAYOUTS, check, float64, plain, problem, reference

from swiglu_jax import swiglu_mlp

pytestmark = pytest.mark.usefixtures("on_cpu")

SIZE, ROWS, WIDTH, HIDDEN = 3, 5, 8, 12
SUBSETS = [s for k in range(1, 5) for s in itertools.combinations(range(4), k)]
BOUND = 10 * BOUNDS["float32"]


def _stacked(rng, subset, layout="OI", size=SIZE, lead=(ROWS,)):
    """A problem whose operands in ``subset`` have a leading axis of ``size``."""
    one = problem(rng, lead, WIDTH, HIDDEN, layout=layout)
    several = [problem(rng, lead, WIDTH, HIDDEN, layout=layout) for _ in range(size)]
    return [jnp.stack([p[k] for p in several]) if k in subset else a for k, a in enumerate(one)]


def _names(subset):
    return "+".join(ARGUMENTS[k] for k in subset)


def _op(layout, implementation):
    return lambda *a: swiglu_mlp(*a, weight_layout=layout, implementation=implementation)


def _plain(layout):
    return lambda *a: plain(*a, layout)


def _value_and_gradients(f, in_axes):
    def one(*a):
        y, pull = jax.vjp(f, *a)
        return y, *pull(jnp.cos(y))

    return jax.jit(jax.vmap(one, in_axes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subset", SUBSETS, ids=_names)
def test_every_subset_of_operands_fused(rng, fused_cpu, subset, layout):
    arrays = _stacked(rng, subset, layout)
    in_axes = tuple(0 if k in subset else None for k in range(4))
    got = _value_and_gradients(_op(layout, "fused"), in_axes)(*arrays)
    assert fused_cpu.take_calls(got)
    for n in range(SIZE):
        element = [a[n] if k in subset else a for k, a in enumerate(arrays)]
        y = reference(element, layout=layout)[0]
        want = reference(element, jnp.cos(y), layout)
        check([g[n] for g in got], want, BOUND)


@pytest.mark.parametrize("subset", [(0,), (1,), (3,), (1, 2), (0, 1, 2, 3)], ids=_names)
def test_subsets_of_operands_xla(rng, subset):
    arrays = _stacked(rng, subset)
    in_axes = tuple(0 if k in subset else None for k in range(4))
    got = _value_and_gradients(_op("OI", "xla"), in_axes)(*arrays)
    want = _value_and_gradients(_plain("OI"), in_axes)(*arrays)
    check(got, [float64(a) for a in want], BOUND)


def test_a_batch_over_x_alone_is_one_call_with_more_rows(rng, fused_cpu):
    arrays = _stacked(rng, (0,))
    f = jax.vmap(_op("OI", "fused"), (0, None, None, None))
    jax.block_until_ready(jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2, 3)))(*arrays))
    calls = fused_cpu.take_calls()
    assert [c.stage for c in calls] == ["down_dswiglu", "gate_up"]
    assert {c.sizes for c in calls} == {(SIZE * ROWS, WIDTH, HIDDEN)}


def test_weights_alone_fold_into_one_wider_call(rng, fused_cpu):
    arrays = _stacked(rng, (1, 2))
    jax.block_until_ready(jax.jit(jax.vmap(_op("OI", "fused"), (None, 0, 0, None)))(*arrays))
    (call,) = fused_cpu.take_calls()
    assert call.sizes == (ROWS, WIDTH, SIZE * HIDDEN)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_their_own_are_a_loop_of_fused_calls(rng, fused_cpu, layout):
    arrays = _stacked(rng, (0, 1, 2, 3), layout)
    f = jax.vmap(_op(layout, "fused"))
    jax.block_until_ready(jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2, 3)))(*arrays))
    calls = fused_cpu.take_calls()
    assert [c.stage for c in calls] == ["down_dswiglu"] * SIZE + ["gate_up"] * SIZE
    assert {c.sizes for c in calls} == {(ROWS, WIDTH, HIDDEN)}


def test_weights_of_their_own_are_batched_gemms_on_xla(rng):
    arrays = _stacked(rng, (0, 1, 2, 3))
    f = jax.vmap(_op("OI", "xla"))
    text = jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2, 3))).lower(*arrays).as_text()
    assert "stablehlo.while" not in text
    assert "batching_dims = [0] x [0]" in text


def test_a_route_that_declines_leaves_batched_gemms(rng, fused_cpu):
    fused_cpu.decline = lambda call: "not today"
    arrays = _stacked(rng, (0, 1, 2, 3))
    f = jax.jit(jax.vmap(_op("OI", None)))
    assert "stablehlo.while" not in f.lower(*arrays).as_text()
    # The routes are asked about one element of the batch.
    assert {(c.m, c.h, c.i) for c in fused_cpu.asked} == {(ROWS, WIDTH, HIDDEN)}


@pytest.mark.parametrize("axes", [(1, 1, 0, 1), (-1, 0, None, -1), (1, None, None, None)])
def test_other_axes(rng, implementation, axes):
    subset = tuple(k for k, axis in enumerate(axes) if axis is not None)
    arrays = [
        a if axis is None else jnp.moveaxis(a, 0, axis)
        for a, axis in zip(_stacked(rng, subset), axes, strict=True)
    ]
    got = jax.jit(jax.vmap(_op("OI", implementation), axes, out_axes=1))(*arrays)
    want = jax.vmap(_plain("OI"), axes, out_axes=1)(*arrays)
    check([got], [float64(want)], BOUND)


NESTED = {
    "x in x": ((0, None, None, None), (0, None, None, None)),
    "all in x": ((0, None, None, None), (0, 0, 0, 0)),
    "x in all": ((0, 0, 0, 0), (0, None, None, None)),
    "all in all": ((0, 0, 0, 0), (0, 0, 0, 0)),
    "down in up": ((None, None, 0, None), (None, None, None, 0)),
    "gate in all": ((0, 0, 0, 0), (None, 0, None, None)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", NESTED.values(), ids=NESTED.keys())
def test_nested(rng, fused_cpu, axes, layout):
    outer, inner = axes
    arrays = list(problem(rng, (ROWS,), WIDTH, HIDDEN, layout=layout))
    for axis_of, size in ((inner, 2), (outer, 3)):
        for k, axis in enumerate(axis_of):
            if axis is not None:
                scale = jnp.asarray(rng.uniform(0.5, 1.5, size), jnp.float32)
                arrays[k] = scale.reshape(size, *[1] * arrays[k].ndim) * arrays[k]

    def nested(f):
        def loss(*a):
            return (jax.vmap(jax.vmap(f, inner), outer)(*a) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))

    value, gradients = nested(_op(layout, "fused"))(*arrays)
    want, want_gradients = nested(_plain(layout))(*arrays)
    assert fused_cpu.take_calls(value)
    check([value, *gradients], [float64(a) for a in (want, *want_gradients)], BOUND)


def _two_layers(f):
    return lambda x, *w: f(jnp.sin(f(x, *w)), *w)


def _scanned(f):
    return lambda x, *w: jax.lax.scan(lambda x, _: (x + f(x, *w), None), x, length=2)[0]


SHARED = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "checkpoint": lambda f: jax.checkpoint(_two_layers(f)),
    "scan": _scanned,
    "a vector at a time": lambda f: jax.vmap(f, (0, None, None, None)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inner", SHARED)
def test_a_weight_that_examples_share_gets_one_gradient(rng, inner, dtype):
    """Summed over the examples in its GEMM, as in plain JAX: never one for each example.

    vmap of a custom_vjp function, left to itself, makes one for each and sums them.
    """
    size, rows, width, hidden = 6, 5, 16, 32
    arrays = problem(rng, (size, rows), width, hidden, dtype)
    f = jax.vmap(SHARED[inner](_op("OI", "xla")), (0, None, None, None))
    step = jax.jit(jax.grad(lambda *a: (f(*a).astype("float32") ** 2).mean(), (0, 1, 2, 3)))
    text = step.lower(*arrays).compile().as_text()
    for a, b in ((width, hidden), (hidden, width)):
        assert not re.search(rf"\[({size}|{rows}|{size},{rows}|{size * rows}),{a},{b}\]", text)
    g = jax.vmap(SHARED[inner](_plain("OI")), (0, None, None, None))
    want = jax.grad(lambda *a: (g(*a) ** 2).mean(), (0, 1, 2, 3))
    want = want(*(a.astype("float32") for a in arrays))
    bound = BOUND if dtype == "float32" else 4 * BOUNDS[dtype]
    check(step(*arrays), [float64(a) for a in want], bound)


@pytest.mark.parametrize("outer_axis", [0, 1])
def test_experts_that_examples_share_get_one_gradient_each(rng, fused_cpu, outer_axis):
    """A layer of experts under a vmap over examples: rows of each expert's own calls."""
    size, experts, rows, width, hidden = 6, 2, 5, 16, 32
    x = problem(rng, (size, experts, rows), width, hidden)[0]
    several = [problem(rng, (rows,), width, hidden)[1:] for _ in range(experts)]
    weights = [jnp.stack(w) for w in zip(*several, strict=True)]
    x = jnp.moveaxis(x, 0, outer_axis)

    def step(f):
        layer = jax.vmap(jax.vmap(f), (outer_axis, None, None, None))
        return jax.jit(jax.grad(lambda *a: (layer(*a) ** 2).mean(), (0, 1, 2, 3)))

    ours = step(_op("OI", "fused"))
    got = ours(x, *weights)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(size * rows, width, hidden)}
    check(got, [float64(a) for a in step(_plain("OI"))(x, *weights)], BOUND)
    text = ours.lower(x, *weights).compile().as_text()
    assert not re.search(rf"\[({size},{experts}|{experts},{size}),{hidden},{width}\]", text)


def test_gradients_of_each_example(rng, implementation):
    """vmap of grad with respect to shared weights: every gradient has the batch axis."""
    arrays = _stacked(rng, (0,))

    def per_example(f):
        grad = jax.grad(lambda *a: (f(*a) ** 2).sum(), (1, 2, 3))
        return jax.jit(jax.vmap(grad, (0, None, None, None)))(*arrays)

    got, want = per_example(_op("OI", implementation)), per_example(_plain("OI"))
    check(got, [float64(a) for a in want], BOUND)


def test_many_cotangents_of_one_pull(rng, implementation):
    """vmap over the cotangent alone: gate and up are shared, not copied for each."""
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    cotangents = jnp.asarray(rng.standard_normal((4, ROWS, WIDTH)), jnp.float32)

    def pulled(f):
        return jax.jit(lambda *a: jax.vmap(jax.vjp(f, *a)[1])(cotangents))(*arrays)

    got, want = pulled(_op("OI", implementation)), pulled(_plain("OI"))
    check(got, [float64(a) for a in want], BOUND)


def test_jacrev(rng, implementation):
    arrays = problem(rng, (2,), 4, 6)
    got = jax.jit(jax.jacrev(_op("OI", implementation), (0, 1)))(*arrays)
    want = jax.jit(jax.jacrev(_plain("OI"), (0, 1)))(*arrays)
    check(got, [float64(a) for a in want], BOUND)


def test_kernels_that_write_more_than_asked_and_use_scratch(rng, fused_cpu):
    fused_cpu.superset, fused_cpu.scratch_bytes = True, 64
    arrays = _stacked(rng, (0, 1, 2, 3))
    # The handlers know nothing of a scratch buffer: they leave the last result alone.
    got = jax.jit(jax.vmap(_op("OI", "fused")))(*arrays)
    check([got], [float64(jax.vmap(_plain("OI"))(*arrays))], BOUND)
    assert {c.outputs for c in fused_cpu.take_calls(got)} == {("h", "gate", "up")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(rng, fused_cpu, dtype):
    arrays = problem(rng, (SIZE, 8 * ROWS), 4 * WIDTH, 4 * HIDDEN, dtype)
    got = jax.jit(jax.vmap(_op("OI", "fused"), (0, None, None, None)))(*arrays)
    check([got], reference(arrays), BOUNDS[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subset", [(0,), (1, 2), (0, 1, 2, 3)], ids=_names)
def test_gradients_in_narrow_dtypes(rng, fused_cpu, subset, layout):
    one = problem(rng, (16,), 64, 96, "bfloat16", layout)
    arrays = [jnp.stack([a, -a]) if k in subset else a for k, a in enumerate(one)]
    axes = tuple(0 if k in subset else None for k in range(4))

    def gradients(f):
        mapped = jax.vmap(f, axes)
        return jax.grad(lambda *a: (mapped(*a).astype("float32") ** 2).mean(), (0, 1, 2, 3))

    check_narrow(gradients, _op(layout, "fused"), _plain(layout), arrays)


ROWS_ALONE, ALL = (0, None, None, None), (0, 0, 0, 0)
LEVELS = {
    # in_axes from the outermost vmap in, and the leading sizes of x and of the weights
    "rows, experts, rows": ((ROWS_ALONE, ALL, ROWS_ALONE), (2, 3, 2, ROWS), (3,)),
    "rows, experts for one x, experts": (
        (ROWS_ALONE, (None, 0, 0, 0), ALL), (2, 3, ROWS), (2, 3),
    ),
    "rows, some weights": ((ROWS_ALONE, (None, 0, None, 0)), (2, ROWS), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("levels, lead, stacked", LEVELS.values(), ids=LEVELS.keys())
def test_rows_between_and_around_weights(rng, fused_cpu, levels, lead, stacked):
    x = problem(rng, lead, WIDTH, HIDDEN)[0]
    mapped = [any(axes[k] is not None for axes in levels) for k in range(4)]
    weights = [
        jnp.asarray(rng.uniform(0.5, 1.5, (*stacked, 1, 1)), jnp.float32) * w if m else w
        for w, m in zip(problem(rng, (ROWS,), WIDTH, HIDDEN)[1:], mapped[1:], strict=True)
    ]

    def gradients(f):
        for axes in reversed(levels):
            f = jax.vmap(f, axes)
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a) ** 2).mean(), (0, 1, 2, 3)))

    got = gradients(_op("OI", "fused"))(x, *weights)
    assert fused_cpu.take_calls(got)
    want = gradients(_plain("OI"))(x, *weights)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


@pytest.mark.parametrize("jitted", [True, False])
def test_no_examples_and_no_jit(rng, jitted):
    """Nothing mapped gives gradients of zero; ``disable_jit`` changes no value."""
    arrays = problem(rng, (SIZE, ROWS), WIDTH, HIDDEN)

    def gradients(f):
        mapped = jax.vmap(f, (0, None, None, None))
        return jax.grad(lambda *a: (mapped(*a) ** 2).sum(), (0, 1, 2, 3))

    with jax.disable_jit(not jitted):
        empty = gradients(_op("OI", "xla"))(arrays[0][:0], *arrays[1:])
        got = gradients(_op("OI", "xla"))(*arrays)
    assert not any(jnp.any(g) for g in empty)
    check(got, [float64(a) for a in gradients(_plain("OI"))(*arrays)], BOUND)

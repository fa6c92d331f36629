"""jax.checkpoint next to plain JAX: products computed again, and what is kept, policy by policy."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core.primitives import name_p
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from narrow import check_narrow
from support import ARGUMENTS, BOUNDS, check, float64, plain, problem
from test_remat import POLICIES

from swiglu_jax import swiglu_mlp

pytestmark = pytest.mark.usefixtures("on_cpu")

LEAD, WIDTH, HIDDEN = (6,), 8, 12
BOUND = 10 * BOUNDS["float32"]


def _named(x, w_gate, w_up, w_down):
    """The op in plain JAX, under the names that the op's residuals have."""
    gate = checkpoint_name(x @ w_gate.T, "swiglu_gate")
    up = checkpoint_name(x @ w_up.T, "swiglu_up")
    return checkpoint_name(jax.nn.silu(gate) * up, "swiglu_h") @ w_down.T


def _op(implementation="xla", **options):
    return lambda *a: swiglu_mlp(*a, implementation=implementation, **options)


def _scale(x):
    """One number for each of the result, so that no sum of a gradient is near zero by chance."""
    return 1.7 + jnp.cos(x)


def _layer(f, arrays, differentiated=(), policy="none"):
    """A checkpointed function of a scale and of the differentiated arguments.

    The result of ``f`` goes into a product and a sine, whose derivatives read it again.
    """

    def layer(scale, moving):
        given = dict(zip(ARGUMENTS, arrays, strict=True)) | moving
        return jnp.sin(f(*given.values()) * scale)

    moving = {name: a for name, a in zip(ARGUMENTS, arrays, strict=True) if name in differentiated}
    return jax.checkpoint(layer, policy=POLICIES[policy]), (_scale(arrays[0]), moving)


def _backward(f, arrays, differentiated, policy):
    """How many products the backward pass has, and how many [M, I] tensors it is given."""
    layer, primals = _layer(f, arrays, differentiated, policy)
    y, pull = jax.vjp(layer, *primals)
    text = jax.jit(lambda pull, dy: pull(dy)).lower(pull, y).as_text()
    kept = sum(leaf.shape == (*LEAD, HIDDEN) for leaf in jax.tree.leaves(pull))
    return text.count("stablehlo.dot_general"), kept


SETS = [(), ("w_down",), ("w_up",), ("w_gate",), ("x",), ARGUMENTS]


@pytest.mark.parametrize("policy", POLICIES)
def test_as_many_products_again_as_in_plain_jax_and_no_more_kept(rng, policy):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    for differentiated in SETS:
        ours, kept = _backward(_op(), arrays, differentiated, policy)
        theirs, kept_there = _backward(_named, arrays, differentiated, policy)
        assert (ours, kept <= kept_there) == (theirs, True), differentiated


@pytest.mark.parametrize(
    "policy, again",
    {"none": 3, "dots": 0, "dots_no_batch": 0, "offload dots": 0, "h": 1, "gate, up": 1, "up": 2}
    .items(),
)  # fmt: skip
@pytest.mark.parametrize("forward_mode", [False, True])
def test_a_call_that_is_not_differentiated(rng, policy, again, forward_mode):
    """The numbers themselves, of three products."""
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    assert _backward(_op(forward_mode=forward_mode), arrays, (), policy)[0] == again


@pytest.mark.parametrize("policy", POLICIES)
def test_values_where_the_call_is_not_differentiated(rng, implementation, policy):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)

    def gradient(f, policy):
        layer, primals = _layer(f, arrays, (), policy)
        return jax.jit(jax.value_and_grad(lambda *a: (layer(*a) ** 2).sum()))(*primals)

    got, want = gradient(_op(implementation), policy), gradient(plain, "none")
    check(got, [float64(a) for a in want], BOUND)


@pytest.mark.parametrize("policy", ["dots", "gate, up", "gate", "offload gate, up"])
def test_narrow_dtypes(rng, fused_cpu, policy):
    arrays = problem(rng, (32,), 64, 96, "bfloat16")

    def program(f):
        def gradient(*arrays):
            layer = jax.checkpoint(lambda b: jnp.sin(f(*arrays) * b), policy=POLICIES[policy])
            return jax.grad(lambda b: layer(b).astype(jnp.float32).sum())(arrays[0])

        return gradient

    check_narrow(program, _op("fused"), plain, arrays)


@pytest.mark.parametrize(
    "policy, forward, again",
    [
        ("none", ("h",), [("h",)]),
        ("dots", ("h",), []),
        ("h", ("h",), []),
        ("gate, up", ("h", "gate", "up"), []),
        ("gate", ("h", "gate"), [("up",)]),
        ("save gate, offload up", ("h", "gate", "up"), []),
    ],
)
def test_the_stage_is_asked_for_what_is_kept(rng, fused_cpu, policy, forward, again):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    layer, primals = _layer(_op("fused"), arrays, (), policy)
    y, pull = jax.vjp(layer, *primals)
    assert [c.outputs for c in fused_cpu.take_calls(y)] == [forward]
    assert [c.outputs for c in fused_cpu.take_calls(pull(y))] == again


@pytest.mark.parametrize("policy", ["offload gate, up", "save gate, offload up", "offload dots"])
def test_transfers_are_those_of_plain_jax(rng, policy):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)

    def moves(f):
        layer, primals = _layer(f, arrays, (), policy)
        grad = jax.grad(lambda *a: layer(*a).sum())
        # The CPU has one memory, so that transfers are no operations there.
        text = jax.jit(grad).trace(*primals).lower(lowering_platforms=("cuda",)).as_text()
        return [text.count(f'_xla_buffer_placement = "{k}"') for k in ("pinned_host", "device")]

    assert moves(_op()) == moves(_named)


def test_what_is_not_read_again_is_neither_computed_nor_kept(rng):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    for policy in POLICIES.values():
        layer = jax.checkpoint(lambda b: jnp.sin(b) + swiglu_mlp(*arrays), policy=policy)
        y, pull = jax.vjp(layer, jnp.ones_like(arrays[0]))
        assert "dot_general" not in jax.jit(lambda p, y: p(y)).lower(pull, y).as_text()
        assert not any(leaf.shape == (*LEAD, HIDDEN) for leaf in jax.tree.leaves(pull))


def _in_jit(f):
    return jax.jit(f)


def _in_scan(f):
    return lambda *a: jax.lax.scan(lambda c, _: (jnp.sin(f(*a) + c), None), 0 * a[0], length=2)[0]


def _in_cond(f):
    return lambda *a: jax.lax.cond(a[0].sum() > 0, f, lambda *a: f(-a[0], *a[1:]), *a)


def _in_checkpoint(f):
    return jax.checkpoint(f, policy=POLICIES["up"])


def _over_rows(f):
    return jax.vmap(f, (0, None, None, None))


def _over_weights(f):
    return lambda *a: jax.vmap(f, (None, 0, 0, 0))(a[0], *(jnp.stack([w, -w]) for w in a[1:])).sum(
        0
    )


def _in_shard_map(f):
    specs = (P("a"), P(), P(), P())
    return jax.shard_map(f, mesh=mesh(a=2), in_specs=specs, out_specs=P("a"))


AROUND = [_in_jit, _in_scan, _in_cond, _in_checkpoint, _over_rows, _over_weights, _in_shard_map]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "policy", ["none", "dots", "dots_no_batch", "gate", "h", "offload dots", "offload gate, up"]
)
def test_transformations_inside(rng, policy, around):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    (primal, _), got = _step(around(_op()), arrays, policy)
    (want_primal, _), want = _step(around(_named), arrays, "none")
    check([primal, got], [float64(want_primal), float64(want)], BOUND)
    # JAX refuses its own offloading in a shard_map; branches that are alike share their text.
    if not (around is _in_cond or (around is _in_shard_map and "offload" in policy)):
        ours, theirs = (_backward(around(f), arrays, (), policy)[0] for f in (_op(), _named))
        assert ours == theirs


def _step(f, arrays, policy):
    layer, primals = _layer(f, arrays, (), policy)
    return jax.jit(jax.value_and_grad(lambda *a: ((y := layer(*a)).sum(), y), has_aux=True))(
        *primals
    )


@pytest.mark.parametrize("policy", ["none", "dots", "gate", "h"])
def test_on_an_explicit_mesh(rng, policy):
    arrays = problem(rng, (4, 6), WIDTH, HIDDEN)
    layer, primals = _layer(plain, arrays)
    want = jax.grad(lambda *a: layer(*a).sum())(*primals)
    on = mesh(AxisType.Explicit, a=2)
    with jax.set_mesh(on):
        placed = [jax.device_put(a, NamedSharding(on, P("a") if k == 0 else P()))
                  for k, a in enumerate(arrays)]  # fmt: skip
        layer, primals = _layer(_op(), placed, (), policy)
        got = jax.jit(jax.grad(lambda *a: layer(*a).sum()))(*primals)
    check([got], [float64(want)], BOUND)


@pytest.mark.parametrize("policy", ["none", "dots", "h", "gate"])
def test_derivatives_of_a_gradient_whose_call_was_not_differentiated(rng, implementation, policy):
    """What is kept in one derivative is differentiated by the next, and seen by vmap."""
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    xs = jnp.stack([arrays[0], jnp.cos(arrays[0])])

    def total(f, policy):
        def inner(*a):
            layer = jax.checkpoint(lambda s: jnp.sin(f(*a) * s), policy=POLICIES[policy])
            return jax.grad(lambda s: (layer(s) ** 2).sum())(_scale(a[0]))

        each = jax.vmap(inner, (0, None, None, None))
        return jax.jit(jax.grad(lambda *a: (each(*a) ** 2).sum(), (0, 1, 2, 3)))

    got = total(_op(implementation), policy)(xs, *arrays[1:])
    want = total(plain, "none")(xs, *arrays[1:])
    check(got, [float64(a) for a in want], BOUND)


@pytest.mark.parametrize("policy", ["none", "dots", "nothing", "everything"])
def test_the_call_stays_whole_where_nothing_inside_is_kept(rng, policy):
    """So that an outer vmap and an outer derivative find what they find without checkpoint."""
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    layer, primals = _layer(_op(), arrays, (), policy)
    text = str(jax.make_jaxpr(jax.grad(lambda *a: layer(*a).sum()))(*primals))
    assert len(re.findall(r"= swiglu_mlp\[", text)) == (2 if policy in ("none", "nothing") else 1)
    assert "swiglu_gate_up" not in text


def test_a_policy_of_ones_own_sees_shapes(rng):
    """Only products of [M, H]: the last one is kept, and so nothing is computed again."""
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    asked = []

    def policy(primitive, *avals, **params):
        asked.append(primitive.name)
        return primitive.name == "dot_general" and avals[0].shape == (*LEAD, HIDDEN)

    layer = jax.checkpoint(lambda s: jnp.sin(swiglu_mlp(*arrays) * s), policy=policy)
    y, pull = jax.vjp(layer, 1.7)
    assert "dot_general" not in jax.jit(lambda p, y: p(y)).lower(pull, y).as_text()
    assert asked.count("dot_general") == 2  # gate and up are one product's question


def test_what_the_rule_leans_on():
    """jit is one equation with a rule, a name has a primitive, a custom rule has a function."""

    def f(x):
        return x + 1

    for custom in (jax.custom_vjp, jax.custom_jvp):
        assert inspect.unwrap(custom(f)) is f
    (call,) = jax.make_jaxpr(jax.jit(f))(1.0).eqns
    assert call.primitive in partial_eval.partial_eval_jaxpr_custom_rules
    (name,) = jax.make_jaxpr(functools.partial(checkpoint_name, name="n"))(1.0).eqns
    assert (name.primitive, name.params) == (name_p, {"name": "n"})

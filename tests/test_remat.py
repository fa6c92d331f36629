"""jax.checkpoint: what each policy keeps, what is computed again, and what comes out."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as policies
from narrow import check_narrow
from support import ARGUMENTS, BOUNDS, LAYOUTS, check, float64, kept_activations, plain, problem

from swiglu_jax import swiglu_mlp

pytestmark = pytest.mark.usefixtures("on_cpu")

LEAD, WIDTH, HIDDEN = (6,), 8, 12
BOUND = 10 * BOUNDS["float32"]

POLICIES = {
    "none": None,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
    "gate, up": policies.save_only_these_names("swiglu_gate", "swiglu_up"),
    "gate": policies.save_only_these_names("swiglu_gate"),
    "up": policies.save_only_these_names("swiglu_up"),
    "h": policies.save_only_these_names("swiglu_h"),
    "any but gate": policies.save_any_names_but_these("swiglu_gate"),
    "anything but h": policies.save_anything_except_these_names("swiglu_h"),
    "offload gate, up": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["swiglu_gate", "swiglu_up"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "save gate, offload up": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["swiglu_gate"],
        names_which_can_be_offloaded=["swiglu_up"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload dots": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "dots or h": policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names("swiglu_h")
    ),
}


def _op(layout="OI", implementation="xla"):
    return lambda *a: swiglu_mlp(*a, weight_layout=layout, implementation=implementation)


def _loss(f, policy):
    layer = jax.checkpoint(f, policy=policy)

    def loss(*a):
        # Two layers and something nonlinear behind, so that layers are really computed again.
        return (layer(jnp.sin(layer(*a)), *a[1:]) ** 2).sum()

    return loss


def _gemms(text: str) -> int:
    return len(re.findall(r"\bdot\(|__onednn\$matmul", text))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_values_and_gradients(rng, implementation, policy):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    got = jax.jit(jax.value_and_grad(_loss(_op("OI", implementation), policy), (0, 1, 2, 3)))
    want = jax.jit(jax.value_and_grad(_loss(plain, None), (0, 1, 2, 3)))
    value, gradients = got(*arrays)
    want_value, want_gradients = want(*arrays)
    check([value, *gradients], [float64(a) for a in (want_value, *want_gradients)], BOUND)


def test_every_stock_policy_is_among_these():
    """A new one in JAX is to be added above."""
    # jax 0.11 has the classes of some there too.
    stock = {n for n in dir(policies) if n[0].islower()}
    assert stock - {"checkpoint_dots", "checkpoint_dots_with_no_batch_dims"} == {
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "everything_saveable",
        "nothing_saveable",
        "offload_dot_with_no_batch_dims",
        "save_and_offload_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_from_both_policies",
        "save_only_these_names",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["nothing", "dots", "gate", "h", "offload gate, up"])
def test_narrow_dtypes(rng, fused_cpu, policy, layout):
    arrays = problem(rng, (32,), 64, 96, "bfloat16", layout)

    def program(f):
        return jax.grad(_loss(f, POLICIES[policy]), (0, 1, 2, 3))

    check_narrow(program, _op(layout, "fused"), lambda *a: plain(*a, layout), arrays)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["dots", "dots_no_batch"])
def test_policies_that_keep_dots_compute_no_gemm_again(rng, policy, layout):
    """Nine GEMMs in a step, as in plain JAX with the same policy: three forward, six backward."""
    arrays = problem(rng, LEAD, WIDTH, HIDDEN, layout=layout)

    def compiled(f):
        def step(*a):
            y, pull = jax.vjp(jax.checkpoint(f, policy=POLICIES[policy]), *a)
            return y, pull(jnp.cos(y))

        return jax.jit(step).lower(*arrays).compile().as_text()

    ours = _gemms(compiled(_op(layout)))
    theirs = _gemms(compiled(lambda *a: plain(*a, layout)))
    assert ours == theirs == 9


@pytest.mark.parametrize(
    "policy, kept",
    {
        "everything": ("gate", "up"),
        "nothing": (),
        "dots": ("gate", "up"),
        "dots_no_batch": ("gate", "up"),
        "gate, up": ("gate", "up"),
        "gate": ("gate",),
        "h": (),  # h is not a residual where gate and up are: the fused backward gives it
        "any but gate": ("up",),
        "offload gate, up": ("gate", "up"),
        "offload dots": ("gate", "up"),
    }.items(),
)
def test_what_a_policy_keeps(rng, policy, kept):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    pull = jax.vjp(jax.checkpoint(_op(), policy=POLICIES[policy]), *arrays)[1]
    assert kept_activations(pull, arrays, HIDDEN)["hidden"] == len(kept)


def test_h_is_kept_by_name_where_it_is_a_residual(rng):
    x, w_gate, w_up, w_down = problem(rng, LEAD, WIDTH, HIDDEN)
    layer = jax.checkpoint(lambda w: swiglu_mlp(x, w_gate, w_up, w), policy=POLICIES["h"])
    pull = jax.vjp(layer, w_down)[1]
    assert kept_activations(pull, (x,), HIDDEN)["hidden"] == 1


@pytest.mark.parametrize("policy", ["offload gate, up", "offload dots"])
def test_offloading_moves_to_host_memory_and_back(rng, policy):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)

    def moves(f):
        """Transfers to the host's memory and back."""
        grad = jax.grad(lambda *a: jax.checkpoint(f, policy=POLICIES[policy])(*a).sum(), (0, 1))
        # The CPU has one memory, so that transfers are no operations there.
        text = jax.jit(grad).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        return [
            text.count(f'_xla_buffer_placement = "{kind}"') for kind in ("pinned_host", "device")
        ]

    assert moves(_op()) == [2, 2]
    if policy == "offload dots":
        assert moves(plain) == [2, 2]


@pytest.mark.parametrize(
    "policy, again",
    {
        "nothing": ("gate", "up"),
        "gate": ("up",),
        "up": ("gate",),
        "h": ("gate", "up"),
    }.items(),
)
def test_only_what_the_backward_pass_reads_is_computed_again(rng, fused_cpu, policy, again):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    layer = jax.checkpoint(_op("OI", "fused"), policy=POLICIES[policy])
    grad = jax.jit(jax.grad(lambda *a: (layer(*a) ** 2).sum(), (0, 1, 2, 3)))
    calls = [c for c in fused_cpu.take_calls(grad(*arrays)) if c.stage == "gate_up"]
    assert len(calls) == 2
    assert again in [c.outputs for c in calls]


def test_a_superset_serves_what_no_kernel_writes_alone(rng, fused_cpu):
    fused_cpu.superset = True
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    got = jax.jit(jax.grad(_loss(_op("OI", "fused"), POLICIES["gate"]), (0, 1, 2, 3)))(*arrays)
    want = jax.jit(jax.grad(_loss(plain, None), (0, 1, 2, 3)))(*arrays)
    check(got, [float64(a) for a in want], BOUND)
    assert {c.outputs for c in fused_cpu.take_calls() if c.stage == "gate_up"} == {
        ("h", "gate", "up")
    }


@pytest.mark.parametrize("policy", ["dots", "dots_no_batch", "nothing", "offload dots"])
def test_weights_of_their_own_under_vmap(rng, implementation, policy):
    """Batched GEMMs: dots_with_no_batch_dims_saveable computes them again, dots_saveable not."""
    arrays = [jnp.stack([a, 0.5 * a]) for a in problem(rng, LEAD, WIDTH, HIDDEN)]
    ours = _loss(jax.vmap(_op("OI", implementation)), POLICIES[policy])
    got = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(*arrays)
    want = jax.jit(jax.grad(_loss(jax.vmap(plain), None), (0, 1, 2, 3)))(*arrays)
    check(got, [float64(a) for a in want], BOUND)
    pull = jax.vjp(jax.checkpoint(jax.vmap(_op()), policy=POLICIES[policy]), *arrays)[1]
    kept = sum(leaf.shape == (2, *LEAD, HIDDEN) for leaf in jax.tree.leaves(pull))
    assert kept == (2 if policy == "dots" else 0)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_checkpoint_of_a_gradient_and_gradient_of_a_checkpoint(rng, implementation, prevent_cse):
    arrays = problem(rng, (3,), 4, 6)

    def nested(f):
        inner = jax.grad(lambda *a: (f(*a) ** 2).sum(), (1, 3))
        again = jax.checkpoint(inner, policy=POLICIES["dots"], prevent_cse=prevent_cse)
        return jax.jit(jax.grad(lambda *a: sum((g**2).sum() for g in again(*a)), (0, 1, 2, 3)))

    got, want = nested(_op("OI", implementation))(*arrays), nested(plain)(*arrays)
    check(got, [float64(a) for a in want], BOUND)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_argument_alone(rng, name):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)
    k = ARGUMENTS.index(name)
    for policy in ("nothing", "dots", "gate"):
        got = jax.grad(_loss(_op(), POLICIES[policy]), k)(*arrays)
        check([got], [float64(jax.grad(_loss(plain, None), k)(*arrays))], BOUND)


@pytest.mark.parametrize("policy", ["nothing", "everything", "dots", "h"])
def test_a_layer_that_is_not_differentiated_inside_one_that_is(rng, implementation, policy):
    arrays = problem(rng, LEAD, WIDTH, HIDDEN)

    def gradient(f):
        layer = jax.checkpoint(lambda scale: jnp.sin(f(*arrays) * scale), policy=POLICIES[policy])
        return jax.jit(jax.grad(lambda scale: (layer(scale) ** 2).sum()))(1.7)

    check([gradient(_op("OI", implementation))], [float64(gradient(plain))], BOUND)

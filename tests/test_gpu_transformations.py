"""Transformations on a GPU with fused routes forced, beside plain JAX."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, op, training_step
from support import LAYOUTS, error, float64, plain, problem

pytestmark = pytest.mark.gpu

ROWS, WIDTH, HIDDEN = 256, 512, 1024
FUSED = r'custom_call_target="swiglu_jax_\w*?_(gate_up|down_dswiglu)'


def _compare(rng, program, layout="OI", lead=(ROWS,), arrays=None):
    """``program`` of ours in bfloat16 no further from float32 than plain JAX in bfloat16 is."""
    arrays = arrays or problem(rng, lead, WIDTH, HIDDEN, "bfloat16", layout)
    wide = [a.astype(jnp.float32) for a in arrays]
    theirs = program(functools.partial(plain, layout=layout))
    with jax.default_matmul_precision("highest"):
        want = jax.tree.leaves(jax.jit(theirs)(*wide))
    compiled = jax.jit(program(op(layout))).lower(*arrays).compile()
    got = jax.tree.leaves(compiled(*arrays))
    plain_got = jax.tree.leaves(jax.jit(theirs)(*arrays))
    for k, (a, b, c) in enumerate(zip(got, plain_got, want, strict=True)):
        ours, others = error(a, float64(c)), error(b, float64(c))
        assert ours <= 1.3 * others + 2e-3, f"array {k}: {ours:.3g}, plain JAX {others:.3g}"
    return _fused_calls(compiled)


def _fused_calls(compiled) -> list[str]:
    """Stages of the program's fused calls, in the order of its text."""
    return re.findall(FUSED, compiled.as_text())


def _mean_square(f):
    return lambda *a: (f(*a).astype(jnp.float32) ** 2).mean()


def _policy(policy):
    return lambda f: training_step(jax.checkpoint(f, policy=policy))


def _scanned(f):
    def run(x, *w):
        return jax.lax.scan(lambda x, _: (x + f(x, *w), None), x, length=3)[0]

    return training_step(run)


def _cond(f):
    def run(x, *w):
        stopped = [jax.lax.stop_gradient(v) for v in w]
        return jax.lax.cond(x[0, 0] > 0, lambda x: f(x, *w), lambda x: f(x, *stopped), x)

    return training_step(run)


def _per_example(f):
    return jax.vmap(jax.grad(_mean_square(f), (1, 3)), (0, None, None, None))


PROGRAMS = {
    "step": training_step,
    "remat": _policy(None),
    "remat dots": _policy(jax.checkpoint_policies.dots_saveable),
    "remat gate": _policy(jax.checkpoint_policies.save_only_these_names("swiglu_gate")),
    "remat h": _policy(jax.checkpoint_policies.save_only_these_names("swiglu_h")),
    "offload": _policy(
        jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["swiglu_gate", "swiglu_up"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    ),
    "scan": _scanned,
    "cond": _cond,
    "grad of grad": lambda f: jax.grad(
        lambda *a: sum(
            (g.astype(jnp.float32) ** 2).mean() for g in jax.grad(_mean_square(f), (0, 2))(*a)
        ),
        (0, 1, 2, 3),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_programs(rng, program, layout):
    calls = _compare(rng, program, layout)
    assert "gate_up" in calls
    assert "down_dswiglu" in calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_over_x_is_one_call(rng, layout):
    program = lambda f: training_step(jax.vmap(f, (0, None, None, None)))  # noqa: E731
    assert len(_compare(rng, program, layout, lead=(3, 128))) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_over_everything(rng, layout):
    several = [problem(rng, (128,), WIDTH, HIDDEN, "bfloat16", layout) for _ in range(3)]
    arrays = [jnp.stack(a) for a in zip(*several, strict=True)]
    calls = _compare(rng, lambda f: training_step(jax.vmap(f)), layout, arrays=arrays)
    assert set(calls) == {"gate_up", "down_dswiglu"}


def test_gradients_of_each_example(rng):
    _compare(rng, _per_example, lead=(2, 128))


@pytest.mark.parametrize("subset", [(3,), (2,), (2, 3), (0,), (1,), (0, 3)], ids=str)
def test_every_row_of_the_residual_table(rng, subset):
    _compare(rng, lambda f: jax.grad(_mean_square(f), subset))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hidden_tensors_are_kept_a_layer(layout):
    rows, width, hidden = 2048, 256, 2048

    def temporaries(layers):
        first, second = (layers, hidden, width), (layers, width, hidden)
        if layout == "IO":
            first, second = second, first
        shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (first, first, second)]
        x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)

        def loss(x, *weights):
            def layer(x, w):
                return x + op(layout)(x, *w), None

            return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

        step = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, *shapes)
        return step.compile().memory_analysis().temp_size_in_bytes

    kept = (temporaries(16) - temporaries(4)) / 12 / (rows * hidden * 2)
    x = width / hidden
    assert kept <= 2 + 2.5 * x


@pytest.mark.parametrize("how", ["eager", "jitted"])
def test_shard_map(rng, how):
    on = jax.make_mesh((1,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:1])

    def program(f):
        specs = (P("dp"), P(), P(), P())
        mapped = jax.shard_map(f, mesh=on, in_specs=specs, out_specs=P("dp"))
        step = jax.grad(_mean_square(mapped), (0, 1, 2, 3))
        return jax.jit(step) if how == "jitted" else step

    _compare(rng, program)


def test_exported_and_called(rng):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN, "bfloat16")
    step = jax.jit(training_step(op()))
    text = step.lower(*arrays).as_text()
    targets = sorted(set(re.findall(r"@(swiglu_jax_\w+)", text)))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in targets]
    exported = export.export(step, disabled_checks=checks)(*arrays)
    served = export.deserialize(exported.serialize())
    got, want = jax.tree.leaves(served.call(*arrays)), jax.tree.leaves(step(*arrays))
    for a, b in zip(got, want, strict=True):
        assert error(a, float64(b)) <= 1e-6


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("plan", ["dp", "tp", "dp x tp", "fsdp"])
def test_all_gpus_of_this_host(rng, plan):
    """Fused calls on local shards, and the collectives of plain JAX."""
    devices = jax.devices()
    tp = {"dp": 1, "fsdp": 1, "tp": len(devices)}.get(plan, 2)
    shape = (len(devices) // tp, tp)
    on = jax.make_mesh(shape, ("dp", "tp"), (AxisType.Auto,) * 2, devices=devices)
    first, second = (P("dp"), P(None, "dp")) if plan == "fsdp" else (P("tp"), P(None, "tp"))
    specs = [NamedSharding(on, s) for s in (P("dp"), first, first, second)]
    arrays = problem(rng, (2048,), WIDTH, HIDDEN, "bfloat16")
    out = (NamedSharding(on, P()), tuple(specs))
    texts, results = [], []
    for f in (op(), plain):
        step = jax.jit(training_step(f), in_shardings=tuple(specs), out_shardings=out)
        compiled = step.lower(*arrays).compile()
        texts.append(compiled.as_text())
        results.append(jax.tree.leaves(compiled(*map(jax.device_put, arrays, specs))))
    assert set(re.findall(FUSED, texts[0])) == {
        "gate_up",
        "down_dswiglu",
    }
    kinds = [{kind for kind, _ in collectives(text)} for text in texts]
    assert kinds[0] <= kinds[1]
    with jax.default_matmul_precision("highest"):
        want = jax.tree.leaves(training_step(plain)(*(a.astype(jnp.float32) for a in arrays)))
    for a, b, c in zip(*results, want, strict=True):
        ours, others = error(a, float64(c)), error(b, float64(c))
        assert ours <= 1.3 * others + 2e-3

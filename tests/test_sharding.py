"""jit over automatic meshes: fused calls on local shards, and no collective beyond plain JAX's."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import PLANS, collectives, mesh, op, place, shardings, training_step
from support import BOUNDS, LAYOUTS, check, float64, plain, problem

from swiglu_jax import swiglu_mlp
from swiglu_jax._stages import GRADIENT_STAGES, STAGES, StageParams, _partitioning

pytestmark = pytest.mark.usefixtures("on_cpu")

ROWS, WIDTH, HIDDEN = 320, 24, 48
"""More rows than columns, as in training: Shardy keeps the division of the larger operand where
two compete for a mesh axis, and would divide I and gather x if weights were larger."""
BOUND = 20 * BOUNDS["float32"]


def _plan(rng, plan, layout="OI", dtype="float32"):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN, dtype, layout)
    return arrays, shardings(plan, mesh(**PLANS[plan][0]), layout)


def _local(plan):
    axes, (x, *_) = PLANS[plan]
    # Weights divided over dp are gathered: it is the rows that stay divided over it.
    return ROWS // (axes.get("dp", 1) if "dp" in x else 1), WIDTH, HIDDEN // axes.get("tp", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_step(rng, fused_cpu, plan, layout):
    arrays, on = _plan(rng, plan, layout)
    placed = place(arrays, on)
    # Gradients come out laid out like their arguments, as a trainer asks.
    replicated = NamedSharding(on[0].mesh, P())

    def compiled(f):
        step = jax.jit(training_step(f), out_shardings=(replicated, tuple(on)))
        return step.lower(*placed).compile()

    ours, theirs = compiled(op(layout)), compiled(lambda *a: plain(*a, layout))
    (loss, gradients), (want_loss, want) = ours(*placed), theirs(*placed)
    check([loss, *gradients], [float64(a) for a in (want_loss, *want)], BOUND)

    calls = fused_cpu.take_calls(gradients)
    devices = on[0].mesh.size
    assert [c.stage for c in calls] == ["down_dswiglu"] * devices + ["gate_up"] * devices
    assert {c.sizes for c in calls} == {_local(plan)}
    # Routes are asked about the whole when the program is lowered: is there any hope of fusing?
    asked = {(c.m, c.h, c.i) for c in fused_cpu.asked}
    assert asked == {_local(plan), (ROWS, WIDTH, HIDDEN)}

    made = collectives(ours.as_text())
    assert made == collectives(theirs.as_text())
    for kind, shape in made:
        # No activation is gathered: those have the rows of the whole batch or of one device.
        rows = {str(ROWS), str(_local(plan)[0])}
        assert kind != "all-gather" or not rows & set(re.findall(r"\d+", shape[3:])), (kind, shape)


def _moved(counted):
    """Elements that come out of collectives, all together."""
    total = 0
    for (_, shape), n in counted.items():
        size = n
        for d in re.findall(r"\d+", shape.split("[")[1]):
            size *= int(d)
        total += size
    return total


def test_inference_under_tensor_parallelism_has_one_reduction(rng, fused_cpu):
    arrays, on = _plan(rng, "tp")
    out = NamedSharding(on[0].mesh, P())
    text = jax.jit(op(), in_shardings=tuple(on), out_shardings=out).lower(*arrays).compile()
    assert dict(collectives(text.as_text())) == {("all-reduce", f"f32[{WIDTH},{ROWS}]"): 1}


@pytest.mark.parametrize("what", ["forward", "step"])
def test_sequence_parallelism(rng, fused_cpu, what):
    """x divided over its sequence outside the MLP: plain JAX's collectives and no other.

    For the result XLA's partitioner says all-reduce and then a slice, of which the GPU's
    compiler makes a reduce-scatter, and the CPU's does not; shard_map says it itself, below.
    """
    on = mesh(dp=2, tp=4)
    arrays = problem(rng, (4, 8), WIDTH, HIDDEN)
    spec = NamedSharding(on, P("dp", "tp"))
    specs = [spec, *(NamedSharding(on, s) for s in (P("tp"), P("tp"), P(None, "tp")))]
    placed = place(arrays, specs)

    def compiled(f):
        if what == "forward":
            return jax.jit(f, out_shardings=spec).lower(*placed).compile()
        out = (NamedSharding(on, P()), tuple(specs))
        return jax.jit(training_step(f), out_shardings=out).lower(*placed).compile()

    ours, theirs = compiled(op()), compiled(plain)
    got, want = ours(*placed), theirs(*placed)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    made = collectives(ours.as_text())
    assert made == collectives(theirs.as_text())
    # One gather: of x, to the whole sequence of a device's part of the batch.
    gathered = {key: n for key, n in made.items() if key[0] == "all-gather"}
    assert gathered == {("all-gather", f"f32[2,8,{WIDTH}]"): 1}
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(2 * 8, WIDTH, HIDDEN // 4)}


@pytest.mark.parametrize("what", ["forward", "step"])
def test_sequence_parallelism_by_hand_reduces_and_scatters(rng, fused_cpu, what):
    on = mesh(dp=2, tp=4)
    arrays = problem(rng, (4, 8), WIDTH, HIDDEN)
    specs = (P("dp", "tp"), P("tp"), P("tp"), P(None, "tp"))
    placed = place(arrays, [NamedSharding(on, s) for s in specs])

    def local(x, *weights):
        x = jax.lax.all_gather(x, "tp", axis=1, tiled=True)
        y = op()(x, *weights)
        return jax.lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)

    f = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=specs[0])
    run = {"forward": lambda f: f, "step": training_step}[what]
    compiled = jax.jit(run(f)).lower(*placed).compile()
    got, want = compiled(*placed), run(plain)(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    made = collectives(compiled.as_text())
    times = 1 if what == "forward" else 2  # what gathers on the way there scatters on the way back
    assert made["reduce-scatter", f"f32[2,2,{WIDTH}]"] == times
    assert made["all-gather", f"f32[2,8,{WIDTH}]"] == times
    assert {kind for kind, _ in made} <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(2 * 8, WIDTH, HIDDEN // 4)}


def test_batch_and_sequence_divided(rng, fused_cpu):
    """No reshape to two dimensions stands between x's sharding and the call."""
    on = mesh(dp=2, sp=4)
    arrays = problem(rng, (4, 8), WIDTH, HIDDEN)
    specs = [NamedSharding(on, s) for s in (P("dp", "sp"), P(), P(), P())]
    placed = place(arrays, specs)
    step = jax.jit(training_step(op())).lower(*placed).compile()
    _, got = step(*placed)
    _, want = jax.jit(training_step(plain))(*placed)
    check(got, [float64(a) for a in want], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(2 * 2, WIDTH, HIDDEN)}
    assert not any(kind == "all-gather" for kind, _ in collectives(step.as_text()))


@pytest.mark.parametrize("sizes", [(6, 32, 64), (16, 32, 36), (3, 32, 20)], ids=str)
def test_sizes_that_devices_do_not_divide(rng, fused_cpu, sizes):
    rows, width, hidden = sizes
    on = mesh(dp=4, tp=2)
    arrays = problem(rng, (rows,), width, hidden)

    def step(f):
        # Constraints inside: arguments could not be placed unevenly.
        def constrained(*a):
            specs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))
            a = [
                jax.lax.with_sharding_constraint(v, NamedSharding(on, s))
                for v, s in zip(a, specs, strict=True)
            ]
            return f(*a)

        return jax.jit(training_step(constrained))(*arrays)

    got, want = step(op()), step(plain)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(-(-rows // 4), width, -(-hidden // 2))}


def test_stacked_layers_in_a_scan(rng, fused_cpu):
    on = mesh(dp=4, tp=2)
    x = problem(rng, (ROWS,), WIDTH, HIDDEN)[0]
    weights = [problem(rng, (1,), WIDTH, HIDDEN)[1:] for _ in range(3)]
    weights = [jnp.stack(w) for w in zip(*weights, strict=True)]
    specs = (P("dp"), P(None, "tp"), P(None, "tp"), P(None, None, "tp"))
    placed = place((x, *weights), [NamedSharding(on, s) for s in specs])

    def scanned(f):
        def run(x, *w):
            return jax.lax.scan(jax.checkpoint(lambda x, w: (x + f(x, *w), None)), x, w)[0]

        return jax.jit(training_step(run)).lower(*placed).compile()

    ours, theirs = scanned(op()), scanned(plain)
    got, want = ours(*placed), theirs(*placed)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(ROWS // 4, WIDTH, HIDDEN // 2)}
    assert _moved(collectives(ours.as_text())) <= _moved(collectives(theirs.as_text()))


def test_experts_of_their_own_on_each_device(rng, fused_cpu):
    """vmap over weights whose mapped axis is divided: no expert's weight travels."""
    on = mesh(ep=4)
    arrays = [
        jnp.stack(a)
        for a in zip(*(problem(rng, (5,), WIDTH, HIDDEN) for _ in range(8)), strict=True)
    ]
    placed = place(arrays, [NamedSharding(on, P("ep"))] * 4)
    step = jax.jit(training_step(jax.vmap(op()))).lower(*placed).compile()
    got = step(*placed)
    want = jax.jit(training_step(jax.vmap(plain)))(*placed)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    calls = fused_cpu.take_calls(got)
    assert len(calls) == 2 * 8
    assert {c.sizes for c in calls} == {(5, WIDTH, HIDDEN)}
    assert {kind for kind, _ in collectives(step.as_text())} <= {"all-reduce"}


def test_experts_under_a_batch(rng, fused_cpu):
    """vmap over experts inside vmap over examples, each divided: plain JAX's collectives."""
    on = mesh(dp=2, ep=2, tp=2)
    x = problem(rng, (4, 2, 3), WIDTH, HIDDEN)[0]
    weights = [jnp.stack([w, -w]) for w in problem(rng, (3,), WIDTH, HIDDEN)[1:]]
    specs = (P("dp", "ep"), P("ep", "tp"), P("ep", "tp"), P("ep", None, "tp"))
    placed = place((x, *weights), [NamedSharding(on, s) for s in specs])

    def compiled(f):
        layer = jax.vmap(jax.vmap(f), (0, None, None, None))
        return jax.jit(training_step(layer)).lower(*placed).compile()

    ours, theirs = compiled(op()), compiled(plain)
    got = ours(*placed)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(theirs(*placed))], BOUND)
    assert collectives(ours.as_text()) == collectives(theirs.as_text())
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(2 * 3, WIDTH, HIDDEN // 2)}


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_one_x_for_weights_of_their_own(rng, fused_cpu, implementation):
    """vmap over weights alone is one wider call of each device's own columns: none travel."""
    on = mesh(dp=4, tp=2)
    x, *weights = problem(rng, (ROWS,), WIDTH, HIDDEN)
    arrays = (x, *(jnp.stack([w, 0.5 * w, -w]) for w in weights))
    specs = (P("dp"), P(None, "tp"), P(None, "tp"), P(None, None, "tp"))
    placed = place(arrays, [NamedSharding(on, s) for s in specs])
    f = jax.vmap(op("OI", implementation), (None, 0, 0, 0))
    step = jax.jit(training_step(f)).lower(*placed).compile()
    got = step(*placed)
    want = jax.jit(training_step(jax.vmap(plain, (None, 0, 0, 0))))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    assert {kind for kind, _ in collectives(step.as_text())} == {"all-reduce"}
    calls = {c.sizes for c in fused_cpu.take_calls(got) if c.stage == "gate_up"}
    wide = {(ROWS // 4, WIDTH, 3 * HIDDEN // 2)}
    assert calls == (wide if implementation == "fused" else set())


@pytest.mark.parametrize("implementation", [None, "fused"])
def test_a_route_may_decline_the_local_shape(rng, fused_cpu, implementation):
    fused_cpu.decline = lambda call: "too narrow" if call.i < HIDDEN else None
    arrays, on = _plan(rng, "dp x tp")
    f = jax.jit(training_step(op("OI", implementation)), in_shardings=tuple(on))
    if implementation == "fused":
        with pytest.raises(Exception, match=r"(?s)no fused kernel serves.*test: too narrow"):
            f(*arrays)
    else:
        got, want = f(*arrays), jax.jit(training_step(plain))(*arrays)
        check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
        assert fused_cpu.take_calls(got) == []


def test_where_no_share_could_fuse_xla_divides_its_own_form(rng, fused_cpu):
    """H divided over devices: XLA sums parts of products; a fused call would need x whole."""
    fused_cpu.decline = lambda call: "the library is missing"
    on = mesh(tp=4)
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    specs = [NamedSharding(on, s) for s in (P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp"))]
    placed = place(arrays, specs)

    def compiled(f):
        return jax.jit(f, out_shardings=specs[0]).lower(*placed).compile()

    ours, theirs = compiled(op("OI", None)), compiled(plain)
    assert collectives(ours.as_text()) == collectives(theirs.as_text())
    check([ours(*placed)], [float64(theirs(*placed))], BOUND)
    with pytest.raises(NotImplementedError, match="test: the library is missing"):
        jax.jit(op()).lower(*placed)


def test_a_kernel_for_a_share_alone_is_found(rng, fused_cpu):
    """As one that is tied to a hidden width: the whole call has none, each device's has."""
    fused_cpu.decline = lambda call: "too wide" if call.i > HIDDEN // 2 else None
    arrays, on = _plan(rng, "dp x tp")
    got = jax.jit(training_step(op()), in_shardings=tuple(on))(*arrays)
    want = jax.jit(training_step(plain))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {_local("dp x tp")}


def test_declines_that_no_shape_changes_are_raised_when_lowering(rng, fused_cpu):
    arrays, on = _plan(rng, "dp", dtype="float32")
    arrays = [a.astype(jnp.float8_e4m3fn) for a in arrays]
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        jax.jit(op(), in_shardings=tuple(on)).lower(*arrays)


SPECS = {
    "x divided along H": (P(None, "a"), P(), P(), P()),
    "weights divided along H": (P(), P(None, "a"), P(None, "a"), P("a")),
    "one axis for rows and columns": (P("a"), P("a"), P("a"), P(None, "a")),
    "each weight over an axis of its own": (P("a"), P("b"), P("c"), P(None, "b")),
    "gate alone": (P("a"), P("b"), P(), P()),
    "rows over two axes": (P(("b", "a")), P("c"), P("c"), P(None, "c")),
    "columns over two axes": (P("a"), P(("b", "c")), P(("c", "b")), P(None, ("b", "c"))),
    "everything along H": (P("a", "b"), P("c", "b"), P("c", "b"), P("b", "c")),
}


@pytest.mark.parametrize(
    "name, how", [*((name, "jitted") for name in SPECS), ("rows over two axes", "eager")]
)
def test_any_layout_gives_the_same_values(rng, fused_cpu, name, how):
    on = mesh(a=2, b=2, c=2)
    arrays = problem(rng, (16,), 16, 32)
    placed = place(arrays, [NamedSharding(on, s) for s in SPECS[name]])
    step = training_step(op())
    got = (jax.jit(step) if how == "jitted" else step)(*placed)
    want = training_step(plain)(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    assert {c.stage for c in fused_cpu.take_calls(got)} == {"gate_up", "down_dswiglu"}


@pytest.mark.parametrize("lead, spec", [((0,), P("a")), ((4, 0), P("a")), ((), P()), ((1,), P())])
def test_leading_dimensions_that_leave_little(rng, fused_cpu, lead, spec):
    """Empty batches, a single row, and none."""
    on = mesh(a=2, b=2)
    arrays = problem(rng, lead, WIDTH, HIDDEN)
    specs = (spec, P("b"), P("b"), P(None, "b"))
    placed = place(arrays, [NamedSharding(on, s) for s in specs])

    def gradients(f):
        return jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2, 3)))

    got = gradients(op("OI", None if 0 in lead else "fused"))(*placed)
    check(got, [float64(a) for a in gradients(plain)(*arrays)], BOUND)


def test_a_mesh_of_some_devices_in_another_order(rng, fused_cpu):
    d = jax.devices("cpu")
    on = jax.sharding.Mesh(np.array([[d[7], d[2]], [d[5], d[0]]]), ("dp", "tp"))
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    specs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))
    got = jax.jit(training_step(op()))(*place(arrays, [NamedSharding(on, s) for s in specs]))
    want = jax.jit(training_step(plain))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(ROWS // 2, WIDTH, HIDDEN // 2)}


def test_replicated_on_a_mesh(rng, fused_cpu):
    on = mesh(dp=8)
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    placed = place(arrays, [NamedSharding(on, P())] * 4)
    got, want = jax.jit(training_step(op()))(*placed), jax.jit(training_step(plain))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(ROWS, WIDTH, HIDDEN)}


def test_a_mesh_in_context(rng, fused_cpu):
    """The partitioner's callback runs while the user's mesh is in force; it must not see it."""
    on = mesh(dp=4, tp=2)
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    with jax.set_mesh(on):
        f = jax.jit(op(), in_shardings=(P("dp"), P("tp"), P("tp"), P(None, "tp")))
        got = f(*arrays)
    check([got], [float64(plain(*arrays))], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(ROWS // 4, WIDTH, HIDDEN // 2)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(rng, fused_cpu, dtype):
    arrays, on = _plan(rng, "dp x tp", dtype=dtype)
    got = jax.jit(op(), in_shardings=tuple(on))(*arrays)
    wide = [a.astype(jnp.float32) for a in arrays]
    check([got], [float64(plain(*wide))], 1.5 * BOUNDS[dtype])


def test_kernels_that_write_more_than_asked_and_use_scratch(rng, fused_cpu):
    fused_cpu.superset, fused_cpu.scratch_bytes = True, 64
    arrays, on = _plan(rng, "dp x tp")
    got = jax.jit(op(), in_shardings=tuple(on))(*arrays)
    check([got], [float64(plain(*arrays))], BOUND)
    assert {c.outputs for c in fused_cpu.take_calls(got)} == {("h", "gate", "up")}


def test_xla_forced_leaves_its_own_form_to_xla(rng, fused_cpu):
    arrays, on = _plan(rng, "dp x tp")
    text = jax.jit(op("OI", "xla"), in_shardings=tuple(on)).lower(*arrays).as_text()
    assert "_partitioned" not in text


def test_a_cuda_lowering_holds_the_calls_and_all_that_the_choice_depends_on(rng, fused_cpu):
    arrays, on = _plan(rng, "dp x tp", dtype="bfloat16")
    step = jax.jit(training_step(op("OI", None)), in_shardings=tuple(on))
    text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r'@swiglu_jax_(\w+)_partitioned\(.*backend_config = "(.*?)", sdy', text)
    assert [name for name, _ in calls] == ["gate_up", "down_dswiglu"]
    for _, message in calls:
        said = json.loads(message.replace("\\22", '"'))
        assert said["platform"] == "cuda"
        assert "sm_90a" in said["for"]
    assert "need_replication" in text
    assert "stablehlo.transpose" not in text


def test_pmap(rng, fused_cpu):
    arrays = problem(rng, (4, 8), WIDTH, HIDDEN)
    got = jax.pmap(op(), in_axes=(0, None, None, None))(*arrays)
    check([got], [float64(plain(*arrays))], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(8, WIDTH, HIDDEN)}


def test_without_shardy_xla_divides_its_own_form_and_fused_says_why(rng, fused_cpu):
    arrays, on = _plan(rng, "dp x tp")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        got = jax.jit(op("OI", None), in_shardings=tuple(on))(*arrays)
        with pytest.raises(NotImplementedError, match="Shardy partitioner, which is off"):
            jax.jit(op(), in_shardings=tuple(on)).lower(*arrays)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    check([got], [float64(plain(*arrays))], BOUND)
    assert fused_cpu.take_calls(got) == []


NAMES = ("swiglu_gate", "swiglu_up", "swiglu_h")


@pytest.mark.parametrize("wrt", [(0, 1, 2, 3), (0,), (1,), (2,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("kept", [None, (), *((name,) for name in NAMES), NAMES[:2]], ids=str)
def test_a_share_that_xla_serves(rng, fused_cpu, kept, wrt):
    """A kernel is there but was never timed, so each device's share runs XLA's form: one that does
    not read every operand, too, as remat asks for up or h alone."""
    arrays, on = _plan(rng, "dp")
    placed = place(arrays, on)

    def gradients(f):
        if kept is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            f = jax.checkpoint(f, policy=policy)
        return jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), wrt))

    got = gradients(swiglu_mlp)(*placed)
    want = gradients(plain)(*arrays)
    check(got, [float64(a) for a in want], BOUND)


@pytest.mark.parametrize(
    "stage", [*STAGES.values(), *GRADIENT_STAGES.values()], ids=lambda s: s.name
)
def test_a_shares_program_takes_every_operand(stage):
    """The partitioner passes them all, whichever the outputs need."""
    sizes = {"l": 16, "h": 8, "i": 24}
    for count in range(1, len(stage.outputs) + 1):
        for outputs in itertools.combinations(stage.outputs, count):
            params = StageParams(outputs, "OI", implementation="xla")
            avals = [
                jax.ShapeDtypeStruct(tuple(sizes[k] for k in letters), jnp.float32)
                for letters in stage.operand_letters(params)
            ]
            module = _partitioning._local_module(stage, avals, params, "cpu")
            with mlir.make_ir_context():
                text = str(mlir.ir.Module.parse(module))
            (main,) = re.findall(r"func.func public @main\((.*?)\) ->", text)
            assert main.count("tensor<") == len(avals), outputs

"""Meshes with explicit axes: shardings in types, of results and of every gradient."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh, op, place
from support import ARGUMENTS, BOUNDS, LAYOUTS, check, float64, plain, problem

pytestmark = pytest.mark.usefixtures("on_cpu")

ROWS, WIDTH, HIDDEN = 8, 16, 32
BOUND = 20 * BOUNDS["float32"]
PLANS = {
    "dp": ({"dp": 4}, (P("dp"), P(), P(), P())),
    "tp": ({"tp": 4}, (P(), P("tp"), P("tp"), P(None, "tp"))),
    "dp x tp": ({"dp": 2, "tp": 2}, (P("dp"), P("tp"), P("tp"), P(None, "tp"))),
    "batch and sequence": ({"dp": 2, "sp": 2}, (P("dp", "sp"), P(), P(), P())),
}


def _placed(rng, plan, layout):
    axes, specs = PLANS[plan]
    on = mesh(AxisType.Explicit, **axes)
    lead = (ROWS, 4) if "sp" in axes else (ROWS,)
    arrays = problem(rng, lead, WIDTH, HIDDEN, layout=layout)
    if layout == "IO":
        specs = (specs[0], *(P(*reversed((*s, None, None)[:2])) for s in specs[1:]))
    return on, arrays, place(arrays, [NamedSharding(on, s) for s in specs])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_step(rng, implementation, plan, layout):
    on, arrays, placed = _placed(rng, plan, layout)
    with jax.set_mesh(on):

        def loss(*a):
            y = op(layout, implementation)(*a)
            assert jax.typeof(y).sharding.spec == jax.typeof(a[0]).sharding.spec
            return (y**2).mean()

        got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*placed)
        for gradient, argument in zip(got, placed, strict=True):
            assert jax.typeof(gradient).sharding == jax.typeof(argument).sharding
    want = jax.grad(lambda *a: (plain(*a, layout) ** 2).mean(), (0, 1, 2, 3))(*arrays)
    check(got, [float64(a) for a in want], BOUND)


@pytest.mark.parametrize(
    "plan, share",
    {
        "dp": (ROWS // 4, WIDTH, HIDDEN),
        "tp": (ROWS, WIDTH, HIDDEN // 4),
        "dp x tp": (ROWS // 2, WIDTH, HIDDEN // 2),
    }.items(),
)
def test_the_call_sees_one_device_s_share(rng, fused_cpu, plan, share):
    on, _, placed = _placed(rng, plan, "OI")
    with jax.set_mesh(on):
        y = jax.jit(op())(*placed)
    assert {c.sizes for c in fused_cpu.take_calls(y)} == {share}


def test_eager(rng, implementation):
    on, arrays, placed = _placed(rng, "dp", "OI")
    with jax.set_mesh(on):
        got = jax.grad(lambda *a: (op("OI", implementation)(*a) ** 2).mean(), (0, 3))(*placed)
    want = jax.grad(lambda *a: (plain(*a) ** 2).mean(), (0, 3))(*arrays)
    check(got, [float64(a) for a in want], BOUND)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_argument_alone(rng, name):
    k = ARGUMENTS.index(name)
    on, arrays, placed = _placed(rng, "dp x tp", "OI")
    with jax.set_mesh(on):
        got = jax.jit(jax.grad(lambda *a: (op("OI", "xla")(*a) ** 2).mean(), k))(*placed)
    want = jax.grad(lambda *a: (plain(*a) ** 2).mean(), k)(*arrays)
    check([got], [float64(want)], BOUND)


def test_the_sum_over_devices_is_laid_out_like_x(rng):
    """Tensor parallelism divides I, which the down projection contracts.

    Plain JAX refuses to guess how the result is to be laid out; here it is x's layout.
    """
    on, arrays, placed = _placed(rng, "tp", "OI")
    with jax.set_mesh(on):
        got = jax.jit(op("OI", "xla"))(*placed)
        with pytest.raises(Exception, match=r"[Cc]ontracting dim"):
            jax.jit(plain)(*placed)
    check([got], [float64(plain(*arrays))], BOUND)


def test_automatic_axes_inside_an_explicit_mesh(rng, fused_cpu):
    """The MLP left to the partitioner by ``jax.sharding.auto_axes``."""
    on = mesh(AxisType.Explicit, dp=2, tp=2)
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    specs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))
    placed = place(arrays, [NamedSharding(on, s) for s in specs])
    with jax.set_mesh(on):
        f = jax.sharding.auto_axes(op(), out_sharding=NamedSharding(on, P("dp")))
        loss = jax.jit(jax.grad(lambda *a: (f(*a) ** 2).mean(), (0, 1, 2, 3)))
        got = loss(*placed)
    want = jax.grad(lambda *a: (plain(*a) ** 2).mean(), (0, 1, 2, 3))(*arrays)
    check(got, [float64(a) for a in want], BOUND)
    assert {c.sizes for c in fused_cpu.take_calls(got)} == {(ROWS // 2, WIDTH, HIDDEN // 2)}


def test_checkpointed_and_scanned(rng, implementation):
    on, arrays, placed = _placed(rng, "dp x tp", "OI")
    layer = jax.checkpoint(lambda f, *a: a[0] + f(*a), static_argnums=0)

    def loss(f):
        def run(x, *w):
            y = jax.lax.scan(lambda x, _: (layer(f, x, *w), None), x, length=2)[0]
            return jnp.mean(y**2)

        return jax.jit(jax.grad(run, (0, 1, 2, 3)))

    with jax.set_mesh(on):
        got = loss(op("OI", implementation))(*placed)
    check(got, [float64(a) for a in loss(plain)(*arrays)], BOUND)


VMAPS = {
    # axes of x, w_gate, w_up, w_down that are mapped; the mesh axis that divides the mapped one
    "x": ((0, None, None, None), None),
    "x divided": ((0, None, None, None), "ep"),
    "weights": ((None, 0, 0, 0), None),
    "experts": ((0, 0, 0, 0), None),
    "experts divided": ((0, 0, 0, 0), "ep"),
}


@pytest.mark.parametrize("in_axes, divided", VMAPS.values(), ids=VMAPS.keys())
def test_vmap(rng, implementation, in_axes, divided):
    on = mesh(AxisType.Explicit, ep=2, dp=2, tp=2)
    one = problem(rng, (ROWS,), WIDTH, HIDDEN)
    mapped = [axis is not None for axis in in_axes]
    arrays = [jnp.stack([a, 0.5 * a]) if m else a for a, m in zip(one, mapped, strict=True)]
    specs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))
    specs = [P(divided, *s) if m else s for s, m in zip(specs, mapped, strict=True)]
    placed = place(arrays, [NamedSharding(on, s) for s in specs])

    def gradients(f):
        return jax.jit(jax.grad(lambda *a: (jax.vmap(f, in_axes)(*a) ** 2).mean(), (0, 1, 2, 3)))

    with jax.set_mesh(on):
        got = gradients(op("OI", implementation))(*placed)
    check(got, [float64(a) for a in gradients(plain)(*arrays)], BOUND)


@pytest.mark.parametrize("plan", ["dp", "tp", "dp x tp"])
@pytest.mark.parametrize("mode", ["reverse", "forward"], ids=lambda m: f"{m} over reverse")
def test_second_derivatives(rng, implementation, mode, plan):
    on, arrays, placed = _placed(rng, plan, "OI")

    def second(f):
        first = jax.grad(lambda *a: (f(*a) ** 2).mean(), (0, 1, 2, 3))
        if mode == "forward":
            return jax.jit(lambda *a: jax.jvp(first, a, a)[1])
        return jax.jit(jax.grad(lambda *a: sum((g**2).sum() for g in first(*a)), (0, 1, 2, 3)))

    with jax.set_mesh(on):
        got = second(op("OI", implementation))(*placed)
    check(got, [float64(a) for a in second(plain)(*arrays)], 3 * BOUND)


@pytest.mark.parametrize("kinds", ["explicit, automatic", "automatic, explicit"])
def test_meshes_of_both_kinds_of_axes(rng, implementation, kinds):
    types = [AxisType.Explicit if k == "explicit" else AxisType.Auto for k in kinds.split(", ")]
    on = jax.make_mesh((2, 2), ("dp", "tp"), tuple(types), devices=jax.devices("cpu")[:4])
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    specs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))
    placed = place(arrays, [NamedSharding(on, s) for s in specs])

    def gradients(f):
        return jax.jit(jax.grad(lambda *a: (f(*a) ** 2).mean(), (0, 1, 2, 3)))

    with jax.set_mesh(on):
        got = gradients(op("OI", implementation))(*placed)
    check(got, [float64(a) for a in gradients(plain)(*arrays)], BOUND)

"""jax.export: fixed and symbolic shapes, for CUDA from a CPU machine, for several devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh, op, training_step
from support import BOUNDS, LAYOUTS, check, float64, plain, problem

from swiglu_jax import _device

pytestmark = pytest.mark.usefixtures("on_cpu")

ROWS, WIDTH, HIDDEN = 8, 16, 32
BOUND = 20 * BOUNDS["float32"]
CALLS = [
    export.DisabledSafetyCheck.custom_call(name)
    for stage in ("gate_up", "down_dswiglu")
    for name in (f"swiglu_jax_test_{stage}", f"swiglu_jax_{stage}_partitioned")
]


def _round_trip(exported):
    return export.deserialize(exported.serialize(vjp_order=0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fixed_shapes(rng, implementation, layout):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN, layout=layout)
    step = training_step(op(layout, implementation))
    exported = export.export(jax.jit(step), disabled_checks=CALLS)(*arrays)
    got = _round_trip(exported).call(*arrays)
    want = training_step(lambda *a: plain(*a, layout))(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


@pytest.mark.parametrize("dimensions", ["b, s", "b, 4", "b, s, i"])
def test_symbolic_shapes(rng, implementation, dimensions):
    """One program for every batch, sequence length and, last, hidden width."""
    names = export.symbolic_shape(dimensions)
    hidden = names[2] if len(names) == 3 else HIDDEN
    shapes = ((*names[:2], WIDTH), (hidden, WIDTH), (hidden, WIDTH), (WIDTH, hidden))
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    step = training_step(op("OI", implementation))
    exported = _round_trip(export.export(jax.jit(step), disabled_checks=CALLS)(*avals))
    for b in (1, 3):
        arrays = problem(rng, (b, 4), WIDTH, HIDDEN)
        got, want = exported.call(*arrays), training_step(plain)(*arrays)
        check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


def test_a_route_is_asked_about_symbolic_shapes(fused_cpu):
    (b,) = export.symbolic_shape("b")
    shapes = ((b, WIDTH), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    export.export(jax.jit(op()), disabled_checks=CALLS)(*avals)
    assert {(c.m, c.h, c.i) for c in fused_cpu.asked} == {(None, WIDTH, HIDDEN)}


def test_gradient_of_an_exported_function(rng, implementation):
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    exported = export.export(jax.jit(op("OI", implementation)), disabled_checks=CALLS)(*arrays)
    served = export.deserialize(exported.serialize(vjp_order=1)).call
    got = jax.grad(lambda *a: (served(*a) ** 2).mean(), (0, 1, 2, 3))(*arrays)
    want = jax.grad(lambda *a: (plain(*a) ** 2).mean(), (0, 1, 2, 3))(*arrays)
    check(got, [float64(a) for a in want], BOUND)


def test_cpu_and_cuda_in_one_program(rng, monkeypatch):
    """Through XLA on both, where the exporting machine knows of no GPU."""
    config = dataclasses.replace(_device.config, target=None)
    monkeypatch.setattr(_device, "config", config)
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    step = jax.jit(training_step(op("OI", None)))
    exported = _round_trip(export.export(step, platforms=("cpu", "cuda"))(*arrays))
    assert exported.platforms == ("cpu", "cuda")
    got, want = exported.call(*arrays), training_step(plain)(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)


def test_cuda_from_a_machine_without_a_gpu(fused_cuda):
    avals = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((ROWS, WIDTH), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    ]
    exported = _round_trip(
        export.export(jax.jit(training_step(op())), platforms=("cuda",), disabled_checks=CALLS)(
            *avals
        )
    )
    assert exported.platforms == ("cuda",)
    text = exported.mlir_module()
    assert re.findall(r"custom_call @swiglu_jax_test_(\w+)", text) == ["gate_up", "down_dswiglu"]


def test_unlisted_custom_calls_are_refused(rng, fused_cpu):
    """JAX's rule: who exports a custom call says so."""
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    with pytest.raises(ValueError, match="swiglu_jax_test_gate_up"):
        export.export(jax.jit(op()))(*arrays)


def test_several_devices(rng, fused_cpu):
    """The importing process partitions: the calls that run are at its own local shapes."""
    on = mesh(dp=4, tp=2)
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    specs = [NamedSharding(on, s) for s in (P("dp"), P("tp"), P("tp"), P(None, "tp"))]
    step = jax.jit(training_step(op()), in_shardings=tuple(specs))
    exported = _round_trip(export.export(step, disabled_checks=CALLS)(*arrays))
    assert exported.nr_devices == 8
    fused_cpu.take_calls()
    call = jax.jit(exported.call, in_shardings=tuple(specs))
    got, want = call(*arrays), training_step(plain)(*arrays)
    check(jax.tree.leaves(got), [float64(a) for a in jax.tree.leaves(want)], BOUND)
    sizes = {c.sizes for c in fused_cpu.take_calls(got)}
    assert sizes == {(ROWS // 4, WIDTH, HIDDEN // 2)}
    text = call.lower(*arrays).compile().as_text()
    assert not any(kind == "all-gather" for kind, _ in collectives(text))


def test_several_gpus_from_a_machine_that_knows_of_none(monkeypatch):
    """Through XLA, as on one device: the program needs neither this package nor a safety check."""
    monkeypatch.setattr(_device, "config", dataclasses.replace(_device.config, target=None))
    monkeypatch.setattr(_device, "local_gpu_target", lambda: None)
    specs = tuple(NamedSharding(mesh(dp=4), s) for s in (P("dp"), P(), P(), P()))
    avals = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((ROWS, WIDTH), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    ]
    step = jax.jit(training_step(op("OI", None)), in_shardings=specs)
    text = export.export(step, platforms=("cuda",))(*avals).mlir_module()
    assert "custom_call @swiglu_jax" not in text
    with pytest.raises(NotImplementedError, match="set SWIGLU_JAX_TARGET"):
        export.export(jax.jit(op(), in_shardings=specs), platforms=("cuda",))(*avals)


def test_symbolic_shapes_on_several_devices_take_xla_and_fused_says_why(rng, fused_cpu):
    on = mesh(dp=4)
    (b,) = export.symbolic_shape("4*b")
    shapes = ((b, WIDTH), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    specs = tuple(NamedSharding(on, s) for s in (P("dp"), P(), P(), P()))
    exported = export.export(jax.jit(op("OI", None), in_shardings=specs))(*avals)
    arrays = problem(rng, (ROWS,), WIDTH, HIDDEN)
    got = jax.jit(exported.call, in_shardings=specs)(*arrays)
    check([got], [float64(plain(*arrays))], BOUND)
    with pytest.raises(NotImplementedError, match="static shapes only"):
        export.export(jax.jit(op(), in_shardings=specs))(*avals)

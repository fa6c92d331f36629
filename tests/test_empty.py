"""Calls without work (an empty last batch): served, whatever implementation asks, by no kernel."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import mesh, op
from support import LAYOUTS, SUBSETS, float64, plain, problem, value_and_gradients

from swiglu_jax import _device, _routes, explain
from swiglu_jax._candidate import StageCall
from swiglu_jax.kernels._variant import STAGE_OUTPUTS

pytestmark = pytest.mark.usefixtures("on_cpu")

EMPTY = {
    "M": {"lead": (0,)},
    "M of rank 3": {"lead": (4, 0)},
    "H": {"lead": (6,), "width": 0},
    "I": {"lead": (6,), "hidden": 0},
    "M and I": {"lead": (0,), "hidden": 0},
}


def _gradients(f):
    return lambda *a: value_and_gradients(f, a, jnp.ones(a[0].shape, a[0].dtype))


@pytest.mark.parametrize("how", ["eager", "jitted"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_results_are_plain_jax_s_and_no_kernel_is_called(
    rng, fused_cpu, implementation, sizes, layout, how
):
    arrays = problem(rng, layout=layout, **sizes)
    step = _gradients(op(layout, implementation))
    got = (jax.jit(step) if how == "jitted" else step)(*arrays)
    want = _gradients(lambda *a: plain(*a, layout))(*arrays)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(float64(a), float64(b))
    assert fused_cpu.take_calls(got) == []


@pytest.mark.parametrize("subset", SUBSETS[1:], ids="+".join)
def test_every_set_of_differentiated_arguments(rng, fused_cpu, subset):
    names = ("x", "w_gate", "w_up", "w_down")
    fixed = dict(zip(names, problem(rng, (0,)), strict=True))

    def loss(chosen):
        return op()(*(fixed | chosen).values()).sum()

    got = jax.jit(jax.grad(loss))({name: fixed[name] for name in subset})
    for name in subset:
        assert got[name].shape == fixed[name].shape
        assert not jnp.any(got[name])
    assert fused_cpu.take_calls(got) == []


@pytest.mark.parametrize("mapped", [(0, None, None, None), (0, 0, 0, 0), (None, 0, 0, 0)], ids=str)
def test_under_vmap(rng, fused_cpu, mapped):
    arrays = [
        a if axis is None else jnp.stack([a] * 3)
        for a, axis in zip(problem(rng, (0,)), mapped, strict=True)
    ]
    got = jax.vmap(op(), mapped)(*arrays)
    assert got.shape == (3, 0, arrays[0].shape[-1])
    assert fused_cpu.take_calls(got) == []


@pytest.mark.parametrize("how", ["eager", "jitted"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_device_s_share_of_a_shard_map(rng, fused_cpu, check_vma, how):
    specs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))
    local = jax.shard_map(
        lambda *a: jax.lax.psum(op()(*a), "tp"),
        mesh=mesh(dp=2, tp=2), in_specs=specs, out_specs=P("dp"), check_vma=check_vma,
    )  # fmt: skip
    arrays = problem(rng, (0,))
    step = jax.grad(lambda *a: local(*a).sum(), (0, 1, 2, 3))
    got = (jax.jit(step) if how == "jitted" else step)(*arrays)
    for g, a in zip(got, arrays, strict=True):
        assert g.shape == a.shape
        assert not jnp.any(g)
    assert fused_cpu.take_calls(got) == []


def _avals(dtype, lead=(0,), width=256, hidden=512):
    shapes = ((*lead, width), (hidden, width), (hidden, width), (width, hidden))
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


@pytest.mark.parametrize("target", [None, "sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [{}, {"lead": (7,), "width": 0}, {"lead": (7,), "hidden": 0}])
def test_programs_for_a_gpu_hold_no_kernel(monkeypatch, target, dtype, sizes):
    """With every route as it is, "fused" asked, and no GPU known or one that has no kernels."""
    config = dataclasses.replace(_device.config, target=target)
    monkeypatch.setattr(_device, "config", config)
    if target is None:
        monkeypatch.setattr(_device, "local_gpu_target", lambda: None)
    step = jax.jit(_gradients(op()))
    lowered = step.trace(*_avals(dtype, **sizes)).lower(lowering_platforms=("cuda",))
    assert not re.findall(r"custom_call @(swiglu_jax_\w+)", lowered.as_text())


def test_a_symbolic_m_is_not_empty(fused_cpu):
    """It is whatever the call brings; JAX itself has a symbolic size be 1 or more."""
    (rows,) = jax.export.symbolic_shape("rows")
    avals = _avals(jnp.float32, (rows,), 16, 32)
    exported = jax.export.export(
        jax.jit(op()),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("swiglu_jax_test_gate_up")],
    )(*avals)
    assert "swiglu_jax_test_gate_up" in exported.mlir_module()
    assert {call.m for call in fused_cpu.asked} == {None}


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("implementation", [None, "fused"])
@pytest.mark.parametrize(("sizes", "said"), [({}, "M=0"), ({"lead": (7,), "hidden": 0}, "I=0")])
def test_explain_says_so(target, implementation, sizes, said):
    e = explain(*_avals(jnp.bfloat16, **sizes), implementation=implementation, target=target)
    for stage in (e.forward, e.backward, *e.gradients.values()):
        assert stage.route == "xla"
        assert stage.kernel == "no kernel: there is nothing to compute"
        assert set(stage.declined.values()) == {f"nothing to compute: {said}"}
    assert sum(r.bytes or 0 for r in e.residuals if 0 in r.shape) == 0
    assert "there is nothing to compute" in str(e)


def test_no_route_offers_a_kernel_for_it():
    for stage, outputs in STAGE_OUTPUTS.items():
        full = StageCall(stage, outputs, "OI", "bfloat16", m=256, h=256, i=512)
        for size in "mhi":
            for target in ("sm_90a", "sm_100a", "sm_80"):
                empty = dataclasses.replace(full, **{size: 0})
                found, declined = _routes.candidates(empty, target)
                assert not found
                assert {why.reason for why in declined.values()} == {
                    f"nothing to compute: {size.upper()}=0"
                }

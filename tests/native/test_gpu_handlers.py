"""The cudnn route on a GPU: what the handlers compute, and how their failures look."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiglu_jax import _cudnn
from swiglu_jax._candidate import StageCall

sys.path.append(str(Path(__file__).parent))
import gpu

pytestmark = pytest.mark.gpu

LEAD = (3, 65)  # rows that fill no tile
M, H, I = 195, 256, 328  # noqa: E741
GATE_UP = "swiglu_jax_cudnn_gate_up"
DOWN = "swiglu_jax_cudnn_down_dswiglu"
TWO_STEP = "swiglu_jax_cudnn_down_dswiglu_two_step"


def stage_call(target: str, mask: int, layout: str = "OI", dtype: str = "bfloat16") -> StageCall:
    stage = gpu.TARGETS[target]
    return StageCall(stage, gpu.names(stage, mask), layout, dtype, M, H, I)


@pytest.mark.parametrize("layout", ["OI", "IO"])
@pytest.mark.parametrize(
    ("target", "mask"), [(t, mask) for t in (GATE_UP, DOWN) for mask in gpu.SETS[gpu.TARGETS[t]]]
)
def test_every_output_set(rng: np.random.Generator, target: str, mask: int, layout: str) -> None:
    call = stage_call(target, mask, layout)
    arrays = gpu.operands(rng, call, LEAD)
    run = jax.jit(gpu.handler(target, call, LEAD, gpu.first_plan(target, call)))
    gpu.check(call, arrays, run(*arrays))


@pytest.mark.parametrize("mask", [2, 3, 7])
@pytest.mark.parametrize("layout", ["OI", "IO"])
def test_the_two_step_form(rng: np.random.Generator, layout: str, mask: int) -> None:
    call = stage_call(TWO_STEP, mask, layout)
    arrays = gpu.operands(rng, call, LEAD)
    run = jax.jit(gpu.handler(TWO_STEP, call, LEAD, gpu.first_plan(TWO_STEP, call)))
    gpu.check(call, arrays, run(*arrays))


@pytest.mark.parametrize("layout", ["OI", "IO"])
@pytest.mark.parametrize("target", [GATE_UP, DOWN, TWO_STEP])
def test_float16(rng: np.random.Generator, target: str, layout: str) -> None:
    call = stage_call(target, 7, layout, "float16")
    arrays = gpu.operands(rng, call, LEAD)
    run = jax.jit(gpu.handler(target, call, LEAD, gpu.first_plan(target, call)))
    gpu.check(call, arrays, run(*arrays))


@pytest.mark.parametrize("lead", [(), (1,), (2, 2, 2)])
def test_any_rank(rng: np.random.Generator, lead: tuple[int, ...]) -> None:
    call = StageCall("gate_up", ("h", "gate", "up"), "OI", "bfloat16", int(np.prod(lead)), H, I)
    arrays = gpu.operands(rng, call, lead)
    run = jax.jit(gpu.handler(GATE_UP, call, lead, gpu.first_plan(GATE_UP, call)))
    gpu.check(call, arrays, run(*arrays))


@pytest.mark.parametrize("graph", ["gate_up", "down_dswiglu"])
def test_every_plan_that_tuning_may_choose(rng: np.random.Generator, graph: str) -> None:
    target = f"swiglu_jax_cudnn_{graph}"
    call = stage_call(target, 7)
    arrays = gpu.operands(rng, call, LEAD)
    tuned = _cudnn.tune(graph, call)
    ran = [t for t in tuned["trials"] if t["us"] > 0 and "wrong" not in t["passed_over"]]
    assert len(ran) > 1
    assert tuned["us"] == min(t["us"] for t in ran if not t["passed_over"])
    for trial in ran:
        run = jax.jit(gpu.handler(target, call, LEAD, trial["plan"]))
        gpu.check(call, arrays, run(*arrays))


def test_a_call_larger_than_the_free_memory_is_timed_with_fewer_rows() -> None:
    """Rows of 2480 bytes, two and a half terabytes of them, and no limit on the scratch."""
    call = replace(stage_call(GATE_UP, 7), m=1 << 30)
    tuned = _cudnn.tune("gate_up", call, plans=1, memory=1 << 50)
    assert 1 <= tuned["rows"] < call.m
    assert tuned["us"] > 0


def test_gate_and_up_are_rounded_before_the_activation(rng: np.random.Generator) -> None:
    """h is what the rounded gate and up give, not what their float32 sums would."""
    call = stage_call(GATE_UP, 7)
    arrays = gpu.operands(rng, call, LEAD)
    run = jax.jit(gpu.handler(GATE_UP, call, LEAD, gpu.first_plan(GATE_UP, call)))
    h, gate, up = (a.astype(jnp.float32) for a in run(*arrays))
    from_rounded = (gate * jax.nn.sigmoid(gate) * up).astype(jnp.bfloat16).astype(jnp.float32)
    # The same to an ulp or so: cuDNN's sigmoid is not XLA's.
    assert float(jnp.mean(h == from_rounded)) > 0.97


@pytest.mark.parametrize("target", [DOWN, TWO_STEP])
def test_finite_for_any_finite_gate(rng: np.random.Generator, target: str) -> None:
    call = stage_call(target, 7)
    dy, w_down, gate, up = gpu.operands(rng, call, LEAD)
    extreme = jnp.asarray([3.38e38, -3.38e38, 1e30, -1e30, 88.5, -88.5, -100.0, 0.0], gate.dtype)
    gate = jnp.tile(extreme, (*LEAD, I // extreme.size))
    up = up * jnp.asarray(1e-3, up.dtype)
    run = jax.jit(gpu.handler(target, call, LEAD, gpu.first_plan(target, call)))
    for name, got in zip(call.outputs, run(dy, w_down, gate, up), strict=True):
        # dup and h grow with a positive gate; dgate never does.
        limited = got if name == "dgate" else got[..., gate[0, 0] < 1e29]
        assert bool(jnp.isfinite(limited.astype(jnp.float32)).all()), name


def test_no_plan_named_means_the_fastest(rng: np.random.Generator) -> None:
    call = stage_call(GATE_UP, 1)
    arrays = gpu.operands(rng, call, LEAD)
    gpu.check(call, arrays, jax.jit(gpu.handler(GATE_UP, call, LEAD))(*arrays))
    pool = gpu.pool("gate_up", call, "")
    assert pool["pairs"] == 1
    assert pool["plan"].startswith("e")


def test_a_plan_that_cannot_be_built_is_an_error_with_cudnns_reason(
    rng: np.random.Generator,
) -> None:
    call = stage_call(GATE_UP, 1)
    arrays = gpu.operands(rng, call, LEAD)
    with pytest.raises(Exception, match="cudnn route: cuDNN: "):
        jax.block_until_ready(jax.jit(gpu.handler(GATE_UP, call, LEAD, "e4000;12=1"))(*arrays))


@pytest.mark.parametrize("mask", [2, 3, 5])
def test_refine_names_plans_that_are_right(rng: np.random.Generator, mask: int) -> None:
    asked = stage_call(DOWN, mask)
    for candidate in _cudnn.candidates(asked, "sm_90a"):
        call = replace(asked, outputs=candidate.outputs)
        assert set(asked.outputs) <= set(call.outputs)
        arrays = gpu.operands(rng, call, LEAD)
        refined = _cudnn.refine(candidate, asked)
        plan = dict(refined.attributes)["plan"]
        assert isinstance(plan, str) and plan
        run = jax.jit(gpu.handler(candidate.ffi_target, call, LEAD, plan))
        gpu.check(call, arrays, run(*arrays))

"""Programs for several GPUs, partitioned by XLA on a machine without one.

Lowered for CUDA through the package's own routes and compiled for virtual CPU devices, where each
fused call's name stands for a handler that is never run: XLA's partitioner is the same. What is
read is the program of one device: which fused calls, on which local shapes, which collectives.
"""

import dataclasses
import re

import cpu_fused
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import PLANS, collectives, mesh, op, shardings, training_step
from support import LAYOUTS, plain

from swiglu_jax import _device, _native, _routes

pytestmark = pytest.mark.usefixtures("on_cpu", "names_stand_for_handlers")

ROWS, WIDTH, HIDDEN = 2048, 256, 512


@pytest.fixture(scope="module")
def names_stand_for_handlers():
    handler = jax.ffi.pycapsule(cpu_fused.library().test_gate_up)
    for name in _native.FFI_TARGETS:
        jax.ffi.register_ffi_target(name, handler, platform="cpu")


@pytest.fixture(params=["sm_90a", "sm_100a"])
def target(request, monkeypatch):
    config = dataclasses.replace(_device.config, target=request.param)
    monkeypatch.setattr(_device, "config", config)
    yield request.param
    jax.clear_caches()


def _shapes(layout="OI", lead=(ROWS,), stacked=()):
    first, second = (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    if layout == "IO":
        first, second = second, first
    weights = [(*stacked, *s) for s in (first, first, second)]
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((*lead, WIDTH), *weights)]


def _program(f, shapes, specs, out=None) -> str:
    """What one device runs."""
    options = {} if out is None else {"out_shardings": out}
    step = jax.jit(f, in_shardings=tuple(specs), **options)
    return step.trace(*shapes).lower(lowering_platforms=("cuda",)).compile().as_text()


def _calls(text: str) -> list[tuple[str, str]]:
    """Stage and shape of the first result of each fused call."""
    return sorted(
        (stage, shape)
        for shape, stage in re.findall(
            r"= \(?(\w+\[[\d,]*\]).*custom_call_target=\"swiglu_jax_(?:cudnn|exported)_"
            r"(gate_up|down_dswiglu)",
            text,
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_step(target, plan, layout):
    axes = PLANS[plan][0]
    on = shardings(plan, mesh(**axes), layout)
    out = (NamedSharding(on[0].mesh, P()), tuple(on))
    shapes = _shapes(layout)
    ours = _program(training_step(op(layout)), shapes, on, out)
    theirs = _program(training_step(lambda *a: plain(*a, layout)), shapes, on, out)
    local = f"bf16[{ROWS // axes.get('dp', 1)},{HIDDEN // axes.get('tp', 1)}]"
    assert _calls(ours) == [("down_dswiglu", local), ("gate_up", local)]
    assert _kinds(ours) == _kinds(theirs)
    assert "_partitioned" not in ours


def _logged(monkeypatch, caplog, step, shapes, **options) -> list[str]:
    """What SWIGLU_JAX_LOG=1 says of a program's lowering for CUDA."""
    monkeypatch.setattr(_routes, "config", dataclasses.replace(_routes.config, log=True))
    jax.jit(step, **options).trace(*shapes).lower(lowering_platforms=("cuda",))
    return [record.getMessage() for record in caplog.records]


def test_products_that_xla_divides_are_logged(target, monkeypatch, caplog):
    on = tuple(shardings("dp", mesh(**PLANS["dp"][0]), "OI"))
    lines = _logged(monkeypatch, caplog, training_step(op()), _shapes(), in_shardings=on)
    for stage in ("input_gradient", "weight_gradients"):
        (line,) = (line for line in lines if line.startswith(stage))
        assert f"on {target}: xla" in line
        assert "for several devices XLA divides these products" in line


def test_products_of_weights_of_their_own_are_logged(target, monkeypatch, caplog):
    shapes = _shapes(lead=(2, ROWS), stacked=(2,))
    lines = _logged(monkeypatch, caplog, training_step(jax.vmap(op())), shapes)
    (line,) = (line for line in lines if line.startswith("weight_gradients"))
    assert "a batched GEMM, not a loop of kernels" in line


def _kinds(text: str) -> dict[tuple[str, str], int]:
    """Collectives without their dtype: the CPU sums bfloat16 in float32, here or there."""
    made: dict[tuple[str, str], int] = {}
    for (kind, shape), count in collectives(text).items():
        key = kind, shape.partition("[")[2]
        made[key] = made.get(key, 0) + count
    return made


def test_scan_over_checkpointed_layers(target):
    on = mesh(dp=4, tp=2)
    specs = [
        NamedSharding(on, s) for s in (P("dp"), P(None, "tp"), P(None, "tp"), P(None, None, "tp"))
    ]

    def run(x, *w):
        layer = jax.checkpoint(lambda x, w: (x + op()(x, *w), None))
        return jax.lax.scan(layer, x, w)[0]

    text = _program(training_step(run), _shapes(stacked=(4,)), specs)
    local = f"bf16[{ROWS // 4},{HIDDEN // 2}]"
    # Forward, forward again for gate and up alone, and backward.
    assert _calls(text) == [("down_dswiglu", local), ("gate_up", local), ("gate_up", local)]
    assert not any(kind == "all-gather" for kind, _ in collectives(text))


def test_experts_of_their_own(target):
    on = mesh(ep=4)
    specs = [NamedSharding(on, P("ep"))] * 4
    text = _program(jax.vmap(op()), _shapes(lead=(8, ROWS), stacked=(8,)), specs)
    assert _calls(text) == [("gate_up", f"bf16[{ROWS},{HIDDEN}]")]  # once, in a loop of two
    assert collectives(text) == {}


def test_shard_map(target):
    on = mesh(dp=4, tp=2)
    pspecs = (P("dp"), P("tp"), P("tp"), P(None, "tp"))

    def local(*a):
        return jax.lax.psum(op()(*a), "tp")

    mapped = jax.shard_map(local, mesh=on, in_specs=pspecs, out_specs=P("dp"))
    specs = [NamedSharding(on, s) for s in pspecs]
    text = _program(training_step(mapped), _shapes(), specs)
    shape = f"bf16[{ROWS // 4},{HIDDEN // 2}]"
    assert _calls(text) == [("down_dswiglu", shape), ("gate_up", shape)]


def test_a_batch_and_a_sequence_divided(target):
    on = mesh(dp=2, sp=4)
    specs = [NamedSharding(on, s) for s in (P("dp", "sp"), P(), P(), P())]
    text = _program(training_step(op()), _shapes(lead=(4, ROWS)), specs)
    shape = f"bf16[2,{ROWS // 4},{HIDDEN}]"
    assert _calls(text) == [("down_dswiglu", shape), ("gate_up", shape)]
    assert not any(kind == "all-gather" for kind, _ in collectives(text))


def test_a_local_shape_that_no_kernel_serves(target):
    """I = 512 is served whole; an eighth of I = 40 is 5 columns, which nothing fused takes."""
    on = mesh(tp=8)
    specs = [NamedSharding(on, s) for s in (P(), P("tp"), P("tp"), P(None, "tp"))]
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((ROWS, WIDTH), (40, WIDTH), (40, WIDTH), (WIDTH, 40))
    ]
    with pytest.raises(Exception, match=r"(?s)no fused kernel serves gate_up.*I=5"):
        _program(op(), shapes, specs)
    assert _calls(_program(op("OI", None), shapes, specs)) == []

"""The benchmark's own code, at tiny shapes on whatever platform runs the tests."""

import json
import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import error, reference

from benchmarks import __main__ as command
from benchmarks import bounds
from benchmarks.errors import errors, sampled_reference
from benchmarks.jax_programs import contender
from benchmarks.memory import kept_memory
from benchmarks.mlps import jax_mlps
from benchmarks.parts import gemms, stages
from benchmarks.presets import PRESETS, narrowed
from benchmarks.problems import Problem
from benchmarks.report import report
from benchmarks.results import load
from benchmarks.runner import STAGE_ROUNDS
from benchmarks.shapes import Shape, parse_shape, sweep_shapes
from benchmarks.timing import Contender, interleave


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """One run at two tiny shapes, as the command line does it."""
    out = tmp_path_factory.mktemp("results")
    path = command.main(
        ["--shapes", "16,32,64", "--only", "forward", "step", "gemms", "stages", "errors",
         "--rounds", "5", "--sample-ms", "0.2", "--methods", "plain/OI", "swiglu_jax*/OI",
         "--out", str(out)]
    )  # fmt: skip
    return path, json.loads(path.read_text())


def test_result_says_where_it_comes_from(result):
    path, data = result
    assert path.name.endswith("-quick.json")
    assert data["machine"]["packages"]["jax"] == jax.__version__
    assert data["machine"]["device"] == jax.devices()[0].device_kind
    assert {"date", "commit", "sources", "options", "seconds"} <= set(data)


def test_every_measure_is_recorded_with_its_spread(result):
    _, data = result
    found = {(r["measure"], r["name"]) for r in data["records"]}
    assert {
        ("forward", "plain"), ("step", "plain"), ("forward", "swiglu_jax"), ("step", "swiglu_jax"),
        ("gemm_sum", "nine GEMMs alone"), ("part", "gate_up"), ("part", "down_dswiglu"),
        ("part", "gate+up"), ("errors", "plain"), ("errors", "swiglu_jax"), ("route", "swiglu_jax"),
    } <= found  # fmt: skip
    for record in data["records"]:
        if "median_ms" in record:
            # Of its group: the stages are timed apart from the rest, and longer.
            assert len(record["samples_ms"]) == (5 if record["group"] == 1 else STAGE_ROUNDS)
            assert 0 < record["q1_ms"] <= record["median_ms"] <= record["q3_ms"]
            assert record["median_ms"] == pytest.approx(np.median(record["samples_ms"]))


def test_nine_gemms_are_summed_round_by_round(result):
    _, data = result
    times = {"gate": 2, "down": 1, "dh": 1, "dx": 2, "dw_gate": 2, "dw_down": 1}
    (total,) = (r for r in data["records"] if r["measure"] == "gemm_sum")
    alone = {
        r["name"]: r["samples_ms"]
        for r in data["records"]
        if r["measure"] == "gemm" and r["group"] == total["group"]
    }
    want = sum(n * np.array(alone[name]) for name, n in times.items())
    np.testing.assert_allclose(total["samples_ms"], want)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="fused kernels may serve it there")
def test_what_cannot_be_made_is_said(result):
    _, data = result
    reasons = {m["what"]: m["reason"] for m in data["not_made"]}
    assert "no fused kernel serves" in reasons["step:swiglu_jax-fused/OI"]


def test_stages_are_timed_beside_their_gemms(result):
    _, data = result
    stages = [r for r in data["records"] if r["measure"] == "part"]
    (group,) = {r["group"] for r in stages}
    beside = {r["name"] for r in data["records"] if r.get("group") == group}
    assert beside == {"gate_up", "gate+up", "down_dswiglu", "dh"}
    records = bounds.Records([data | {"path": "x"}])
    for stage, measure, plain in (("gate_up", "part", "gate+up"), ("down_dswiglu", "gemm", "dh")):
        (record,) = records.of("part", stage)
        assert records.beside(record, measure, plain)["group"] == group


def test_absent_required_peers_count_as_not_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", None)
    path = command.main(
        ["--shapes", "8,16,32", "--only", "step", "--rounds", "5", "--sample-ms", "0.1",
         "--methods", "plain/OI", "quack/OI", "--out", str(tmp_path)]
    )  # fmt: skip
    data = json.loads(path.read_text())
    assert data["peers"]["asked"] and not data["peers"]["comparison_made"]
    assert any(
        m["what"] == "quack" and "cannot be imported" in m["reason"] for m in data["not_made"]
    )


def test_report_and_bounds_read_the_result(result):
    path, _ = result
    records = bounds.Records(load([path]))
    text = report(records)
    assert "## Step" in text and "## Not made" in text
    findings = {f.bound: f for f in bounds.check(records)}
    measured = findings["output and gradients: relative L2 error against float64"]
    assert measured.holds and 0 < measured.value < 6e-3
    assert findings["required peers measured (1: yes)"].holds is None


def _record(measure, name, median, **more):
    shape = Shape(8192, 5120, 17408).to_json()
    times = {"median_ms": median, "samples_ms": [median]}
    return {"measure": measure, "name": name, "layout": "OI", "group": 1} | shape | times | more


@pytest.mark.parametrize(("plain", "holds"), [(10.5, True), (10.3, False)])
def test_a_bound_breaks_where_it_should(plain, holds):
    times = [_record("step", "swiglu_jax", 10.0), _record("step", "plain", plain)]
    file = {"machine": {"device": "x"}, "path": "x", "not_made": [], "records": times}
    findings = bounds.check(bounds.Records([file]))
    (step,) = (f for f in findings if "8192,5120,17408" in f.bound)
    assert step.value == pytest.approx(plain / 10) and step.holds is holds


def test_a_nan_error_breaks_its_bound():
    record = _record("errors", "swiglu_jax", 1.0, relative_l2={"y": math.nan},
                     bit_identical_twice=True)  # fmt: skip
    file = {"machine": {"device": "x"}, "path": "x", "records": [record], "not_made": []}
    first = bounds.check(bounds.Records([file]))[0]
    assert first.holds is False


def test_samples_take_turns_and_count_calls():
    calls = {"a": [], "b": []}

    def run(name):
        def launches(n):
            calls[name].append(n)
            time.sleep(n * 1e-3)

        return launches

    timings = interleave([Contender("a", run("a")), Contender("b", run("b"), 4)], 5, 4e-3)
    assert len(timings["a"].samples_ms) == len(timings["b"].samples_ms) == 5
    assert timings["a"].launches >= 2
    assert timings["a"].median_ms >= 1 and timings["b"].median_ms >= 0.25


@pytest.mark.parametrize("mode", ["direct", "loop"])
def test_a_contender_runs_its_function_on_its_sets(mode):
    sets = [(jnp.ones((4, 4)) * k, jnp.ones((4, 4))) for k in range(3)]
    made = contender("dot", lambda a, b: a @ b, sets, predicted=1e-3, mode=mode)
    made.run(2)
    assert made.calls_per_launch == (1 if mode == "direct" else 12)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
def test_a_loop_on_the_gpu_takes_as_long_as_its_calls(count):
    sets = [[jnp.full((4096, 4096), 0.01 * k, jnp.bfloat16)] * 2 for k in range(1, count + 1)]
    made = [contender(mode, lambda a, b: a @ b, sets, 1e-4, mode) for mode in ("direct", "loop")]
    timings = interleave(made, 5, 2e-2)
    # A call of 150 us and more hides its dispatch: nothing was hoisted, merged or dropped.
    assert timings["loop"].median_ms > 0.8 * timings["direct"].median_ms
    assert timings["loop"].median_ms < 1.1 * timings["direct"].median_ms


@pytest.mark.parametrize("layout", ["OI", "IO"])
def test_steps_agree_with_float64(rng, layout):
    shape = Shape(24, 16, 40, "float32")
    problem = Problem(shape, int(rng.integers(1 << 30)), rotate=False)
    want = sampled_reference(problem.oi[0], int(rng.integers(1 << 30)))
    for mlp in jax_mlps():
        if mlp.layout == layout and mlp.name in ("plain", "plain-checkpoint", "swiglu_jax"):
            found = errors(mlp.step(*problem.sets(layout)[0]), layout, want)
            assert max(found.values()) < 1e-5, (mlp.key, found)


def test_sampled_reference_is_the_whole_one_where_all_is_sampled(rng):
    problem = Problem(Shape(12, 8, 20, "float32"), int(rng.integers(1 << 30)), rotate=False)
    *arrays, dy = problem.oi[0]
    values, rows, units = sampled_reference((*arrays, dy))
    assert len(rows) == 12 and len(units) == 20
    names = ("y", "dx", "dw_gate", "dw_up", "dw_down")
    for name, want in zip(names, reference(arrays, dy), strict=True):
        assert error(values[name], want) < 1e-10


@pytest.mark.parametrize("layout", ["OI", "IO"])
def test_gemms_and_stages_are_those_of_a_step(layout):
    shape = Shape(6, 16, 24)
    problem = Problem(shape, 0, rotate=False)
    results = {p.name: jax.eval_shape(p.function, *p.sets[0]).shape for p in gemms(problem, layout)}
    first, down = ((24, 16), (16, 24)) if layout == "OI" else ((16, 24), (24, 16))
    assert results == {"gate": (6, 24), "down": (6, 16), "dh": (6, 24), "dx": (6, 16),
                       "dw_gate": first, "dw_down": down}  # fmt: skip
    for part in stages(problem, layout, None):
        assert all(a.shape == (6, 24) for a in part.function(*part.sets[0]).values())


def test_memory_is_a_slope_over_layers():
    mlp = next(m for m in jax_mlps() if m.key == "swiglu_jax/OI")
    kept = kept_memory(mlp, Shape(256, 8, 32, "float32"), layers=4)
    assert kept["hidden_tensors"] == pytest.approx(2, abs=0.6)


def test_presets_narrow_to_what_is_asked():
    shapes = [parse_shape("8,16,32")]
    preset = narrowed(PRESETS["full"], shapes, ["plain/OI"], ["memory"])
    (block,) = preset.blocks
    assert block.shapes == (Shape(8, 16, 32),) and block.measures == ("memory",)
    assert block.takes("plain/OI") and not block.takes("plain/IO")
    assert len(sweep_shapes()) == 48
    with pytest.raises(ValueError, match="three numbers"):
        parse_shape("8,16")

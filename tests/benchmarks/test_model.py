"""The model benchmark at a tiny size, and what is written about it."""

import argparse
import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from benchmarks import decoder, model
from benchmarks.absent import NotMade
from benchmarks.bounds import Records
from benchmarks.model_report import attribution_table, kernels_table, model_runs, variants_table
from benchmarks.plots import write_plots
from benchmarks.report import report
from benchmarks.results import load
from benchmarks.trace import module_of_instructions

TINY = decoder.CONFIGS["tiny"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """One run, as the command line does it."""
    out = tmp_path_factory.mktemp("results")
    return model.main(["--model", "tiny", "--sample-ms", "1", "--out", str(out)])


@pytest.fixture(scope="module")
def data(path):
    return json.loads(path.read_text())


def test_eight_variants_are_asked_and_those_that_run_are_measured(data):
    timed = {r["variant"] for r in data["records"] if r["measure"] == "model_step"}
    missing = {m["what"] for m in data["not_made"]}
    names = {v.name for v in decoder.VARIANTS}
    assert len(names) == 8 and names <= timed | missing
    assert {v.name for v in decoder.VARIANTS if v.attention == "xla"} <= timed
    losses = [r["loss"] for r in data["records"] if r["measure"] == "model_memory"]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)


def test_both_mlps_are_traced_under_the_fastest_choice_of_the_rest(data):
    traced = [r for r in data["records"] if r["measure"] == "model_kernels"]
    assert {r["variant"].split("+")[0] for r in traced} == {"plain", "swiglu_jax"}
    assert len({r["variant"].split("+", 1)[1] for r in traced}) == 1
    for record in traced:
        assert sum(record["shares"].values()) == pytest.approx(1)
        assert record["seconds"]["mlp"] > 0 and record["seconds"]["attention"] > 0


def test_a_run_says_where_its_time_went_and_what_it_ran(data):
    phases = [r["phase"] for r in data["records"] if r["measure"] == "model_seconds"]
    assert phases == ["compile", "time", "trace", "largest batch"]
    assert data["model"]["width"] == TINY.width
    assert (data["options"]["sequences"], data["options"]["length"]) == (2, 8)


def test_nothing_new_is_started_when_time_is_over(tmp_path):
    path = model.main(["--model", "tiny", "--seconds", "-1", "--out", str(tmp_path)])
    data = json.loads(path.read_text())
    assert not [r for r in data["records"] if r["measure"] == "model_step"]
    assert len(data["not_made"]) == 8
    assert all("out of time" in missing["reason"] for missing in data["not_made"])


@pytest.mark.parametrize("laps", [2, 3])
def test_what_time_did_not_reach_is_told(tmp_path, monkeypatch, laps):
    """Time is over after so many phases: before the traces, before the search for a batch."""
    done = []
    lap = model._Clock.lap
    monkeypatch.setattr(model._Clock, "lap", lambda *args: done.append(args[1]) or lap(*args))
    monkeypatch.setattr(model._Clock, "over", lambda self, share=1.0: len(done) >= laps)
    out = ["--variants", "*+xla+kept", "--sample-ms", "1", "--out", str(tmp_path)]
    data = json.loads(model.main(["--model", "tiny", *out]).read_text())
    missing = {m["what"] for m in data["not_made"] if "out of time" in m["reason"]}
    names = {"plain+xla+kept", "swiglu_jax+xla+kept"}
    wanted = {f"largest batch of {name}" for name in names}
    if laps == 2:
        wanted |= {f"trace of {name}" for name in names}
    assert missing == wanted
    assert {r["variant"] for r in data["records"] if r["measure"] == "model_step"} == names


def test_attribution_compares_what_differs_in_one_choice():
    times = {
        v.name: (2.0 if v.mlp == "plain" else 1.0) * (3.0 if v.attention == "xla" else 1.0)
        for v in decoder.VARIANTS
    }
    effects = model.attribution(times)
    assert effects == pytest.approx({"mlp": 2, "attention": 3, "norm": 1})


def test_the_best_pair_is_that_of_the_fastest_plain_variant():
    times = {v.name: 5.0 for v in decoder.VARIANTS} | {"plain+cudnn+kept": 4.0}
    times |= {"swiglu_jax+xla+kept": 1.0}
    assert model.best_pair(times) == ["plain+cudnn+kept", "swiglu_jax+cudnn+kept"]
    assert model.best_pair({"swiglu_jax+xla+kept": 1.0}) == ["swiglu_jax+xla+kept"]


def test_fewer_and_fewer():
    assert model.fewer_and_fewer(3) == [3, 2, 1]
    assert model.fewer_and_fewer(200) == [200, 199, 196, 193, 190, 187]
    assert model.fewer_and_fewer(0) == []


def test_the_largest_batch_is_the_one_whose_program_fits():
    config = dataclasses.replace(TINY, layers=1, vocabulary=None)
    options = argparse.Namespace(sequences=2, length=8)
    variant = decoder.VARIANTS[0]
    params = decoder.init(config, jax.random.key(0))

    def peak(sequences):
        inputs = decoder.batch(config, sequences, 8, jax.random.key(1))
        step = model.step_of(config, variant).lower(params, inputs).compile()
        return model.memory_of(step)["peak_bytes"]

    limit = (peak(7) + peak(8)) // 2
    found = model.largest_batch(config, variant, params, options, peak(2), limit)
    assert found["sequences"] == 7
    assert abs(found["predicted"] - 7) <= 1
    with pytest.raises(NotMade, match="none of 6 batches"):
        model.largest_batch(config, variant, params, options, peak(2), peak(1) - 1)


def test_scopes_are_found_in_forward_and_backward_instructions():
    hlo = """
  %a.1 = f32[2]{0} add(%x, %y), metadata={op_name="jit(f)/while/body/mlp/add"}
  ROOT %b-2 = f32[2] dot(%x), metadata={op_name="jit(f)/transpose(jvp(attention))/dot"}
  %c = f32[2] copy(%x), metadata={op_name="jit(f)/copy"}
"""
    found = module_of_instructions(hlo, decoder.MODULES)
    assert found == {"a.1": "mlp", "b-2": "attention", "c": "other"}


def test_gradients_agree_over_variants(rng):
    params = decoder.init(TINY, jax.random.key(int(rng.integers(1 << 30))))
    inputs = decoder.batch(TINY, 2, 8, jax.random.key(int(rng.integers(1 << 30))))
    found = [
        model.step_of(TINY, v)(params, inputs) for v in decoder.VARIANTS if v.attention == "xla"
    ]
    for other in found[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found[0], other
        )


def _cells(markdown):
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines()]
    return rows[0], rows[2:]


def test_the_tables_hold_what_was_measured(path, data):
    (run,) = model_runs(Records(load([path])))
    steps = {r["variant"]: r for r in data["records"] if r["measure"] == "model_step"}
    memory = {r["variant"]: r for r in data["records"] if r["measure"] == "model_memory"}
    head, rows = _cells(variants_table(run))
    assert len(rows) == len(steps) >= 4
    for row in rows:
        cells = dict(zip(head, row, strict=False))
        name = f"{cells['mlp']}+{cells['attention']}+{cells['norm']}"
        told = float(cells["step, ms (quartiles)"].split(" ")[0])
        assert math.isclose(told, steps[name]["median_ms"], rel_tol=0.02, abs_tol=0.006)
        assert float(cells["memory, GiB"]) == round(memory[name]["peak_bytes"] / 2**30, 2)
        if cells["mlp"] != "plain":
            plain = steps[name.replace("swiglu_jax", "plain")]["median_ms"]
            over = float(cells["with the plain MLP, over this"])
            assert over == round(plain / steps[name]["median_ms"], 3)
    _, choices = _cells(attribution_table(run))
    assert {c[0]: float(c[2]) for c in choices} == pytest.approx(run.ratios, abs=6e-4)
    head, traced = _cells(kernels_table(run))
    assert len(traced) == 2 and head[1:] == [
        "mlp, ms", "attention, ms", "norm, ms", "head, ms", "other, ms", "all, ms",
    ]  # fmt: skip


def test_the_report_and_the_plot(path, tmp_path):
    records = Records(load([path]))
    text = report(records)
    assert "# Benchmark results" in text
    assert "## tiny, 2 x 8 tokens" in text
    assert "Kernel time by module" in text
    assert write_plots(records, tmp_path) == ["model.png"]
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_model_measured_again_replaces_the_older_run(path):
    old, new = load([path, path])
    new = new | {"records": [r | {"median_ms": 7.0} if "median_ms" in r else r
                             for r in new["records"]]}  # fmt: skip
    (run,) = model_runs(Records([old, new]))
    assert {step["median_ms"] for step in run.steps.values()} == {7.0}

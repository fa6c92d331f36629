"""The model benchmark at a tiny size."""

import json

import jax
import numpy as np
import pytest

from benchmarks import decoder, model
from benchmarks.bounds import Records
from benchmarks.report import report
from benchmarks.results import load
from benchmarks.trace import module_of_instructions

TINY = decoder.Config(2, 32, 64, 4, 2, 8, 97, "float32")


def test_eight_variants_are_asked_and_those_that_run_are_measured(tmp_path):
    arguments = ["--sequences", "2", "--length", "8", "--sample-ms", "1", "--out", str(tmp_path)]
    path = model.main(arguments, {"tiny": TINY})
    data = json.loads(path.read_text())
    timed = {r["variant"] for r in data["records"] if r["measure"] == "model_step"}
    missing = {m["what"] for m in data["not_made"]}
    names = {v.name for v in decoder.VARIANTS}
    assert len(names) == 8 and names <= timed | missing
    assert {v.name for v in decoder.VARIANTS if v.attention == "xla"} <= timed
    losses = [r["loss"] for r in data["records"] if r["measure"] == "model_memory"]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
    for record in data["records"]:
        if record["measure"] == "model_kernels":
            assert sum(record["shares"].values()) == pytest.approx(1)
            assert record["seconds"]["mlp"] > 0 and record["seconds"]["attention"] > 0
    assert "# Benchmark results" in report(Records(load([path])))


def test_attribution_compares_what_differs_in_one_choice():
    times = {
        v.name: (2.0 if v.mlp == "plain" else 1.0) * (3.0 if v.attention == "xla" else 1.0)
        for v in decoder.VARIANTS
    }
    effects = model.attribution(times)
    assert effects == pytest.approx({"mlp": 2, "attention": 3, "norm": 1})


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

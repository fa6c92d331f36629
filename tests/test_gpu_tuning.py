"""Tuning on a GPU: candidates are timed once a machine, and the choice serves what follows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu(targets=("sm_90a", "sm_100a", "sm_103a"))

SCRIPT = """
import json, time
import jax, jax.numpy as jnp
from swiglu_jax import explain, swiglu_mlp

shapes = [(1024, 512), (2048, 512), (2048, 512), (512, 2048)]
keys = jax.random.split(jax.random.key(0), 4)
arrays = [0.1 * jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes)]
start = time.perf_counter()
report = explain(*arrays)
seconds = time.perf_counter() - start
step = jax.jit(jax.grad(lambda *a: swiglu_mlp(*a).astype(jnp.float32).sum(), (0, 1, 2, 3)))
text = step.lower(*arrays).as_text()
print(json.dumps(report.to_dict() | {"seconds": seconds, "fused": text.count("@swiglu_jax_")}))
"""


def explained(cache: Path, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {
            "SWIGLU_JAX_CACHE_DIR": str(cache),
            "SWIGLU_JAX_TUNE": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        } | environment,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def files(cache: Path) -> dict[str, float]:
    return {str(p): p.stat().st_mtime for p in cache.rglob("*.json")}


def test_measured_once_then_read(tmp_path: Path) -> None:
    first = explained(tmp_path)
    measured = files(tmp_path)
    assert len(measured) >= 2  # one for each stage
    for stage in (first["forward"], first["backward"]):
        if stage["route"] == "xla":
            assert " us against " in stage["declined"]["exported"], stage
    stages = (first["forward"], first["backward"], *first["gradients"].values())
    assert first["fused"] == sum(stage["route"] != "xla" for stage in stages)
    second = explained(tmp_path)
    assert files(tmp_path) == measured
    again = (second["forward"], second["backward"], *second["gradients"].values())
    assert [stage["kernel"] for stage in again] == [stage["kernel"] for stage in stages]
    assert second["seconds"] < 1 < first["seconds"] * 20


def test_switched_off(tmp_path: Path) -> None:
    report = explained(tmp_path, SWIGLU_JAX_TUNE="0")
    assert files(tmp_path) == {}
    assert report["seconds"] < 1

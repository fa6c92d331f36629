"""explain and ``python -m swiglu_jax``: which route, why not the others, and what is kept."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support import LAYOUTS

from swiglu_jax import explain
from swiglu_jax._residuals import residual_plan


def _shapes(dtype=jnp.bfloat16, lead=(4, 512), width=1024, hidden=4096, layout="OI"):
    first, second = (hidden, width), (width, hidden)
    if layout == "IO":
        first, second = second, first
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((*lead, width), first, first, second)]


def test_a_cpu_runs_xla_and_says_why():
    e = explain(*_shapes(), target="cpu")
    for stage in (e.forward, e.backward):
        assert stage.route == "xla"
        assert set(stage.declined) == {"exported", "cudnn"}
        assert all("CUDA GPUs" in reason for reason in stage.declined.values())


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_dtypes_than_half_decline_with_the_dtype(layout, target):
    e = explain(*_shapes(jnp.float32, layout=layout), weight_layout=layout, target=target)
    for stage in (e.forward, e.backward):
        assert stage.route == "xla"
        assert all("float32" in reason for reason in stage.declined.values())


def test_an_older_gpu_runs_xla():
    e = explain(*_shapes(), target="sm_80")
    assert (e.forward.route, e.backward.route) == ("xla", "xla")
    with pytest.raises(NotImplementedError, match="no fused kernel serves gate_up"):
        explain(*_shapes(), target="sm_80", implementation="fused")


@pytest.mark.parametrize(
    "wrt", [(), ("w_down",), ("w_up",), ("x",), ("w_up", "w_down"), ("w_gate", "x")], ids="+".join
)
def test_the_stages_are_those_of_the_residual_table(wrt):
    e = explain(*_shapes(), wrt=wrt, target="cpu")
    plan = residual_plan(frozenset(wrt))
    assert e.forward.outputs == plan.forward
    assert e.backward.outputs == plan.backward


def test_the_table_names_stages_residuals_and_bytes():
    text = str(explain(*_shapes(), target="cpu"))
    size = 4 * 512 * 4096 * 2
    for part in ("swiglu_mlp on cpu", "forward", "backward", "not cudnn:", "not exported:",
                 f"gate  bfloat16[4, 512, 4096]  {size:,} bytes", "total"):  # fmt: skip
        assert part in text
    json.dumps(explain(*_shapes(), target="cpu").to_dict())


def test_nothing_kept_is_said():
    assert str(explain(*_shapes(), wrt=(), target="cpu")).endswith("nothing")


def _run(code: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code], env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_environment_report_is_json_and_text():
    report = json.loads(_run(["-m", "swiglu_jax", "--json"]).stdout)
    assert report["target"] == "cpu"
    assert report["packages"]["jax"] == jax.__version__
    assert set(report["stages"]) == {"gate_up", "down_dswiglu"}
    text = _run(["-m", "swiglu_jax"]).stdout
    assert "routes of a bf16 training step on cpu" in text
    assert "not cudnn" in text


def test_the_environment_report_asks_about_the_target():
    report = json.loads(_run(["-m", "swiglu_jax", "--json"], SWIGLU_JAX_TARGET="sm_80").stdout)
    assert report["target"] == "sm_80"
    for stage in report["stages"].values():
        assert set(stage["serving"]) == {"xla"}
        assert set(stage["declined"]) == {"exported", "cudnn"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SWIGLU_JAX_IMPLEMENTATION", "cudnn"),
        ("SWIGLU_JAX_TARGET", "b200"),
        ("SWIGLU_JAX_FROST_BWD", "no"),
        ("SWIGLU_JAX_TUNE", "2"),
        ("SWIGLU_JAX_LOG", "yes"),
    ],
)
def test_a_malformed_variable_is_named_at_import(name, value):
    done = _run(["-c", "import swiglu_jax"], **{name: value})
    assert done.returncode != 0
    assert f"ValueError: {name}: expected" in done.stderr
    assert repr(value) in done.stderr


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_the_default_implementation_comes_from_the_environment(implementation):
    code = (
        "import jax, jax.numpy as jnp, swiglu_jax\n"
        "a = [jnp.zeros(s, jnp.bfloat16) for s in ((2, 8), (16, 8), (16, 8), (8, 16))]\n"
        "print(swiglu_jax.swiglu_mlp(*a, implementation=OVERRIDE).shape)"
    )
    default = _run(["-c", code.replace("OVERRIDE", "None")],
                   SWIGLU_JAX_IMPLEMENTATION=implementation)  # fmt: skip
    assert ("NotImplementedError" in default.stderr) == (implementation == "fused")
    override = _run(["-c", code.replace("OVERRIDE", "'xla'")],
                    SWIGLU_JAX_IMPLEMENTATION=implementation)  # fmt: skip
    assert override.stdout == "(2, 8)\n"


def test_logging_names_the_chosen_route():
    code = (
        "import jax, jax.numpy as jnp, swiglu_jax\n"
        "a = [jnp.zeros(s, jnp.bfloat16) for s in ((2, 8), (16, 8), (16, 8), (8, 16))]\n"
        "jax.jit(swiglu_jax.swiglu_mlp).trace(*a).lower(lowering_platforms=('cuda',))"
    )
    done = _run(["-c", code], SWIGLU_JAX_LOG="1", SWIGLU_JAX_TARGET="sm_80")
    assert "gate_up" in done.stderr
    assert "on sm_80: xla" in done.stderr

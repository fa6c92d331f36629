"""explain and ``python -m swiglu_jax``: which route, why not the others, and what is kept."""

import copy
import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support import LAYOUTS

from swiglu_jax import _cudnn, _exported, _native, _routes, _table, _tuning, explain
from swiglu_jax._advice import advice
from swiglu_jax._candidate import StageCall
from swiglu_jax._config import config
from swiglu_jax._device import local_gpu_target
from swiglu_jax._environment import environment_report, format_report
from swiglu_jax._measurement import Measurement
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


@pytest.mark.parametrize(
    ("wrt", "products"),
    [
        ((), {}),
        (("x",), {"input_gradient": ("x",)}),
        (("w_up",), {"weight_gradients": ("w_up",)}),
        (("w_down", "x"), {"input_gradient": ("x",), "weight_gradients": ("w_down",)}),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradients_products_are_those_asked(wrt, products, layout):
    for target in ("cpu", "sm_90a", "sm_100a"):
        e = explain(*_shapes(layout=layout), weight_layout=layout, wrt=wrt, target=target)
        assert {name: stage.outputs for name, stage in e.gradients.items()} == products
    fused = explain(*_shapes(layout=layout), weight_layout=layout, wrt=wrt, target="sm_100a",
                    implementation="fused")  # fmt: skip
    for stage in fused.gradients.values():
        assert stage.route == "xla"  # "fused" is about the two fused stages


def test_forward_mode_leaves_the_backward_pass_to_xla():
    e = explain(*_shapes(), target="sm_100a", implementation="fused", forward_mode=True)
    assert e.forward.route != "xla"
    assert {s.route for s in (e.backward, *e.gradients.values())} == {"xla"}
    assert e.residuals == explain(*_shapes(), target="sm_100a").residuals


def test_the_table_names_stages_residuals_and_bytes():
    text = str(explain(*_shapes(), target="cpu"))
    size = 4 * 512 * 4096 * 2
    for part in ("swiglu_mlp on cpu", "forward", "backward", "not exported, cudnn:", "to do: ",
                 f"gate  bfloat16[4, 512, 4096]  {size:,} bytes", "total"):  # fmt: skip
        assert part in text
    data = json.loads(json.dumps(explain(*_shapes(), target="cpu").to_dict()))
    assert data["forward"]["route"] == "xla"
    assert set(data["forward"]["advice"]) == set(data["forward"]["declined"])


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_symbolic_sizes_are_explained(target):
    (rows,) = jax.export.symbolic_shape("rows")
    e = explain(*_shapes(lead=(rows,)), target=target)
    assert "gate  bfloat16[rows, 4096]  ? bytes" in str(e)
    data = json.loads(json.dumps(e.to_dict()))
    assert data["residuals"][0] == {
        "name": "gate", "shape": ["rows", 4096], "dtype": "bfloat16", "bytes": None,
    }  # fmt: skip


def test_one_name_may_stand_for_a_set_of_one():
    assert explain(*_shapes(), wrt="w_up", target="cpu") == explain(
        *_shapes(), wrt=("w_up",), target="cpu"
    )
    with pytest.raises(ValueError, match=r"wrt: expected names of .*, got 'w_gat'"):
        explain(*_shapes(), wrt="w_gat", target="cpu")


def _changed(monkeypatch, **changes):
    for module in (_cudnn, _exported, _routes, _tuning):
        monkeypatch.setattr(module, "config", dataclasses.replace(config, **changes))


def _measured(monkeypatch, times, failed=None):
    def measurement(call, candidates, target):
        timed = tuple((c, times[c.route]) for c in candidates if c.route in times)
        return Measurement(100.0, timed, failed or {})

    monkeypatch.setattr(_tuning, "measurement", measurement)


def _without_the_library(monkeypatch):
    monkeypatch.setattr(_native, "unavailable_reason", lambda: "the native library is not built")


def _without_cudnn(monkeypatch):
    def version(function):
        raise RuntimeError("cuDNN can't be opened: libcudnn.so.9: no such file")

    monkeypatch.setattr(_cudnn, "local_gpu_target", lambda: "sm_100a")
    monkeypatch.setattr(_native, "call_json", version)


def _in_the_table(monkeypatch):
    def lookup(call, offered, target):
        return _table.Row(call, 100.0, {c.kernel: 120.0 for c in offered})

    monkeypatch.setattr(_table, "lookup", lookup)


_PLAIN = (lambda _: None, {}, {})
DECLINES = {
    # name: set up; what _shapes takes; what explain takes; what to do about it
    "a CPU": (*_PLAIN[:2], {"target": "cpu"}, "NVIDIA GPU"),
    "implementation": (*_PLAIN[:2], {"implementation": "xla"}, "leave implementation"),
    "forward mode": (*_PLAIN[:2], {"forward_mode": True}, "leave forward_mode out"),
    "dtype": (_PLAIN[0], {"dtype": jnp.float32}, {}, "compute in bfloat16"),
    "an old GPU": (*_PLAIN[:2], {"target": "sm_80"}, "nothing; fused kernels need Hopper"),
    "a GPU with no kernels": (*_PLAIN[:2], {"target": "sm_121a"}, "nothing; another route"),
    "empty": (_PLAIN[0], {"lead": (0,)}, {}, "nothing; an empty product"),
    "odd H": (_PLAIN[0], {"width": 1001}, {}, "pad H=1001 to 1008"),
    "odd I": (_PLAIN[0], {"hidden": 4090}, {}, "pad I=4090 to 4096"),
    "no library": (_without_the_library, {}, {}, "make build"),
    "no cuDNN": (_without_cudnn, {}, {"target": "sm_100a"}, "swiglu-jax[cuda13]"),
    "superseded": (*_PLAIN, "nothing; another route"),
    "two-step backward": (
        lambda m: _changed(m, frost_backward=False), {}, {}, "unset SWIGLU_JAX_FROST_BWD",
    ),
    "unmeasured": (
        lambda m: m.setattr(_table, "lookup", lambda *_: None), {}, {}, "compile the call on such",
    ),
    "the table": (_in_the_table, {}, {}, "nothing; XLA was faster where"),
    "slower": (
        lambda m: _measured(m, {"exported": 90, "cudnn": 95}),
        {}, {"target": "sm_100a"}, "nothing; the faster one",
    ),
    "a trial without memory": (
        lambda m: _measured(m, {"exported": 120}, {"cuDNN graph": "RESOURCE_EXHAUSTED: 4 GiB"}),
        {}, {}, "a new process tries this kernel again",
    ),
    "a trial that failed": (
        lambda m: _measured(m, {"exported": 120}, {"cuDNN graph": "CUDNN_STATUS"}),
        {}, {}, "its trial failed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINES)
def test_every_decline_says_what_to_do(name, monkeypatch):
    prepare, shapes, options, todo = DECLINES[name]
    prepare(monkeypatch)
    explained = explain(*_shapes(**shapes), **{"target": "sm_90a"} | options)
    for stage in (explained.forward, explained.backward, *explained.gradients.values()):
        assert set(stage.advice) == set(stage.declined)
        assert all(stage.advice.values())
    assert todo in str(explained)


@pytest.mark.parametrize("slower", [_in_the_table, lambda m: _measured(m, {"exported": 120})])
def test_fused_is_advised_for_the_fused_stages_alone(monkeypatch, slower):
    slower(monkeypatch)
    e = explain(*_shapes(), target="sm_90a")
    for stage in (e.forward, e.backward):
        assert 'implementation="fused"' in stage.advice["exported"]
    for stage in e.gradients.values():
        assert stage.route == "xla"
        assert 'implementation="fused"' not in str(stage)


def test_a_route_that_was_never_measured_says_who_comes_first(monkeypatch):
    monkeypatch.setattr(_table, "lookup", lambda *_: None)
    neither = explain(*_shapes(), target="sm_100a").forward
    takes = {route for route, why in neither.declined.items() if '"fused" takes it' in why}
    fused = explain(*_shapes(), target="sm_100a", implementation="fused").forward
    assert takes == {fused.route}
    (other,) = {"exported", "cudnn"} - takes
    assert f"{fused.kernel} comes first" in fused.declined[other]


def test_no_padding_is_advised_where_none_would_help():
    e = explain(*_shapes(width=1001), target="sm_100a")
    for stage in e.gradients.values():
        assert "nothing; another route" in stage.advice["cudnn"]


def test_padding_as_advised_lets_the_route_serve():
    odd = StageCall("down_dswiglu", ("dgate", "dup", "h"), "OI", "bfloat16", m=64, h=100, i=260)
    for target, routes in (("sm_90a", ["exported"]), ("sm_100a", ["exported", "cudnn"])):
        for route in routes:
            _, declined = _routes.candidates(odd, target)
            text = advice(route, declined[route], odd, target)
            sizes = re.findall(r"pad ([HI])=\d+ to (\d+)", text)
            padded = {letter.lower(): int(size) for letter, size in sizes}
            found, _ = _routes.candidates(dataclasses.replace(odd, **padded), target)
            assert route in {candidate.route for candidate in found}


def test_padding_is_advised_where_m_is_symbolic_too():
    (rows,) = jax.export.symbolic_shape("rows")
    e = explain(*_shapes(lead=(rows,), width=1001), target="sm_90a")
    for stage in (e.forward, e.backward):
        assert "pad H=1001 to 1008" in stage.advice["exported"]


def test_nothing_kept_is_said():
    assert str(explain(*_shapes(), wrt=(), target="cpu")).endswith("nothing")


EXPLAINED = [
    {"target": "cpu"}, {"target": "sm_90a"}, {"target": "sm_100a", "implementation": "fused"},
    {"target": "cpu", "wrt": ()}, {"target": "sm_90a", "wrt": "w_up"},
    {"target": "sm_90a", "lead": (0,)},
    {"target": "cpu", "lead": jax.export.symbolic_shape("m, n")},
]  # fmt: skip


def _explained(options):
    options = dict(options)
    return explain(*_shapes(lead=options.pop("lead", (4, 512))), **options)


@pytest.mark.parametrize("options", EXPLAINED, ids=str)
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e)), dataclasses.replace],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_an_explanation_is_a_value(options, again):
    """Equal to one made again, with its hash, and so are its parts; and it prints alike."""
    e = _explained(options)
    same = again(e)
    for a, b in ((e, same), (e, _explained(options)), *zip(_parts(e), _parts(same), strict=True)):
        assert a == b
        assert hash(a) == hash(b)
        assert (str(a), repr(a)) == (str(b), repr(b))
        assert len({a, b}) == 1


def _parts(e):
    return (e.forward, e.backward, *e.gradients.values(), *e.residuals)


def test_explanations_that_differ_are_not_equal():
    every = [_explained(options) for options in EXPLAINED]
    assert len(set(every)) == len(every)
    e = every[0]
    other = dataclasses.replace(e.forward, declined=e.forward.declined | {"exported": "another"})
    assert dataclasses.replace(e, forward=other) != e
    with pytest.raises(dataclasses.FrozenInstanceError):
        e.target = "sm_90a"


def _run(code: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code], env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_environment_report_is_json_and_text():
    report = json.loads(_run(["-m", "swiglu_jax", "--json"]).stdout)
    assert report["target"] == "cpu"
    assert report["packages"]["jax"] == jax.__version__
    stages = {"gate_up", "down_dswiglu", "input_gradient", "weight_gradients"}
    assert set(report["stages"]) == stages
    for stage in report["stages"].values():
        assert set(stage["advice"]) == set(stage["declined"]) == {"exported", "cudnn"}
    text = _run(["-m", "swiglu_jax"]).stdout
    assert "routes of a bf16 training step on cpu" in text
    assert "not exported, cudnn" in text
    assert "to do: " in text
    assert len(text.splitlines()) < 50  # a person's: no line for each kernel


def test_the_environment_report_lists_the_kernels_when_asked():
    report = environment_report("sm_90a")
    assert report["kernels"]
    listed, counted = format_report(report, kernels=True), format_report(report)
    for kernel in report["kernels"]:
        assert kernel["name"] in listed
        assert kernel["digest"] not in counted
        assert kernel["architecture"] in counted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--target", "h200"], '--target: expected "cpu" or a GPU architecture'),
        (["--target", ""], '--target: expected "cpu" or a GPU architecture'),
        (["--target"], "--target: expected one argument"),
        (["--m", "-3"], "unrecognized arguments: --m -3"),
        (["report"], "unrecognized arguments: report"),
    ],
)
def test_the_environment_report_refuses_what_it_does_not_know(given, said):
    for form in ([], ["--json"]):
        done = _run(["-m", "swiglu_jax", *form, *given])
        assert done.returncode == 2
        assert done.stdout == ""
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("platforms", ["cuda", "no-such"])
@pytest.mark.parametrize("target", [[], ["--target", "sm_90a"]], ids=" ".join)
def test_the_environment_report_where_jax_has_no_device(platforms, target):
    """Versions and settings all the same, and the reason; a script sees it by the exit status."""
    if platforms == "cuda" and local_gpu_target():
        pytest.skip("there is a GPU here")
    done = _run(["-m", "swiglu_jax", "--json", *target], JAX_PLATFORMS=platforms)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert platforms in report["jax_error"]
    assert report["packages"]["jax"] == jax.__version__
    assert report["devices"] == []
    assert report["stages"] == {}
    text = format_report(report)
    assert f"devices: none; {report['jax_error']}" in text
    assert "routes of" not in text


def test_the_environment_report_prints_paths_of_any_bytes():
    cache = "/tmp/\udcff\u00fc"
    for encoding in ("utf-8:strict", "ascii:strict"):
        done = _run(["-m", "swiglu_jax"], SWIGLU_JAX_CACHE_DIR=cache, PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr
        assert "cache_dir=/tmp/\\udcff" in done.stdout


def test_the_environment_report_s_reader_may_leave():
    """As ``head`` does; no traceback, and no complaint when Python ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "swiglu_jax", "--json"], env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 1


def test_the_environment_report_asks_about_the_target():
    report = json.loads(_run(["-m", "swiglu_jax", "--json"], SWIGLU_JAX_TARGET="sm_80").stdout)
    assert report["target"] == "sm_80"
    for stage in report["stages"].values():
        assert set(stage["serving"]) == {"xla"}
        assert set(stage["declined"]) == {"exported", "cudnn"}


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


@pytest.mark.parametrize("implementation", ["None", "'xla'"])
def test_logging_on_a_cpu_and_with_xla_asked(implementation):
    code = (
        "import jax, jax.numpy as jnp, swiglu_jax\n"
        "a = [jnp.zeros(s, jnp.bfloat16) for s in ((2, 8), (16, 8), (16, 8), (8, 16))]\n"
        f"f = lambda *a: swiglu_jax.swiglu_mlp(*a, implementation={implementation})\n"
        "jax.jit(jax.grad(lambda *a: f(*a).astype('float32').sum())).lower(*a)"
    )
    lines = _run(["-c", code], SWIGLU_JAX_LOG="1").stderr.splitlines()
    for stage in ("gate_up (gate, up)", "down_dswiglu (dgate, dup)", "input_gradient (x)"):
        wanted = f"{stage} M=2 H=8 I=16 bfloat16 OI on cpu: xla"
        assert any(wanted in line for line in lines), lines

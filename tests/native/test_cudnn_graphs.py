"""cuDNN accepts and builds every graph of both stages for B200 and H200, with no GPU.

The graphs come from the library's own builder; the GPU is a description (tests/native/devices)
and the driver a stub. What a plan computes is tested on a GPU, in test_gpu_handlers.py.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swiglu_jax.kernels._variant import STAGE_OUTPUTS

HERE = Path(__file__).parent
SM = {"h200": 90, "b200": 100}
SETS = {"gate_up": range(1, 8), "down_dswiglu": (1, 2, 3, 6, 7)}
"""Output sets that the route serves as they are (swiglu_jax/_cudnn.py), as bitmasks."""
SIZES = {"m": 2048, "h": 1024, "i": 3072}

Build = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def build(library: ctypes.CDLL, stub_driver: Path) -> Build:
    """Builds graphs for a device in a process of its own, whose libcuda is the stub."""

    def run(device: str | Path, sm: int, graphs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        path = HERE / "devices" / f"{device}.json" if isinstance(device, str) else device
        done = subprocess.run(
            [sys.executable, HERE / "build_graphs.py", path, str(sm)],
            input=json.dumps(list(graphs)),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "LD_LIBRARY_PATH": f"{stub_driver}:{os.environ.get('LD_LIBRARY_PATH', '')}",
                "PYTHONPATH": str(HERE.parents[1]),
                "JAX_PLATFORMS": "cpu",
                # cuDNN's own account of what it refuses; the library carries the reasons itself.
                "CUDNN_LOGLEVEL_DBG": "0",
            },
            check=True,
        )
        return json.loads(done.stdout)

    return run


def graph(name: str, outputs: int, layout: str, dtype: str, **other: Any) -> dict[str, Any]:
    return {"graph": name, "outputs": outputs, "weight_layout": layout, "dtype": dtype,
            **SIZES, **other}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["OI", "IO"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("device", SM)
def test_every_graph_builds(build: Build, device: str, dtype: str, layout: str) -> None:
    graphs = [graph("gate_up", outputs, layout, dtype) for outputs in SETS["gate_up"]]
    graphs += [graph("down_dswiglu", n, layout, dtype) for n in SETS["down_dswiglu"]]
    graphs.append(graph("dgrad", 1, layout, dtype))
    if layout == "OI":  # the pointwise graph reads no weight
        graphs += [graph("dswiglu", n, layout, dtype) for n in SETS["down_dswiglu"]]
    answers = build(device, SM[device], graphs)
    refused = {(g["graph"], g["outputs"]): a["error"]
               for g, a in zip(graphs, answers, strict=True) if "error" in a}  # fmt: skip
    assert not refused
    # No workspace is declared as a result of the calls, so no plan may need one.
    assert [a["workspace"] for a in answers] == [0] * len(graphs)


@pytest.mark.parametrize("device", SM)
def test_rows_of_any_number_build(build: Build, device: str) -> None:
    graphs = [graph(name, 7, "OI", "bfloat16", m=m)
              for name in ("gate_up", "down_dswiglu") for m in (1, 7, 8192)]  # fmt: skip
    assert all("error" not in answer for answer in build(device, SM[device], graphs))


@pytest.mark.parametrize("layout", ["OI", "IO"])
def test_buffers_are_taken_in_stage_order_and_read_in_place(build: Build, layout: str) -> None:
    m, h, i = SIZES.values()
    wide = ([1, m, i], [m * i, i, 1])
    narrow = ([1, m, h], [m * h, h, 1])
    # A right-hand side [H, I]: rows of I as they lie, or the transpose of rows of H.
    by_i, by_h = ([1, h, i], [h * i, i, 1]), ([1, h, i], [h * i, 1, h])
    w_first, w_down = (by_h, by_i) if layout == "OI" else (by_i, by_h)
    wanted = {
        "gate_up": {"x": narrow, "w_gate": w_first, "w_up": w_first,
                    "h": wide, "gate": wide, "up": wide},
        "down_dswiglu": {"dy": narrow, "w_down": w_down, "gate": wide, "up": wide,
                         "dgate": wide, "dup": wide, "h": wide},
        "dgrad": {"dy": narrow, "w_down": w_down, "dh": wide},
        "dswiglu": {"dh": wide, "gate": wide, "up": wide,
                    "dgate": wide, "dup": wide, "h": wide},
    }  # fmt: skip
    graphs = [graph(name, 1 if name == "dgrad" else 7, layout, "bfloat16") for name in wanted]
    for answer, buffers in zip(build("h200", 90, graphs), wanted.values(), strict=True):
        found = [(b["name"], (b["dims"], b["strides"])) for b in answer["buffers"]]
        assert found == list(buffers.items())
    for stage, names in STAGE_OUTPUTS.items():
        assert stage not in wanted or tuple(wanted[stage])[-len(names) :] == names


def test_up_is_no_buffer_where_nothing_reads_it(build: Build) -> None:
    (answer,) = build("h200", 90, [graph("down_dswiglu", 2, "OI", "bfloat16")])
    assert [b["name"] for b in answer["buffers"]] == ["dy", "w_down", "gate", "dup"]


@pytest.mark.parametrize("device", SM)
def test_a_name_rebuilds_its_plan(build: Build, device: str) -> None:
    wanted = graph("down_dswiglu", 3, "OI", "bfloat16")
    (first,) = build(device, SM[device], [wanted])
    (again,) = build(device, SM[device], [wanted | {"plan": first["plan"]}])
    assert again["plan"] == first["plan"]
    assert again["tag"] == first["tag"]
    assert len(first["names"]) > 1
    assert again["names"] == [first["plan"]]


@pytest.mark.parametrize("plan", ["e4;12=49", "e4;12=53"])
def test_the_fastest_plans_of_an_h200_are_tried(build: Build, plan: str) -> None:
    """cuDNN 9.28 builds what was the fastest with 9.19, but its heuristics don't name it."""
    wanted = graph("gate_up", 7, "OI", "bfloat16")
    all_of_them, named = build("h200", 90, [wanted, wanted | {"plan": plan}])
    assert named["plan"] == plan
    assert plan in all_of_them["names"]


def test_a_plan_that_is_not_there_is_refused_with_cudnns_reason(build: Build) -> None:
    names = ("e4000;12=1", "eleven", "e7;12", "e7;12=1,")
    answers = build("h200", 90, [graph("gate_up", 1, "OI", "bfloat16", plan=n) for n in names])
    assert answers[0]["error"].startswith("cuDNN: ")
    for answer in answers[1:]:
        assert "does not name a cuDNN plan" in answer["error"]


def test_an_old_gpu_is_refused_with_cudnns_reason(build: Build, tmp_path: Path) -> None:
    description = json.loads((HERE / "devices" / "h200.json").read_text()) | {"deviceVer": 700}
    path = tmp_path / "volta.json"
    path.write_text(json.dumps(description))
    (answer,) = build(path, 70, [graph("gate_up", 7, "OI", "bfloat16")])
    assert "cuDNN" in answer["error"]
    assert "NOT_SUPPORTED" in answer["error"]


def test_a_malformed_graph_names_what_is_wrong(build: Build) -> None:
    answers = build("h200", 90, [
        graph("gate_up", 8, "OI", "bfloat16"),
        graph("gate_up", 1, "OO", "bfloat16"),
        graph("gate_up", 1, "OI", "float32"),
        graph("gate", 1, "OI", "bfloat16"),
    ])  # fmt: skip
    for answer, word in zip(answers, ("outputs", "weight_layout", "dtype", "graph"), strict=True):
        assert answer["error"].startswith(word)

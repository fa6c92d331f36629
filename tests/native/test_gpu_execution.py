"""The cudnn route on a GPU: kernels per call, command buffers, threads and devices."""

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from swiglu_jax._candidate import StageCall

sys.path.append(str(Path(__file__).parent))
import gpu

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
LEAD = (4, 128)
M, H, I = 512, 512, 1024  # noqa: E741
GATE_UP = "swiglu_jax_cudnn_gate_up"
DOWN = "swiglu_jax_cudnn_down_dswiglu"


def stage_call(target: str, mask: int) -> StageCall:
    stage = gpu.TARGETS[target]
    return StageCall(stage, gpu.names(stage, mask), "OI", "bfloat16", M, H, I)


def kernels(trace: Path) -> list[str]:
    """Names of the kernels that ran on the GPU, from a profiler trace."""
    (path,) = trace.glob("**/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [e for e in events if e.get("ph") == "M" and "name" in e.get("args", {})]
    gpus = {e["pid"] for e in named if e["name"] == "process_name" and "GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and e["pid"] in gpus and "Stream" in e["args"]["name"]
    }
    ran = [e["name"] for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams]
    return [name for name in ran if not name.lower().startswith("mem")]


@pytest.mark.parametrize(
    ("target", "mask"), [(t, mask) for t in (GATE_UP, DOWN) for mask in gpu.SETS[gpu.TARGETS[t]]]
)
def test_a_stage_is_one_kernel(
    rng: np.random.Generator, tmp_path: Path, target: str, mask: int
) -> None:
    call = stage_call(target, mask)
    arrays = gpu.operands(rng, call, LEAD)
    run = jax.jit(gpu.handler(target, call, LEAD, gpu.first_plan(target, call)))
    jax.block_until_ready(run(*arrays))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            jax.block_until_ready(run(*arrays))
    ran = kernels(tmp_path)
    assert len(ran) == 3, ran
    assert len(set(ran)) == 1


REPLAYS = 50


def replay(buffers: bool) -> dict[str, Any]:
    """Runs replay_step.py in a process with command buffers on or off."""
    flags = (
        "--xla_gpu_graph_min_graph_size=1 "
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL"
        if buffers
        else "--xla_gpu_enable_command_buffer="
    )
    done = subprocess.run(
        [sys.executable, HERE / "replay_step.py", str(REPLAYS)],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(HERE.parents[1]),
                          "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("buffers", [True, False])
def test_a_step_replayed_gives_the_same_bits(buffers: bool) -> None:
    result = replay(buffers)
    assert len(result["digests"]) == REPLAYS
    assert len(set(result["digests"])) == 1
    assert result["right"]
    for pool in result["pools"]:
        if buffers:  # captured, and from then on launched with the graph, without the handler
            assert pool["captured"] > 0
            assert pool["leases"] < REPLAYS
        else:
            assert pool["captured"] == 0
            assert pool["leases"] >= REPLAYS


def test_two_threads_agree_with_running_alone(rng: np.random.Generator) -> None:
    """Two functions, each run by two threads at once, on one device."""
    functions, alone = [], []
    for target in (GATE_UP, DOWN):
        call = stage_call(target, 7)
        arrays = gpu.operands(rng, call, LEAD)
        run = jax.jit(gpu.handler(target, call, LEAD, gpu.first_plan(target, call)))
        alone.append([np.asarray(a) for a in run(*arrays)])
        functions.append((run, arrays))

    wrong: list[str] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        run, arrays = functions[index]
        start.wait()
        for turn in range(40):
            for got, want in zip(run(*arrays), alone[index], strict=True):
                if not np.array_equal(np.asarray(got), want):
                    wrong.append(f"function {index}, turn {turn}")

    threads = [threading.Thread(target=work, args=(k % 2,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for target in (GATE_UP, DOWN):
        call = stage_call(target, 7)
        pool = gpu.pool(gpu.TARGETS[target], call, gpu.first_plan(target, call))
        assert 1 <= pool["pairs"] <= 4
        assert pool["leases"] >= 81


@pytest.mark.gpu(count=2)
def test_two_devices(rng: np.random.Generator) -> None:
    devices = jax.local_devices(backend="cuda")
    call = stage_call(GATE_UP, 7)
    arrays = gpu.operands(rng, call, LEAD)
    plan = gpu.first_plan(GATE_UP, call)
    run = jax.jit(gpu.handler(GATE_UP, call, LEAD, plan))
    there = [jax.device_put(arrays, device) for device in devices[:2]]
    both = [run(*there[k % 2]) for k in range(10)]
    for k, got in enumerate(both):
        assert {a.device for a in got} == {devices[k % 2]}
        for a, b in zip(got, both[0], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for device in devices[:2]:
        assert gpu.pool("gate_up", call, plan, device.local_hardware_id)["pairs"] >= 1

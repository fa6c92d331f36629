"""Two real processes through jax.distributed, with collectives between them."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

PROCESSES = 2
TIMEOUT_S = 200
ATTEMPTS = 3
"""A free port can be taken by somebody else before the processes listen on it."""
HERE = Path(__file__).parent
SIZES = {"dp": "(16, 16, 32)", "dp x tp": "(32, 16, 16)", "fsdp x tp": "(32, 16, 16)"}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("plan", SIZES)
def test_training_on_one_mesh_over_two_processes(plan):
    """Losses equal plain JAX on one device; each process's calls are at local shapes."""
    for out in _outputs("two_processes.py", plan):
        assert re.search(r"process \d losses \[.*\] sizes \{" + re.escape(SIZES[plan]) + r"\}", out)


@pytest.mark.parametrize("order", ["0", "1", "both"])
def test_what_one_process_measured_every_process_takes(order):
    said = " ".join(_outputs("two_tuners.py", order))
    taken = re.findall(r"process \d takes (\d) after (\d) trials", said)
    assert len(taken) == PROCESSES
    assert len({kernel for kernel, _ in taken}) == 1
    if order != "both":
        assert {kernel for kernel, _ in taken} == {order}
        assert sorted(trials for _, trials in taken) == ["0", "1"]


def _outputs(script: str, argument: str) -> list[str]:
    """What each process printed; all must end well."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
    }
    for _ in range(ATTEMPTS):
        said = _run(env, script, argument)
        if not any("ddress already in use" in err for _, _, err in said):
            break
    for code, _, err in said:
        assert code == 0, err
    return [out for _, out, _ in said]


def _run(env: dict[str, str], script: str, argument: str) -> list[tuple[int, str, str]]:
    """Each process's exit status, output and errors; where one fails, the others are ended."""
    port = str(_free_port())
    with tempfile.TemporaryDirectory() as directory:
        files = [[Path(directory) / f"{k}.{name}" for name in ("out", "err")]
                 for k in range(PROCESSES)]  # fmt: skip
        running = [
            subprocess.Popen(
                [sys.executable, HERE / script, port, str(PROCESSES), str(k), argument],
                env=env, stdout=out.open("w"), stderr=err.open("w"),
            )
            for k, (out, err) in enumerate(files)
        ]  # fmt: skip
        try:
            end = time.monotonic() + TIMEOUT_S
            while time.monotonic() < end:
                codes = [process.poll() for process in running]
                if None not in codes or any(codes):  # all done, or one failed
                    break
                time.sleep(0.1)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return [
            (process.returncode, out.read_text(), err.read_text())
            for process, (out, err) in zip(running, files, strict=True)
        ]

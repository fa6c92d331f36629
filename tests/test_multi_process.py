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
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
    }
    for _ in range(ATTEMPTS):
        said = _run(env, plan)
        if not any("ddress already in use" in err for _, _, err in said):
            break
    for code, out, err in said:
        assert code == 0, err
        assert re.search(r"process \d losses \[.*\] sizes \{" + re.escape(SIZES[plan]) + r"\}", out)


def _run(env: dict[str, str], plan: str) -> list[tuple[int, str, str]]:
    """Each process's exit status, output and errors; where one fails, the others are ended."""
    port = str(_free_port())
    with tempfile.TemporaryDirectory() as directory:
        files = [[Path(directory) / f"{k}.{name}" for name in ("out", "err")]
                 for k in range(PROCESSES)]  # fmt: skip
        running = [
            subprocess.Popen(
                [sys.executable, HERE / "two_processes.py", port, str(PROCESSES), str(k), plan],
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

"""Two real processes through jax.distributed, with collectives between them."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROCESSES = 2
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
    port = str(_free_port())
    running = [
        subprocess.Popen(
            [sys.executable, HERE / "two_processes.py", port, str(PROCESSES), str(k), plan],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for k in range(PROCESSES)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, err) in zip(running, said, strict=True):
        assert process.returncode == 0, err
        assert re.search(r"process \d losses \[.*\] sizes \{" + re.escape(SIZES[plan]) + r"\}", out)

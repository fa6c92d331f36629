"""Time of the first call of a jitted step, in fresh processes: what tuning costs a user.

``python -m benchmarks.first_call plain|swiglu_jax M,H,I`` prints the seconds of one first call.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.absent import NotMade
from benchmarks.mlps import jax_mlps
from benchmarks.problems import Problem
from benchmarks.shapes import Shape, parse_shape

TIMEOUT = 240


def first_calls(shape: Shape, repeats: int = 3) -> dict[str, list[float]]:
    """Seconds of first calls: "plain", "cold" (empty tuning cache), "warm" (filled one).

    One process a number. XLA's own persistent compilation cache is off in all of them.

    Raises:
        NotMade: a process failed.
    """
    seconds: dict[str, list[float]] = {"plain": [], "cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as cache:
        seconds["cold"].append(_in_process("swiglu_jax", shape, cache))
        for _ in range(repeats):
            seconds["plain"].append(_in_process("plain", shape, cache))
            seconds["warm"].append(_in_process("swiglu_jax", shape, cache))
    return seconds


def _in_process(name: str, shape: Shape, cache: str) -> float:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {
        "SWIGLU_JAX_CACHE_DIR": cache,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", name, str(shape)],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if done.returncode:
        raise NotMade(f"first call of {name}: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def _main() -> None:
    name, shape = sys.argv[1], parse_shape(sys.argv[2])
    mlp = next(m for m in jax_mlps() if m.key == f"{name}/OI")
    problem = Problem(shape, seed=0, rotate=False)
    arguments: tuple[Any, ...] = problem.oi[0]
    jax.block_until_ready(arguments)  # the device is up, and a first program has run
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(mlp.step)(*arguments))
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    _main()

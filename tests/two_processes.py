"""One of the processes of tests/test_multi_process.py: a training run on a mesh over all of them.

Usage: two_processes.py PORT PROCESSES PROCESS PLAN
"""

import sys

import jax
import numpy as np
import pytest
from cpu_fused import fused_on_cpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh, op
from support import plain, problem

SPECS = {
    "dp": (P(("dp", "tp")), P(), P(), P()),
    "dp x tp": (P("dp"), P("tp"), P("tp"), P(None, "tp")),
    # The axis that spans processes divides the weights, too.
    "fsdp x tp": (P("dp"), P("tp", "dp"), P("tp", "dp"), P("dp", "tp")),
}
ROWS, WIDTH, HIDDEN, STEPS, RATE = 64, 16, 32, 3, 0.5


def train(f, x, weights):
    @jax.jit
    def step(x, weights):
        def loss(weights):
            return ((f(x, *weights) - x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return value, [w - RATE * g for w, g in zip(weights, gradients, strict=True)]

    losses = []
    for _ in range(STEPS):
        value, weights = step(x, weights)
        losses.append(float(value))
    return losses


def main(port: str, processes: str, process: str, plan: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", int(processes), int(process), initialization_timeout=60
    )
    assert jax.process_count() == int(processes)
    local = len(jax.local_devices())
    on = mesh(dp=int(processes) * local // 2, tp=2)
    arrays = problem(np.random.default_rng(7), (ROWS,), WIDTH, HIDDEN)  # the same everywhere
    placed = [
        jax.make_array_from_callback(a.shape, NamedSharding(on, s), np.asarray(a).__getitem__)
        for a, s in zip(arrays, SPECS[plan], strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch, fused_on_cpu(patch) as fused:
        losses = train(op(), placed[0], placed[1:])
        sizes = {c.sizes for c in fused.take_calls()}
    theirs = train(plain, arrays[0], list(arrays[1:]))
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    assert losses[-1] < losses[0]
    print(f"process {process} losses {losses} sizes {sizes}")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

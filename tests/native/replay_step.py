"""Runs a jitted training step many times with other allocations between; run by a GPU test.

Prints JSON: a digest of every replay's results, that they were right, and what the pools of the
two fused calls counted by then.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).parent))
import gpu

from swiglu_jax._candidate import StageCall

LEAD, M, H, I = (2, 128), 256, 256, 512  # noqa: E741
GATE_UP, DOWN = "swiglu_jax_cudnn_gate_up", "swiglu_jax_cudnn_down_dswiglu"
FORWARD = StageCall("gate_up", ("h", "gate", "up"), "OI", "bfloat16", M, H, I)
BACKWARD = StageCall("down_dswiglu", ("dgate", "dup", "h"), "OI", "bfloat16", M, H, I)


def main() -> None:
    rng = np.random.default_rng()
    plans = gpu.first_plan(GATE_UP, FORWARD), gpu.first_plan(DOWN, BACKWARD)
    forward = gpu.handler(GATE_UP, FORWARD, LEAD, plans[0])
    backward = gpu.handler(DOWN, BACKWARD, LEAD, plans[1])

    @jax.jit
    def step(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        h, gate, up = forward(x, w_gate, w_up)
        dy = jnp.tanh(h @ w_down.T)
        dgate, dup, again = backward(dy, w_down, gate, up)
        dx = dgate @ w_gate + dup @ w_up
        return h, dy, dgate, dup, again, dx

    x, w_gate, w_up = gpu.operands(rng, FORWARD, LEAD)
    w_down = gpu.operands(rng, BACKWARD, LEAD)[1]
    digests = []
    for turn in range(int(sys.argv[1])):
        results = jax.block_until_ready(step(x, w_gate, w_up, w_down))
        digest = hashlib.sha256()
        for result in results:
            digest.update(np.asarray(result).tobytes())
        digests.append(digest.hexdigest())
        # Memory that comes and goes in other sizes, so that the step's buffers move.
        del results
        other = jnp.full((turn % 7 + 1, 1 << 18), turn, jnp.float32) * 2
        other.block_until_ready()
    pools = gpu.pool("gate_up", FORWARD, plans[0]), gpu.pool("down_dswiglu", BACKWARD, plans[1])
    h, dy, dgate, dup, again, _ = step(x, w_gate, w_up, w_down)
    gate, up = forward(x, w_gate, w_up)[1:]
    gpu.check(FORWARD, (x, w_gate, w_up), (h, gate, up))
    gpu.check(BACKWARD, (dy, w_down, gate, up), (dgate, dup, again))
    print(json.dumps({"pools": pools, "digests": digests, "right": True}))


if __name__ == "__main__":
    main()

"""One of the processes of tests/test_multi_process.py: it measures a call, and chooses.

Usage: two_tuners.py PORT PROCESSES PROCESS ORDER, where ORDER has the process that comes first, or
"both". Each finds the kernel of its own number the fastest.
"""

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import jax
import pytest

from swiglu_jax import _timing, _tuning
from swiglu_jax._candidate import Candidate, StageCall
from swiglu_jax._measurement import Measurement

CALL = StageCall("gate_up", ("h",), "OI", "bfloat16", m=256, h=64, i=128)
CANDIDATES = [Candidate("exported", name, "target", (), ("h",)) for name in ("0", "1")]


def main(port: str, processes: str, process: str, order: str) -> None:
    jax.distributed.initialize(
        f"localhost:{port}", int(processes), int(process), initialization_timeout=60
    )
    trials = []

    def measure(call, candidates, device):
        trials.append(call)
        time.sleep(1 if order == "both" else 0)  # so that both are at it
        return Measurement(
            100.0, tuple((c, 50.0 if c.kernel == process else 80.0) for c in candidates)
        )

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as cache:
        config = dataclasses.replace(_tuning.config, tune=True, cache_dir=Path(cache))
        patch.setattr(_tuning, "config", config)
        patch.setattr(_tuning, "local_gpu_target", lambda: "sm_90a")
        patch.setattr(_tuning, "_machine", lambda device: {"device": process})
        patch.setattr(_timing, "measure", measure)
        devices = jax.local_devices()
        patch.setattr(jax, "local_devices", lambda backend=None: devices)
        if order != "both" and order != process:
            time.sleep(3)
        winner, _ = _tuning.decide(CALL, CANDIDATES, "sm_90a", fused=False)
    assert winner is not None
    print(f"process {process} takes {winner.kernel} after {len(trials)} trials")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Replays exported kernels with XLA's command buffers on; a line for each that was right.

Run as a file, with the flags that make XLA capture. A profile of the last runs must show launches
of graphs: without them nothing was replayed.
"""

import gzip
import json
import secrets
import tempfile
from pathlib import Path

import jax
import numpy as np
import test_gpu_launcher as launcher_tests


def names_in(trace: Path) -> set[str]:
    (path,) = trace.glob("**/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("ph") == "X"}


def main() -> None:
    seed = secrets.randbits(32)
    for variant in launcher_tests.SAMPLE:
        rng = np.random.default_rng(seed)
        launcher_tests.replay(rng, variant)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                launcher_tests.replay(rng, variant)
            names = names_in(Path(folder))
        graphs = {name for name in names if "graphlaunch" in name.lower()}
        assert graphs, f"XLA replayed no graph: {sorted(names)}"
        print(variant.name, f"seed {seed}", *graphs, flush=True)


main()

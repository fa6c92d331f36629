"""Replays exported kernels with XLA's command buffers on; a line for each that was right."""

import secrets

import numpy as np
import test_gpu_launcher as launcher_tests


def main() -> None:
    seed = secrets.randbits(32)
    for variant in launcher_tests.SAMPLE:
        text = launcher_tests.replay(np.random.default_rng(seed), variant)
        assert "command_buffer" in text, "XLA captured nothing"
        print(variant.name, f"seed {seed}", flush=True)


main()

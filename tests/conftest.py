"""Shared set-up: eight virtual CPU devices, fresh random data, GPU tests that say why they skip."""

import os
import secrets

# Before JAX starts: sharding tests need several devices, and a CPU can pose as eight.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np
import pytest

REQUIRE_GPU = "SWIGLU_JAX_REQUIRE_GPU"
"""Set by ``make gpu``: there a GPU test that cannot run is a failure, not a skip."""


def _gpus() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _gpus() or os.environ.get(REQUIRE_GPU) == "1":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; JAX sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random numbers; SWIGLU_JAX_TEST_SEED repeats a run that failed."""
    seed = int(os.environ.get("SWIGLU_JAX_TEST_SEED") or secrets.randbits(32))
    request.node.add_report_section("setup", "seed", f"SWIGLU_JAX_TEST_SEED={seed}")
    return np.random.default_rng(seed)

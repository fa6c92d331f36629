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

from swiglu_jax._device import local_gpu_target

REQUIRE_GPU = "SWIGLU_JAX_REQUIRE_GPU"
"""Set by ``make gpu``: there a GPU test that cannot run is a failure, not a skip."""
NO_GPU = "needs an NVIDIA GPU; JAX sees none here"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; drop those that are for other GPUs than are here.

    Dropped and not skipped: on a GPU machine a skip is a failure, since it hides what should run.
    """
    target = local_gpu_target()
    count = len(jax.local_devices(backend="cuda")) if target else 0
    elsewhere = []
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        if target is None:
            if os.environ.get(REQUIRE_GPU) != "1":
                item.add_marker(pytest.mark.skip(reason=NO_GPU))
        elif count < marker.kwargs.get("count", 1) or target not in marker.kwargs.get(
            "targets", (target,)
        ):
            elsewhere.append(item)
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in set(elsewhere)]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random numbers; SWIGLU_JAX_TEST_SEED repeats a run that failed."""
    seed = int(os.environ.get("SWIGLU_JAX_TEST_SEED") or secrets.randbits(32))
    request.node.add_report_section("setup", "seed", f"SWIGLU_JAX_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def on_cpu():
    """Run a module's tests on (virtual) CPU devices, also where there is a GPU."""
    before = jax.config.jax_default_device
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    yield
    jax.config.update("jax_default_device", before)


@pytest.fixture(scope="module")
def fused_cpu_module(on_cpu):
    """The fused lowering on the CPU, for as long as a module's tests run (cpu_fused.py)."""
    from cpu_fused import fused_on_cpu  # noqa: PLC0415 (compiles and registers handlers)

    with pytest.MonkeyPatch.context() as patch, fused_on_cpu(patch) as fused:
        yield fused


@pytest.fixture
def fused_cpu(fused_cpu_module):
    """The same for one test: every call served, and no calls on record yet."""
    fused_cpu_module.__init__()
    fused_cpu_module.take_calls()
    return fused_cpu_module


@pytest.fixture(params=["xla", "fused"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Both ways of running a stage; "fused" through handlers on the CPU."""
    if request.param == "fused":
        request.getfixturevalue("fused_cpu")
    return request.param


@pytest.fixture
def fused_cuda(fused_cpu, monkeypatch):
    """The test route offered to CUDA lowerings, from a machine that need not have a GPU."""
    from swiglu_jax import _native  # noqa: PLC0415 (where the native library is not built, too)

    monkeypatch.setattr(_native, "register", lambda: None)
    return fused_cpu

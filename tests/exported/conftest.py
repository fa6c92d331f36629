"""The shipped library and kernels, and the recording driver to put under them."""

import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swiglu_jax import _native
from swiglu_jax.kernels import _manifest

HERE = Path(__file__).parent
sys.path.append(str(HERE))
sys.path.append(str(HERE.parents[1] / "ffi"))


@pytest.fixture(scope="session", autouse=True)
def shipped() -> None:
    """Kernels and the native library are there, wherever they can be built."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("exported kernels are for Linux on x86-64")
    assert _native.LIBRARY.exists(), "run `make build` first"
    assert _manifest.MANIFEST.exists(), "run `make kernels` first"


def _compile(compiler: list[str], source: str, target: Path, *includes: str) -> None:
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra"]
    paths = [flag for include in includes for flag in ("-isystem", include)]
    subprocess.run(
        [*compiler, *flags, *paths, HERE / source, "-o", target, "-lpthread"], check=True
    )


@pytest.fixture(scope="session")
def recording_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recording libcuda.so.1 and the stand-in for XLA."""
    import jax  # noqa: PLC0415

    spec = importlib.util.spec_from_file_location("headers", HERE.parents[1] / "ffi/headers.py")
    assert spec is not None and spec.loader is not None
    headers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(headers)
    cuda = headers.include_folder("nvidia-cuda-runtime", "cuda.h")
    folder = tmp_path_factory.mktemp("recording")
    _compile(
        ["gcc", "-fvisibility=hidden"], "recording_driver.c", folder / "libcuda.so.1", str(cuda)
    )
    xla = jax.ffi.include_dir()
    _compile(["g++", "-std=c++17"], "call_frame.cc", folder / "frame.so", xla)
    return folder


@pytest.fixture(scope="session")
def recorder_of(recording_build: Path) -> Iterator[Callable]:
    """recorder_of(arch, devices=1): a Recorder, one process for all tests of the session."""
    from exported_recorder import Recorder  # noqa: PLC0415 - found through sys.path

    made: dict[tuple[str, int], Recorder] = {}

    def recorder_of(arch: str, devices: int = 1) -> Recorder:
        key = (arch, devices)
        if key not in made:
            made[key] = Recorder(recording_build, arch, devices)
        return made[key]

    yield recorder_of
    for recorder in made.values():
        recorder.close()

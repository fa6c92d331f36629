"""The built library, a stub driver under it, and a caller that stands in for XLA."""

import ctypes
import platform
import subprocess
from pathlib import Path

import jax
import pytest

from swiglu_jax import _native

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the native library is for Linux on x86-64")
    return _native.load()


@pytest.fixture(scope="session")
def stub_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a libcuda.so.1 under which nothing fails and nothing runs."""
    folder = tmp_path_factory.mktemp("stub")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", folder / "libcuda.so.1", HERE / "stub_driver.c",
         "-ldl"],
        check=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of call_frame.cc, which calls a handler as XLA would."""
    built = tmp_path_factory.mktemp("caller") / "libcall_frame.so"
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", "-I", jax.ffi.include_dir(), "-o", built,
         HERE / "call_frame.cc"],
        check=True,
    )  # fmt: skip
    return built

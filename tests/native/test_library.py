"""The shared library: what it shows, what it needs, and what it does not hold."""

import ctypes
import math
import re
import secrets
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from swiglu_jax import _native


def dynamic_symbols(path: Path, *options: str) -> set[str]:
    done = subprocess.run(["nm", "-D", *options, path], check=True, capture_output=True, text=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}


def needed(path: Path) -> set[str]:
    done = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True)
    return {line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "NEEDED" in line}


def test_exports_only_names_of_its_own(library: ctypes.CDLL) -> None:
    defined = dynamic_symbols(_native.LIBRARY, "--defined-only")
    assert "swiglu_jax_abi_version" in defined
    assert {name for name in defined if not name.startswith("swiglu_jax_")} == set()


def test_every_ffi_target_of_the_cudnn_route_is_there(library: ctypes.CDLL) -> None:
    targets = [t for t in _native.FFI_TARGETS if "_cudnn_" in t]
    assert targets
    for target in targets:
        assert hasattr(library, target)
        assert hasattr(library, f"{target}_initialize")


def test_links_neither_cuda_nor_cudnn(library: ctypes.CDLL) -> None:
    foreign = {n for n in needed(_native.LIBRARY) if n.startswith(("libcu", "libnv", "libstdc"))}
    assert foreign == set()
    missing = dynamic_symbols(_native.LIBRARY, "--undefined-only")
    assert {n for n in missing if n.startswith(("cu", "nvrtc", "__cuda"))} == set()


def test_holds_no_cudart(library: ctypes.CDLL) -> None:
    # A sentence of every cudart, static or shared: the reason it gives for refusing a stub driver.
    assert b"CUDA driver is a stub library" not in _native.LIBRARY.read_bytes()


def version_needs(path: Path) -> set[tuple[str, tuple[int, ...]]]:
    """The versions of other libraries' symbols, as ("GLIBC", (2, 17))."""
    done = subprocess.run(["objdump", "-T", path], check=True, capture_output=True, text=True)
    found = re.findall(r"\*UND\*.*\(([A-Z_]+)_([0-9.]+)\)", done.stdout)
    return {(family, tuple(map(int, version.split(".")))) for family, version in found}


def of_jaxlib() -> tuple[int, ...]:
    """The glibc that jaxlib's wheel asks for."""
    (tags,) = {tag for tag in metadata.distribution("jaxlib").read_text("WHEEL").splitlines()
               if "manylinux" in tag}  # fmt: skip
    return tuple(map(int, re.search(r"manylinux_(\d+)_(\d+)_x86_64", tags).groups()))


def test_loads_wherever_jaxlib_does(library: ctypes.CDLL) -> None:
    """However new the system that built it; the kernels' libraries too."""
    for path in _native.LIBRARY.parent.glob("*.so"):
        # libgcc is the system's, and 4.8 that of the oldest manylinux; libstdc++ is inside.
        oldest = {"GLIBC": of_jaxlib(), "GCC": (4, 8)}
        too_new = {(f, v) for f, v in version_needs(path) if f not in oldest or v > oldest[f]}
        assert too_new == set(), path.name
    assert ("GLIBC", (2, 2, 5)) in version_needs(_native.LIBRARY)


OLD_GLIBC = r"""
#include <cmath>
#include <dlfcn.h>
#include <fstream>
#include <mutex>
#include <stdexcept>

extern "C" {
long bytes_of(const char* path) { return std::ifstream(path).rdbuf()->in_avail(); }
int times_called() {
  int times = 0;
  std::once_flag flag;
  for (int k = 0; k < 3; ++k) std::call_once(flag, [&] { ++times; });
  return times;
}
double exponential(double x) { return std::exp(x); }
const char* missing(const char* name) { dlopen(name, RTLD_NOW); return dlerror(); }
const char* own_file() {
  static Dl_info info;
  return dladdr(reinterpret_cast<void*>(own_file), &info) ? info.dli_fname : "";
}
double through_a_symbol(double x) {
  void* math = dlopen("libm.so.6", RTLD_NOW);
  const double y = reinterpret_cast<double (*)(double)>(dlsym(math, "sin"))(x);
  return dlclose(math) == 0 ? y : NAN;
}
int caught() {
  try { throw std::runtime_error("here"); } catch (const std::exception& e) { return *e.what(); }
}
}
"""


def test_old_symbols_do_what_the_new_ones_do(tmp_path: Path) -> None:
    """ffi/old_glibc.cc in a library of its own, linked with the flags of CMakeLists.txt."""
    root = Path(__file__).parents[2]
    text = (root / "CMakeLists.txt").read_text()
    wrapped = re.search(r"foreach\(symbol IN ITEMS ([\w ]+)\)", text)[1].split()
    source, path = tmp_path / "uses.cc", tmp_path / "uses.so"
    source.write_text(OLD_GLIBC)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-static-libstdc++", "-Wl,--gc-sections",
         "-Wl,--exclude-libs,ALL", source, root / "ffi" / "old_glibc.cc",
         *(f"-Wl,--wrap={symbol}" for symbol in wrapped), "-o", path],
        check=True,
    )  # fmt: skip
    assert max(version for family, version in version_needs(path) if family == "GLIBC") <= (2, 27)
    uses = ctypes.CDLL(str(path))
    uses.bytes_of.restype = ctypes.c_long
    for function in (uses.exponential, uses.through_a_symbol):
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
    for function in (uses.missing, uses.own_file):
        function.restype = ctypes.c_char_p
    x = secrets.randbelow(1000) / 500 - 1
    assert uses.bytes_of(bytes(source)) == source.stat().st_size
    assert uses.bytes_of(bytes(tmp_path / "none")) == -1
    assert uses.times_called() == 1
    assert uses.exponential(x) == pytest.approx(math.exp(x), rel=1e-14)
    assert uses.through_a_symbol(x) == pytest.approx(math.sin(x), rel=1e-14)
    assert b"libnone.so" in uses.missing(b"libnone.so")
    assert uses.own_file() == bytes(path)
    assert uses.caught() == ord("h")


def test_registers_once_and_again(library: ctypes.CDLL) -> None:
    _native.register()
    _native.register()


def test_reports_the_version_of_cudnn(library: ctypes.CDLL) -> None:
    version = _native.call_json("swiglu_jax_cudnn_version")["version"]
    assert version >= 91000


@pytest.mark.parametrize(("field", "value", "said"), [
    ("graph", b"down", "graph: expected gate_up, down_dswiglu, dgrad or dswiglu, got down"),
    ("outputs", 0, "outputs: expected a bitmask of 1 to 7, got 0"),
    ("outputs", 8, "outputs: expected a bitmask of 1 to 7, got 8"),
    ("weight_layout", b"OO", "weight_layout: expected OI or IO, got OO"),
    ("dtype", b"float32", "dtype: expected bfloat16 or float16, got float32"),
    ("m", 0, "m: expected 1 to 2147483647, got 0"),
    ("h", 1 << 31, "h: expected 1 to 2147483647, got 2147483648"),
    ("i", -8, "i: expected 1 to 2147483647, got -8"),
])  # fmt: skip
def test_a_graph_that_is_none_is_named(
    library: ctypes.CDLL, field: str, value: object, said: str
) -> None:
    graph = _native.Graph(b"gate_up", 7, b"OI", b"bfloat16", 64, 128, 256)
    setattr(graph, field, value)
    for function, arguments in (
        ("swiglu_jax_cudnn_build", (b"{}", 90, b"")),
        ("swiglu_jax_cudnn_tune", (0, 0, 0)),
        ("swiglu_jax_cudnn_pool", (0, b"")),
    ):
        with pytest.raises(RuntimeError, match=said):
            _native.call_json(function, graph, *arguments)


def test_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "LIBRARY", tmp_path / "libswiglu_jax.so")
    _native._load.cache_clear()
    try:
        assert not _native.available()
        assert "make build" in str(_native.unavailable_reason())
        with pytest.raises(_native.NativeUnavailable, match="make build"):
            _native.load()
    finally:
        monkeypatch.undo()
        _native._load.cache_clear()


def test_refuses_a_library_of_another_version(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "ABI_VERSION", _native.ABI_VERSION + 1)
    _native._load.cache_clear()
    try:
        assert "make build" in str(_native.unavailable_reason())
    finally:
        monkeypatch.undo()
        _native._load.cache_clear()


def test_refuses_a_library_that_lacks_a_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a checkout from before a stage was added; or no library of this package at all."""
    source = tmp_path / "older.c"
    for text, missing in (
        (f"int swiglu_jax_abi_version(void) {{ return {_native.ABI_VERSION}; }}",
         f"{_native.FFI_TARGETS[0]}_initialize"),
        ("int unrelated;", "swiglu_jax_abi_version"),
    ):  # fmt: skip
        source.write_text(text)
        # A name of its own: the loader keeps what it has opened once.
        path = tmp_path / f"lib{missing}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", path], check=True)
        monkeypatch.setattr(_native, "LIBRARY", path)
        _native._load.cache_clear()
        try:
            reason = str(_native.unavailable_reason())
            assert f"it has no {missing}" in reason and "make build" in reason
        finally:
            monkeypatch.undo()
            _native._load.cache_clear()


def test_refuses_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libswiglu_jax.so"
    path.write_text("no ELF")
    monkeypatch.setattr(_native, "LIBRARY", path)
    _native._load.cache_clear()
    try:
        assert "can't be loaded" in str(_native.unavailable_reason())
    finally:
        monkeypatch.undo()
        _native._load.cache_clear()

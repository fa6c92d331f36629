"""The shared library: what it shows, what it needs, and what it does not hold."""

import ctypes
import subprocess
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

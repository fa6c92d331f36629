"""Finds, loads and registers the native library.

The library (``ffi/``) is optional: without it, on machines it is not built for, everything runs
through XLA, and the fused routes decline with the reason kept here.
"""

import ctypes
import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax

from swiglu_jax.kernels import _manifest

LIBRARY = Path(__file__).parent / "lib" / "libswiglu_jax.so"
ABI_VERSION = 1
"""Must equal SWIGLU_JAX_ABI_VERSION of ffi/swiglu_jax.h."""

PLATFORM = "CUDA"
FFI_TARGETS = (
    "swiglu_jax_cudnn_gate_up",
    "swiglu_jax_cudnn_down_dswiglu",
    "swiglu_jax_cudnn_down_dswiglu_two_step",
    "swiglu_jax_exported_gate_up",
    "swiglu_jax_exported_down_dswiglu",
    "swiglu_jax_exported_input_gradient",
    "swiglu_jax_exported_weight_gradients",
)
"""Each a C symbol, with ``_initialize`` behind it for what runs before every execution."""

ADVICE = "on Linux x86-64 reinstall the package with gcc at hand, or `make build` a checkout"
"""What to do where it is unavailable."""


class NativeUnavailable(RuntimeError):
    """The native library can't be used here; the text says why and what to do."""


class Graph(ctypes.Structure):
    """``swiglu_jax_graph`` of ffi/swiglu_jax.h: one cuDNN graph at one shape."""

    _fields_ = (
        ("graph", ctypes.c_char_p),
        ("outputs", ctypes.c_int64),
        ("weight_layout", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("m", ctypes.c_int64),
        ("h", ctypes.c_int64),
        ("i", ctypes.c_int64),
    )


@functools.cache
def _load() -> ctypes.CDLL | NativeUnavailable:
    if not LIBRARY.exists():
        return NativeUnavailable(
            f"the native library is not built ({LIBRARY} is missing); it is for Linux on x86-64: "
            "run `make build` in a checkout, or reinstall the package"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return NativeUnavailable(f"the native library can't be loaded: {error}")
    # A symbol of its own for each stage of a target: an older build may lack some.
    wanted = ["swiglu_jax_abi_version", *(s for t in FFI_TARGETS for s in _stages(t).values())]
    missing = [symbol for symbol in wanted if not hasattr(library, symbol)]
    version = None if wanted[0] in missing else library.swiglu_jax_abi_version()
    if version != ABI_VERSION or missing:
        found = f"ABI {version}, expected {ABI_VERSION}"
        if missing:
            found += f"; it has no {missing[0]}"
        return NativeUnavailable(
            f"{LIBRARY} is of another version ({found}); run `make build` again"
        )
    _declare(library)
    library.swiglu_jax_cudnn_set_library(_cudnn_path().encode())
    return library


def _stages(target: str) -> dict[str, str]:
    """The C symbol of each of a target's stages."""
    return {"initialize": f"{target}_initialize", "execute": target}


def _declare(library: ctypes.CDLL) -> None:
    text = ctypes.c_void_p  # not c_char_p, which would lose the pointer that must be freed
    graph = ctypes.POINTER(Graph)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "swiglu_jax_free": (None, [ctypes.c_void_p]),
        "swiglu_jax_cudnn_set_library": (None, [ctypes.c_char_p]),
        "swiglu_jax_exported_add_library": (None, [ctypes.c_char_p]),
        "swiglu_jax_cudnn_version": (text, []),
        "swiglu_jax_cudnn_build": (
            text,
            [graph, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p],
        ),
        "swiglu_jax_cudnn_tune": (text, [graph, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
        "swiglu_jax_cudnn_pool": (text, [graph, ctypes.c_int, ctypes.c_char_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def _cudnn_path() -> str:
    """libcudnn of the wheel that JAX itself uses, or its soname where no wheel is installed."""
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "libcudnn.so.9":
                return str(file.locate())
    return "libcudnn.so.9"


def load() -> ctypes.CDLL:
    """The library, with its functions declared. Raises NativeUnavailable with the reason."""
    loaded = _load()
    if isinstance(loaded, NativeUnavailable):
        raise loaded
    return loaded


def available() -> bool:
    """Whether the library is there and loads."""
    return not isinstance(_load(), NativeUnavailable)


def unavailable_reason() -> str | None:
    """Why the library can't be used, or None where it can."""
    loaded = _load()
    return str(loaded) if isinstance(loaded, NativeUnavailable) else None


def call_json(function: str, *arguments: Any) -> dict[str, Any]:
    """Call a C function that answers with JSON text.

    Raises:
        NativeUnavailable: where there is no library.
        RuntimeError: with the library's reason, where it has no answer.
    """
    library = load()
    pointer = getattr(library, function)(*arguments)
    try:
        answer = json.loads(ctypes.string_at(pointer).decode())
    finally:
        library.swiglu_jax_free(pointer)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


@functools.cache
def register() -> None:
    """Register every FFI target of the library for CUDA; calls after the first do nothing.

    The launcher of exported kernels learns here where their libraries are.

    Raises:
        NativeUnavailable: where there is no library.
    """
    library = load()
    for path in _manifest.installed().libraries():
        library.swiglu_jax_exported_add_library(str(path).encode())
    for target in FFI_TARGETS:
        handlers = {
            stage: jax.ffi.pycapsule(getattr(library, symbol))
            for stage, symbol in _stages(target).items()
        }
        jax.ffi.register_ffi_target(target, handlers, platform=PLATFORM)

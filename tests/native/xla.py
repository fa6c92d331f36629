"""Calls the cudnn route's handlers as XLA does, through call_frame.cc."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# XLA_FFI_DataType and XLA_FFI_ExecutionStage of jaxlib's c_api.h.
DTYPES = {"uint8": 6, "float16": 10, "float32": 11, "bfloat16": 16}
STAGES = {"initialize": 2, "execute": 3}
COMMAND_BUFFER_COMPATIBLE = 1

_ADDRESS = 0x7000_0000_0000
"""Where made-up buffers lie, a gigabyte apart; nothing dereferences them."""


@dataclass(frozen=True)
class Buffer:
    dtype: str
    dims: tuple[int, ...]
    address: int | None = None


class _CBuffer(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
    )


class Caller:
    """One native library, seen from XLA's side."""

    def __init__(self, caller: Path, library: Path) -> None:
        self._caller = ctypes.CDLL(str(caller))
        self._library = ctypes.CDLL(str(library))
        self._caller.call.restype = ctypes.c_void_p

    def traits(self, target: str) -> int:
        """The traits that the handler tells XLA at registration."""
        return self._caller.traits(getattr(self._library, target))

    def call(
        self,
        target: str,
        operands: Sequence[Buffer],
        results: Sequence[Buffer],
        *,
        outputs: int,
        weight_layout: str = "OI",
        plan: str = "",
        stage: str = "execute",
    ) -> str:
        """The handler's error text, or an empty one."""
        symbol = target if stage == "execute" else f"{target}_{stage}"
        buffers = [*operands, *results]
        dims = [(ctypes.c_int64 * max(1, len(b.dims)))(*b.dims) for b in buffers]
        made_up = [_ADDRESS + (k << 30) for k in range(len(buffers))]
        structs = (_CBuffer * max(1, len(buffers)))(
            *(
                _CBuffer(DTYPES[b.dtype], len(b.dims), d, a if b.address is None else b.address)
                for b, d, a in zip(buffers, dims, made_up, strict=True)
            )
        )
        rets = ctypes.byref(structs, ctypes.sizeof(_CBuffer) * len(operands))
        text = self._caller.call(
            getattr(self._library, symbol), STAGES[stage], ctypes.c_void_p(0xFEED00),
            ctypes.c_int64(len(operands)), structs, ctypes.c_int64(len(results)), rets,
            ctypes.c_int64(outputs), weight_layout.encode(), plan.encode(),
        )  # fmt: skip
        message = ctypes.string_at(text).decode()
        self._caller.release(ctypes.c_void_p(text))
        return message

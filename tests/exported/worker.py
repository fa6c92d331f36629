"""A process over the recording driver: calls handlers of the shipped library, answers in JSON.

Run as a file with LD_LIBRARY_PATH naming the folder of the recording libcuda.so.1. Arguments: the
native library, call_frame.cc built, and the kernel libraries to register. Each line of standard
input is a request, each line of standard output its answer.
"""

import ctypes
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Buffer(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_int64 * 4),
        ("data", ctypes.c_void_p),
    )


class Call(ctypes.Structure):
    _fields_ = (
        ("stage", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("ordinal", ctypes.c_int64),
        ("operand_count", ctypes.c_int64),
        ("result_count", ctypes.c_int64),
        ("buffers", ctypes.POINTER(Buffer)),
        ("outputs", ctypes.c_int64),
        ("weight_layout", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
    )


def main() -> None:
    native, frame = (ctypes.CDLL(path) for path in sys.argv[1:3])
    driver = ctypes.CDLL("libcuda.so.1")
    driver.recording_take.restype = ctypes.c_void_p
    frame.test_call.restype = ctypes.c_void_p
    frame.test_traits.restype = ctypes.c_int64

    def text(pointer: int, free: object) -> str:
        value = ctypes.string_at(pointer).decode()
        free(ctypes.c_void_p(pointer))
        return value

    for path in sys.argv[3:]:
        native.swiglu_jax_exported_add_library(path.encode())

    def call(request: dict[str, Any]) -> str:
        buffers = (Buffer * len(request["buffers"]))(
            *(
                Buffer(b["dtype"], len(b["dims"]), (ctypes.c_int64 * 4)(*b["dims"]), b["data"])
                for b in request["buffers"]
            )
        )
        given = Call(
            request["stage"], request["stream"], request["ordinal"], request["operands"],
            len(buffers) - request["operands"], buffers, request["outputs"],
            request["weight_layout"].encode(), request["kernel"].encode(),
        )  # fmt: skip
        handler = getattr(native, request["handler"])
        return text(frame.test_call(handler, ctypes.byref(given)), frame.test_free)

    def events() -> list[dict[str, Any]]:
        taken = text(driver.recording_take(), driver.recording_free)
        return [json.loads(event) for event in taken.splitlines()]

    for line in sys.stdin:
        request = json.loads(line)
        if "add_library" in request:
            native.swiglu_jax_exported_add_library(request["add_library"].encode())
            answer: dict[str, Any] = {}
        elif "traits" in request:
            answer = {"traits": frame.test_traits(getattr(native, request["traits"]))}
        elif "at_once" in request:
            # ctypes lets go of the interpreter's lock for the length of a call.
            driver.recording_fail(b"", 0)
            with ThreadPoolExecutor(len(request["at_once"])) as pool:
                errors = list(pool.map(call, request["at_once"]))
            answer = {"errors": errors, "events": events()}
        else:
            driver.recording_fail(request.get("fail", "").encode(), request.get("status", 0))
            answer = {"error": call(request), "events": events()}
        print(json.dumps(answer), flush=True)


main()

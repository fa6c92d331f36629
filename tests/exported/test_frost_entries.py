"""What the FROST entries check by themselves: above all that the pitch of gate and up is I."""

import ctypes
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from swiglu_jax.kernels import _linker, _manifest
from swiglu_jax.kernels._variant import KernelVariant

HERE = Path(__file__).parent
BACKWARD = [
    k.variant
    for k in _manifest.installed().kernels
    if k.variant.abi in ("frost", "frost_stg") and k.variant.stage == "down_dswiglu"
]
M, H, I = 300, 136, 208  # noqa: E741
K_CUDA, K_CPU = 2, 1
CODES = {"bfloat16": 4, "float16": 2}  # DLDataTypeCode


@dataclass(frozen=True)
class Tensor:
    data: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    code: int
    bits: int = 16
    device_type: int = K_CUDA
    device_id: int = 0


class CTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.c_int64 * 3),
        ("strides", ctypes.c_int64 * 3),
        ("code", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("device_type", ctypes.c_int64),
        ("device_id", ctypes.c_int64),
    )


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("probe") / "probe.so"
    kernels = Path(_linker.__file__).parent
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-I", kernels,
         "-isystem", _linker.tvm_ffi_include(), HERE / "entry_probe.cc", "-o", built, "-ldl"],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(built))
    library.probe.restype = ctypes.c_void_p
    return library


def arguments(variant: KernelVariant) -> tuple[list[int], dict[str, Tensor]]:
    """The right problem array and tensors of a backward kernel."""
    code = CODES[variant.dtype]
    b_strides = (1, I) if variant.weight_layout == "OI" else (H, 1)
    integers = [M, I, H, 1, H, 1, M * H, *b_strides, I * H, *[I, 1, M * I] * len(variant.outputs)]
    residuals = {"gate": ((1, M, I), (M * I, I, 1))}
    if {"dgate", "h"} & set(variant.outputs):
        residuals["up"] = residuals["gate"]
    outputs = {f"result {output}": ((M, I, 1), (I, 1, M * I)) for output in variant.outputs}
    first, last = (outputs, residuals) if variant.abi == "frost_stg" else (residuals, outputs)
    named = {
        "dy": ((M, H, 1), (H, 1, M * H)),
        "w_down": ((I, H, 1), (*b_strides, I * H)),
        **first,
        **last,
    }
    return integers, {
        name: Tensor((k + 1) << 32, shape, strides, code)
        for k, (name, (shape, strides)) in enumerate(named.items())
    }


def call(
    probe: ctypes.CDLL, variant: KernelVariant, integers: list[int], tensors: dict[str, Tensor]
) -> tuple[str, int]:
    """The entry's error text and how many kernels it launched."""
    three = ctypes.c_int64 * 3
    array = (CTensor * len(tensors))(
        *(
            CTensor(t.data, len(t.shape), three(*t.shape), three(*t.strides), t.code, t.bits,
                    t.device_type, t.device_id)
            for t in tensors.values()
        )
    )  # fmt: skip
    library = _manifest.LIB / _manifest.library_name(variant.arch)
    launched = ctypes.c_int64()
    pointer = probe.probe(
        str(library).encode(), variant.name.encode(), ctypes.c_int64(len(integers)),
        (ctypes.c_int64 * len(integers))(*integers), ctypes.c_int64(len(tensors)), array,
        ctypes.byref(launched),
    )  # fmt: skip
    text = ctypes.string_at(pointer).decode()
    probe.probe_free(ctypes.c_void_p(pointer))
    return text, launched.value


@pytest.mark.parametrize("variant", BACKWARD, ids=lambda v: v.name)
def test_a_pitch_other_than_i_is_refused(probe: ctypes.CDLL, variant: KernelVariant) -> None:
    """The rewritten kernel reads row r of gate and up at r * I, so no other pitch may pass."""
    integers, tensors = arguments(variant)
    assert call(probe, variant, integers, tensors) == ("", 1)
    for name in ("gate", "up"):
        if name not in tensors:
            continue
        padded = replace(tensors[name], strides=(M * (I + 16), I + 16, 1))
        text, launched = call(probe, variant, integers, tensors | {name: padded})
        assert launched == 0
        assert name in text and "stride" in text.lower(), text


WRONG = {
    "a column-major A": ("dy", {"strides": (1, M, M * H)}, "stride"),
    "A of another M": ("gate", {"shape": (1, M + 1, I), "strides": ((M + 1) * I, I, 1)}, "shape"),
    "gate of another I": ("gate", {"shape": (1, M, I + 16), "strides": (M * I, I + 16, 1)}, ""),
    "A of rank 2": ("dy", {"shape": (M, H), "strides": (H, 1)}, "ndim"),
    "float32": ("dy", {"code": 2, "bits": 32}, "dtype"),
    "integers": ("gate", {"code": 0}, "dtype"),
    "host memory": ("dy", {"device_type": K_CPU}, "device"),
    "another device": ("w_down", {"device_id": 1}, "device"),
    "A on an 8-byte boundary": ("dy", {"data": (1 << 32) + 8}, "align"),
    "gate on a 16-byte boundary": ("gate", {"data": (1 << 40) + 16}, "align"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused_with_a_reason(probe: ctypes.CDLL, case: str) -> None:
    name, changes, word = WRONG[case]
    for variant in BACKWARD[:: len(BACKWARD) // 6]:
        if "gate on a 16" in case and variant.residual_alignment == 16:
            continue
        integers, tensors = arguments(variant)
        changed = replace(tensors[name], **changes)
        text, launched = call(probe, variant, integers, tensors | {name: changed})
        assert launched == 0
        assert word in text.lower() and len(text) > 40, text


def test_i_must_be_a_multiple_of_16(probe: ctypes.CDLL) -> None:
    integers, tensors = arguments(BACKWARD[0])
    text, launched = call(probe, BACKWARD[0], [M, I + 8, *integers[2:]], tensors)
    assert launched == 0 and "divisible" in text, text

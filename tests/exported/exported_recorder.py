"""Calls an exported kernel through the shipped library, over the recording driver."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage_shapes import stage_shapes

from swiglu_jax import _native
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant, outputs_mask

HERE = Path(__file__).parent
DTYPES = {"uint8": 6, "float16": 10, "float32": 11, "bfloat16": 16}
"""XLA_FFI_DataType of jaxlib's c_api.h."""
STAGES = {"initialize": 2, "execute": 3}
"""XLA_FFI_ExecutionStage."""
MODELS = {"sm_90a": "H200", "sm_100a": "B200", "sm_103a": "B300", "sm_120a": "RTX"}
STREAM = 0xFEED00
BASE = 0x7000_0000_0000
SPACING = 1 << 40
"""Made-up buffers: far apart, nothing dereferences them."""


@dataclass(frozen=True)
class Buffer:
    name: str
    dims: tuple[int, ...]
    data: int
    dtype: str


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared: int
    stream: int
    device: int
    dependent: int
    loaded: bool
    parameters: list[Any]
    """Bytes of each kernel parameter, or the TensorMap that it is."""


@dataclass(frozen=True)
class TensorMap:
    address: int
    dtype: int
    interleave: int
    swizzle: int
    promotion: int
    fill: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, the element's own size first."""
    box: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass
class Recording:
    error: str
    launches: list[Launch] = field(default_factory=list)
    maps: list[TensorMap] = field(default_factory=list)
    loads: int = 0
    functions: list[int] = field(default_factory=list)
    """Devices on which a kernel was loaded ahead of its launch."""

    @property
    def launch(self) -> Launch:
        assert self.error == "", self.error
        assert len(self.launches) == 1, self.launches
        return self.launches[0]


def buffers_of(
    variant: KernelVariant, lead: Sequence[int], h: int, i: int
) -> tuple[list[Buffer], list[Buffer]]:
    """Operands and results of the stage's call, as XLA would hand them over."""
    operands, results = stage_shapes(variant, lead, h, i)
    named = [*operands.items(), *((f"result {name}", dims) for name, dims in results.items())]
    count = len(operands)
    made = [
        Buffer(name, dims, BASE + k * SPACING, variant.dtype)
        for k, (name, dims) in enumerate(named)
    ]
    return made[:count], made[count:]


class Recorder:
    """A process with the shipped library over a recording driver of one GPU model."""

    def __init__(self, built: Path, arch: str, devices: int = 1, libraries: bool = True) -> None:
        manifest = _manifest.installed()
        paths = [str(path) for path in manifest.libraries()] if libraries else []
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(built),
            "RECORDING_MODEL": MODELS[arch],
            "RECORDING_DEVICES": str(devices),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(_native.LIBRARY),
             str(built / "frame.so"), *paths],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process died with status {self._process.wait()} at {request}"
        return json.loads(line)

    def call(
        self,
        variant: KernelVariant,
        operands: Sequence[Buffer],
        results: Sequence[Buffer],
        *,
        stage: str = "execute",
        stream: int = STREAM,
        ordinal: int = 0,
        **changes: Any,
    ) -> Recording:
        """Call the variant's handler.

        ``changes`` overrides attributes (outputs, weight_layout, kernel), the handler, or makes
        a function of the driver fail (fail, status).
        """
        request = self.request(
            variant, operands, results, stage=stage, stream=stream, ordinal=ordinal
        )
        return _recording(self.ask(request | changes))

    @staticmethod
    def request(
        variant: KernelVariant,
        operands: Sequence[Buffer],
        results: Sequence[Buffer],
        *,
        stage: str = "execute",
        stream: int = STREAM,
        ordinal: int = 0,
    ) -> dict[str, Any]:
        """A call in the worker's words."""
        suffix = "" if stage == "execute" else f"_{stage}"
        buffers = [*operands, *results]
        return {
            "handler": f"swiglu_jax_exported_{variant.stage}{suffix}",
            "stage": STAGES[stage],
            "stream": stream,
            "ordinal": ordinal,
            "operands": len(operands),
            "buffers": [
                {"dtype": DTYPES[b.dtype], "dims": list(b.dims), "data": b.data} for b in buffers
            ],
            "outputs": outputs_mask(variant.stage, variant.outputs),
            "weight_layout": variant.weight_layout,
            "kernel": variant.name,
        }

    def run(
        self, variant: KernelVariant, lead: Sequence[int], h: int, i: int, **changes: Any
    ) -> Recording:
        """The right call of a variant at one shape."""
        return self.call(variant, *buffers_of(variant, lead, h, i), **changes)


def _recording(answer: dict[str, Any]) -> Recording:
    recording = Recording(answer["error"])
    by_number: dict[int, TensorMap] = {}
    for event in answer["events"]:
        kind = event.pop("event")
        if kind == "load":
            recording.loads += 1
        elif kind == "function":
            recording.functions.append(event["device"])
        elif kind == "map":
            sizes, strides, box, steps = (
                tuple(part) for part in zip(*event.pop("dims"), strict=True)
            )
            number = event.pop("map")
            by_number[number] = TensorMap(
                sizes=sizes, strides=strides, box=box, steps=steps, **event
            )
            recording.maps.append(by_number[number])
        else:
            parameters = [
                by_number[p["map"]] if isinstance(p, dict) else bytes.fromhex(p)
                for p in event.pop("parameters")
            ]
            for name in ("grid", "block", "cluster"):
                event[name] = tuple(event[name])
            recording.launches.append(Launch(parameters=parameters, **event))
    return recording


def integer(parameter: bytes) -> int:
    """A kernel parameter of 4 or 8 bytes as a number."""
    return struct.unpack({4: "<i", 8: "<q"}[len(parameter)], parameter)[0]

"""The fused lowering run for real on a CPU that poses as a GPU, and a record of its calls.

A provider that tests install offers one candidate a stage, whose FFI handlers (cpu_handlers.cc)
are plain loops compiled here; the lowering rule that users get for CUDA is registered for the CPU
too. Nothing of it reaches a process that does not ask for the ``fused_cpu`` fixture.
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax._src.interpreters.mlir as mlir_internal
import jaxlib
import pytest
from jax.interpreters import mlir

from swiglu_jax import _device, _providers, _routes, _tuning
from swiglu_jax._candidate import Candidate, Declined, StageCall
from swiglu_jax._stages import STAGES, _lowering
from swiglu_jax.kernels._variant import outputs_mask

SOURCE = Path(__file__).with_name("cpu_handlers.cc")
ROUTE = "test"
TARGET = "sm_90a"


@functools.cache
def library() -> ctypes.CDLL:
    """Compile (once a version of source and jaxlib), load and register the handlers."""
    key = hashlib.sha256(SOURCE.read_bytes() + jaxlib.__version__.encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"swiglu_jax-tests-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"cpu_handlers-{key}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
        subprocess.run(["g++", *flags, "-o", made, SOURCE], check=True)
        made.rename(path)
    lib = ctypes.CDLL(str(path))
    for name in STAGES:
        handler = jax.ffi.pycapsule(getattr(lib, f"test_{name}"))
        jax.ffi.register_ffi_target(f"swiglu_jax_test_{name}", handler, platform="cpu")
    lib.test_take_calls.restype = ctypes.c_int64
    lib.test_take_calls.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    return lib


@dataclasses.dataclass(frozen=True, order=True)
class Call:
    """One call of a handler, at the shapes that it saw."""

    stage: str
    outputs: tuple[str, ...]
    layout: str
    sizes: tuple[int, int, int]
    """M, H, I."""


class FusedCpu:
    """What the fixture hands to a test."""

    def __init__(self) -> None:
        self.decline: Callable[[StageCall], str | None] = lambda call: None
        """Gives the reason for which the test route declines a call, or None."""
        self.superset = False
        """Whether the one kernel of each stage writes all three outputs, whatever is asked."""
        self.scratch_bytes = 0
        self.overwrites = True
        """As the SM90 kernels, whose outputs take the memory of gate and up where XLA lets them."""
        self.asked: list[StageCall] = []
        """Calls that the route was asked about, since the last ``forget``."""

    def take_calls(self, *results: Any) -> list[Call]:
        """The handlers' calls since the last time, sorted, once ``results`` are there."""
        jax.block_until_ready(results)
        lib = library()
        size = lib.test_take_calls(None, -1)
        buffer = ctypes.create_string_buffer(max(size, 1))
        lib.test_take_calls(buffer, size)
        made = []
        for line in buffer.raw[:size].decode().splitlines():
            stage, mask, layout, sizes = line.split()
            names = STAGES[stage].outputs
            outputs = tuple(n for k, n in enumerate(names) if int(mask) >> k & 1)
            m, h, i = map(int, sizes.split("x"))
            made.append(Call(stage, outputs, layout, (m, h, i)))
        return sorted(made)

    def candidates(self, call: StageCall, target: str) -> list[Candidate]:
        if call.stage not in STAGES:
            raise Declined("no handler for the gradients' GEMMs")
        self.asked.append(call)
        reason = self.decline(call)
        if reason:
            raise Declined(reason)
        stage = STAGES[call.stage]
        outputs = call.outputs
        if self.superset and all(stage.needed(outputs)):
            outputs = stage.outputs
        mask = outputs_mask(call.stage, outputs)
        return [
            Candidate(
                route=ROUTE,
                kernel="plain loops",
                ffi_target=f"swiglu_jax_test_{call.stage}",
                attributes=(("outputs", mask), ("weight_layout", call.weight_layout)),
                outputs=outputs,
                scratch_bytes=self.scratch_bytes,
                overwrites=self.overwrites,
            )
        ]


@contextlib.contextmanager
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FusedCpu]:
    """Within the context, ``implementation="fused"`` runs the handlers on the CPU."""
    library()
    fused = FusedCpu()
    module: Any = types.ModuleType("swiglu_jax_test_provider")
    module.candidates = fused.candidates
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_providers, "PROVIDERS", {ROUTE: module.__name__})
    monkeypatch.setattr(_routes, "PROVIDERS", _providers.PROVIDERS)
    # float32 too, so that what a transformation computes can be compared closely.
    monkeypatch.setattr(_routes, "FUSED_DTYPES", ("bfloat16", "float16", "float32"))
    # A target, and no measuring on the GPU that may be there.
    config = dataclasses.replace(_device.config, target=TARGET, tune=False)
    monkeypatch.setattr(_device, "config", config)
    monkeypatch.setattr(_tuning, "config", config)
    rules = mlir_internal._platform_specific_lowerings["cpu"]
    for stage in STAGES.values():
        rule = functools.partial(_lowering.lower_fused, stage, platform="cpu")
        mlir.register_lowering(stage.primitive, rule, platform="cpu")
    try:
        yield fused
    finally:
        for stage in STAGES.values():
            del rules[stage.primitive]
        jax.clear_caches()
        fused.take_calls()

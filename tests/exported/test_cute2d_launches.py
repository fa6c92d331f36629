"""What entries of the "cute2d" ABI ask of the driver, through the shipped handlers.

How such a kernel tiles its problem is its own affair (tests/sm90). Here every buffer of the call
must reach it, and its launch must be one that the GPU takes.
"""

from collections.abc import Callable

import numpy as np
import pytest
from exported_recorder import STREAM, Recording, TensorMap, buffers_of

from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant

KERNELS = [k.variant for k in _manifest.installed().kernels if k.variant.abi == "cute2d"]
SHAPES = [((8192,), 5120, 17408), ((256,), 64, 256), ((3, 43), 72, 208), ((1,), 128, 1024)]


def fits(variant: KernelVariant, m: int, h: int, i: int) -> bool:
    return not (m % variant.m_multiple or h % variant.h_multiple or i % variant.i_multiple)


def addresses_in(recording: Recording, candidates: set[int]) -> set[int]:
    """Which of some addresses reach the kernel: in a tensor map, or in a parameter's bytes."""
    found = set()
    for parameter in recording.launch.parameters:
        if isinstance(parameter, TensorMap):
            found |= {parameter.address} & candidates
            continue
        for at in range(0, len(parameter) - 7, 4):
            found |= {int.from_bytes(parameter[at : at + 8], "little")} & candidates
    return found


@pytest.mark.parametrize("variant", KERNELS, ids=lambda v: v.name)
def test_every_buffer_reaches_the_kernel(recorder_of: Callable, variant: KernelVariant) -> None:
    recorder = recorder_of(variant.arch)
    tried = 0
    for lead, h, i in SHAPES:
        m = int(np.prod(lead))
        if not fits(variant, m, h, i):
            continue
        tried += 1
        operands, results = buffers_of(variant, lead, h, i)
        recording = recorder.call(variant, operands, results)
        launch = recording.launch
        assert (launch.stream, launch.device, launch.loaded) == (STREAM, 0, True)
        assert launch.cluster[:2] in (variant.cluster, variant.cluster[::-1])
        buffers = {buffer.data for buffer in [*operands, *results]}
        assert addresses_in(recording, buffers) == buffers
        tensors = {m * h, m * i, h * i}
        for found in recording.maps:
            assert int(np.prod(found.sizes)) in tensors, "a tensor map over a part of a tensor"
    assert tried >= 2, "the kernel fits too few of the shapes"


@pytest.mark.parametrize("variant", KERNELS[::5], ids=lambda v: v.name)
def test_loading_comes_first(recorder_of: Callable, variant: KernelVariant) -> None:
    recorder = recorder_of(variant.arch, 2)
    first = recorder.run(variant, (256,), 128, 1024, stage="initialize", ordinal=1)
    assert (first.error, first.launches, first.functions) == ("", [], [1])
    run = recorder.run(variant, (256,), 128, 1024, ordinal=1)
    assert (run.launch.device, run.loads, run.functions) == (1, 0, [])

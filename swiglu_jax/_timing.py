"""Times the candidates of a stage call against XLA's form, on this machine's GPU.

Each candidate becomes one jitted program that runs the stage many times, so that launch overhead is
small against what is measured, on operands that take turns too, so that weights come from memory as
they do in a model and not from a cache. The programs take turns, and each turn counts as a ratio to
XLA's turns before and after it: a large GEMM runs into the GPU's power limit, which lowers the
clocks over some 100 ms, and by more than candidates differ.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from swiglu_jax import _stages  # read when called: _stages itself imports the routes
from swiglu_jax._candidate import Candidate, StageCall
from swiglu_jax._measurement import Measurement
from swiglu_jax._repetition import Sets, repeated

MEMORY_CAP = 16 << 30
"""Bytes that a trial's operands and results may take, and at most half of what is free; larger
calls are timed with fewer rows. At 32768, 8192, 28672 a stage takes up to 10 GB: under a cap of
4 GiB it was timed with 2048 rows."""

FEWEST_ROWS = 2048
"""Rows that a trial keeps whatever its weights take: a GEMM of a few rows says nothing about one
of thousands, and the widest published weights leave no room under the cap."""

COLD_BYTES = 256 << 20
"""What all sets of operands take together at least, as far as so many are allowed: twice the L2
cache of a B200, five times an H200's."""
MAX_SETS = 8

ROUNDS = 7
SAMPLE_SECONDS = 15e-3
"""Of a turn: longer than the power controller takes to react. With 4 ms and no warming up, a tile
that is 7 % slower in a training step came out as the fastest (H200, 8192, 2048, 8192)."""
WARM_SECONDS = 0.15
"""Of XLA's form before the first turn that counts."""
MAX_REPEATS = 256


def shapes_of(call: StageCall, rows: int) -> list[tuple[int, ...]]:
    """Shapes of a call's operands with ``rows`` rows."""
    assert call.h is not None and call.i is not None
    sizes = {"l": rows, "h": call.h, "i": call.i}
    letters = _stages.stage_named(call.stage).operand_letters(_params(call))
    return [tuple(sizes[k] for k in names) for names in letters]


def bytes_of(call: StageCall, rows: int) -> int:
    """What a call's operands take, and its stage's results, which XLA's form makes on its way."""
    stage, shapes = _stages.stage_named(call.stage), shapes_of(call, rows)
    shapes += stage.result_shapes(stage.outputs, shapes, _params(call))
    return sum(map(math.prod, shapes)) * jnp.dtype(call.dtype).itemsize


def operands_of(call: StageCall, rows: int, seed: int = 0) -> list[jax.Array]:
    """Random operands of a call with ``rows`` rows, on the default device."""
    shapes = shapes_of(call, rows)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    dtype = jnp.dtype(call.dtype)
    return [_random(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def _params(call: StageCall) -> Any:
    return _stages.StageParams(call.outputs, call.weight_layout, implementation="xla")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # Random numbers and not zeros: a GPU's clocks depend on the bits that flip.
    return jax.random.normal(key, shape, dtype) * 0.25


def memory_cap(device: Any) -> int:
    """Bytes that trials may take on a device now."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return MEMORY_CAP
    return min(MEMORY_CAP, (stats["bytes_limit"] - stats["bytes_in_use"]) // 2)


def timed_rows(call: StageCall, cap: int) -> int:
    """The call's rows, halved until operands and results fit the cap or the rows are few."""
    assert call.m is not None
    rows = call.m
    while rows > FEWEST_ROWS and bytes_of(call, rows) > cap:
        rows = (rows + 1) // 2
    return rows


def sets_of(call: StageCall, cap: int) -> list[list[jax.Array]]:
    """Operands for calls that take turns, on the default device."""
    rows = timed_rows(call, cap)
    each = max(1, bytes_of(call, rows))
    count = min(MAX_SETS, math.ceil(COLD_BYTES / each), max(1, cap // each))
    return [operands_of(call, rows, seed) for seed in range(count)]


def measure(call: StageCall, candidates: Sequence[Candidate], device: Any) -> Measurement:
    """Time every candidate and XLA's form.

    Args:
        call: with every size known.
        candidates: what routes offer.
        device: the GPU to run on.

    Returns:
        The times. A candidate that fails to compile or run is left out, with its reason kept.

    Raises:
        jax.errors.JaxRuntimeError: XLA's form cannot run either (no memory is left for it).
    """
    # A guard against the user's transfers is not meant for the trials' few scalars.
    with jax.default_device(device), jax.transfer_guard("allow"):
        sets = sets_of(call, memory_cap(device))
        form = functools.partial(_stages.stage_named(call.stage).form, params=_params(call))
        rounds = _rounds(form, sets)
        xla = repeated(form, rounds)
        programs: dict[int, Callable[[Sets], Any]] = {}
        failed: dict[str, str] = {}
        for k, candidate in enumerate(candidates):
            program = repeated(_as_program(call, candidate), rounds)
            try:
                jax.block_until_ready(program(sets))
            except Exception as error:  # whatever a trial raises, the candidate declines
                failed[candidate.kernel] = _reason(error)
            else:
                programs[k] = program
        jax.block_until_ready(xla(sets))
        end = time.monotonic() + WARM_SECONDS
        while time.monotonic() < end:
            _seconds(xla, sets)
        baseline: list[float] = []
        turns: dict[int, list[float]] = {k: [] for k in programs}
        for turn in range(ROUNDS):
            baseline.append(_seconds(xla, sets))
            for k in _rotated(list(programs), turn):
                turns[k].append(_seconds(programs[k], sets))
        baseline.append(_seconds(xla, sets))
    xla_us = statistics.median(baseline) / (rounds * len(sets)) * 1e6
    return Measurement(
        xla_us=xla_us,
        candidates=tuple((candidates[k], xla_us * ratio(turns[k], baseline)) for k in programs),
        failed=failed,
    )


def ratio(turns: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over turns of their time relative to the baseline's turns before and after.

    Args:
        turns: seconds of each turn.
        baseline: seconds of the baseline's turns: one before each, and one after the last.
    """
    pairs = zip(turns, baseline, baseline[1:], strict=False)
    return statistics.median(2 * turn / (before + after) for turn, before, after in pairs)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _as_program(call: StageCall, candidate: Candidate) -> Callable[..., Sequence[jax.Array]]:
    """The candidate as a function of the stage's operands."""
    stage, params = _stages.stage_named(call.stage), _params(call)
    return lambda *operands: _stages.ffi_call(stage, candidate, params, operands)


def _rounds(form: Callable[..., Any], sets: Sets) -> int:
    """How often one program goes through the sets, so that a turn lasts long enough."""
    few = math.ceil(4 / len(sets))
    program = repeated(form, few)
    jax.block_until_ready(program(sets))
    once = min(_seconds(program, sets) for _ in range(3)) / few
    return max(1, min(MAX_REPEATS // len(sets), math.ceil(SAMPLE_SECONDS / once)))


def _rotated(items: list[int], by: int) -> list[int]:
    """Another one first each time: what follows a hot kernel meets lower clocks."""
    by %= max(1, len(items))
    return items[by:] + items[:by]


def _seconds(program: Callable[[Sets], Any], sets: Sets) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(sets))
    return time.perf_counter() - start

"""Times the candidates of a stage call against XLA's form, on this machine's GPU.

Each candidate becomes one jitted program that runs the stage several times, every run made to
wait for the one before, so that launch overhead is small against what is measured. The programs
take turns, and each turn counts as a ratio to XLA's turns before and after it: a large GEMM runs
into the GPU's power limit, which lowers the clocks over some 100 ms, and by more than candidates
differ.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from swiglu_jax import _stages  # read when called: _stages itself imports the routes
from swiglu_jax._candidate import Candidate, StageCall
from swiglu_jax._measurement import Measurement

MEMORY_CAP = 4 << 30
"""Bytes that a trial's operands and results may take; larger calls are timed with fewer rows."""

FEWEST_ROWS = 2048
"""Rows that a trial keeps whatever its weights take: a GEMM of a few rows says nothing about one
of thousands, and the widest published weights leave no room under the cap."""

ROUNDS = 7
SAMPLE_SECONDS = 15e-3
"""Of a turn: longer than the power controller takes to react. With 4 ms and no warming up, a tile
that is 7 % slower in a training step came out as the fastest (H200, 8192, 2048, 8192)."""
WARM_SECONDS = 0.15
"""Of XLA's form before the first turn that counts."""
MAX_REPEATS = 256

Program = Callable[..., Sequence[jax.Array]]


def operands_of(call: StageCall, rows: int) -> list[jax.Array]:
    """Random operands of a call with ``rows`` rows, on the default device."""
    assert call.h is not None and call.i is not None
    sizes = {"l": rows, "h": call.h, "i": call.i}
    letters = _stages.stage_named(call.stage).operand_letters(_params(call))
    keys = jax.random.split(jax.random.key(0), len(letters))
    return [
        _random(key, tuple(sizes[k] for k in names), jnp.dtype(call.dtype))
        for key, names in zip(keys, letters, strict=True)
    ]


def _params(call: StageCall) -> Any:
    return _stages.StageParams(call.outputs, call.weight_layout, implementation="xla")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # Random numbers and not zeros: a GPU's clocks depend on the bits that flip.
    return jax.random.normal(key, shape, dtype) * 0.25


def timed_rows(call: StageCall) -> int:
    """The call's rows, halved until operands and results fit the cap or the rows are few."""
    assert call.m is not None and call.h is not None and call.i is not None
    weights, per_row = 3 * call.h * call.i, call.h + 6 * call.i
    rows = call.m
    itemsize = jnp.dtype(call.dtype).itemsize
    while rows > FEWEST_ROWS and (weights + rows * per_row) * itemsize > MEMORY_CAP:
        rows = (rows + 1) // 2
    return rows


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
        rows = timed_rows(call)
        operands = operands_of(call, rows)
        form = functools.partial(_stages.stage_named(call.stage).form, params=_params(call))
        repeats = _repeats(form, operands)
        xla = _repeated(form, repeats)
        programs: dict[int, Program] = {}
        failed: dict[str, str] = {}
        for k, candidate in enumerate(candidates):
            program = _repeated(_as_program(call, candidate), repeats)
            try:
                jax.block_until_ready(program(*operands))
            except Exception as error:  # whatever a trial raises, the candidate declines
                failed[candidate.kernel] = _reason(error)
            else:
                programs[k] = program
        jax.block_until_ready(xla(*operands))
        end = time.monotonic() + WARM_SECONDS
        while time.monotonic() < end:
            _seconds(xla, operands)
        baseline: list[float] = []
        turns: dict[int, list[float]] = {k: [] for k in programs}
        for _ in range(ROUNDS):
            baseline.append(_seconds(xla, operands))
            for k, program in programs.items():
                turns[k].append(_seconds(program, operands))
        baseline.append(_seconds(xla, operands))
    xla_us = statistics.median(baseline) / repeats * 1e6
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


def _as_program(call: StageCall, candidate: Candidate) -> Program:
    """The candidate as a function of the stage's operands."""
    stage, params = _stages.stage_named(call.stage), _params(call)
    return lambda *operands: _stages.ffi_call(stage, candidate, params, operands)


def _repeats(form: Program, operands: Sequence[jax.Array]) -> int:
    """How often one program repeats the stage, so that a sample lasts long enough."""
    few = 4
    program = _repeated(form, few)
    jax.block_until_ready(program(*operands))
    once = min(_seconds(program, operands) for _ in range(3)) / few
    return min(MAX_REPEATS, math.ceil(SAMPLE_SECONDS / once))


def _repeated(program: Program, repeats: int) -> Program:
    @jax.jit
    def run(first: jax.Array, *others: jax.Array) -> Sequence[jax.Array]:
        def body(_: Any, results: Sequence[jax.Array]) -> Sequence[jax.Array]:
            # The barrier makes a run's first operand depend on the run before, so XLA can
            # neither merge the runs nor move one out of the loop.
            operand, _ = lax.optimization_barrier((first, results))
            return program(operand, *others)

        return lax.fori_loop(1, repeats, body, program(first, *others))

    return run


def _seconds(program: Program, operands: Sequence[jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*operands))
    return time.perf_counter() - start

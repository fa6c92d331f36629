"""Decides between XLA's form and the fused candidates: by measurement where one can be made.

In order: what this process or an earlier one measured on this kind of machine; a measurement
now, if the GPU that the call is lowered for is here; the table shipped with the package. In a
program of several processes every process must choose alike, so one's measurement is everybody's.
"""

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import jax

from swiglu_jax import _native, _table, _timing, _tuning_cache
from swiglu_jax._agreement import agreed, can_agree
from swiglu_jax._artifacts import digest_of_artifacts
from swiglu_jax._candidate import FUSED_STAGES, Candidate, Decline, StageCall
from swiglu_jax._compat import in_clean_thread
from swiglu_jax._config import config
from swiglu_jax._device import local_gpu_target
from swiglu_jax._measurement import Measurement, for_want_of_memory
from swiglu_jax._providers import provider

logger = logging.getLogger("swiglu_jax")

TO_MEASURE = "compile the call on such a GPU: it is timed there unless SWIGLU_JAX_TUNE=0"
"""Advice about what was never measured, if every size is known."""

_measured: dict[tuple[StageCall, tuple[Candidate, ...]], Measurement] = {}
_lock = threading.Lock()


def measurement(
    call: StageCall, candidates: Sequence[Candidate], target: str
) -> Measurement | None:
    """Measured times of a call, from memory, from disk or taken now; None where none can be.

    Trials that cannot run at all are no measurement, and are tried again at the next compilation:
    a program must not fail to compile because its data leaves no memory for them.

    Args:
        call: the stage call.
        candidates: what the routes offer for it.
        target: the GPU architecture that the call is lowered for.
    """
    if not _may_measure(call, target):
        return None
    key = (call, tuple(candidates))
    found = _measured.get(key)
    if found is not None:  # no need to wait for another thread's trials
        return found
    with _lock:
        found = _measured.get(key) or _agreed(call, candidates, target)
        if found is not None:
            _measured[key] = found
        return found


def _may_measure(call: StageCall, target: str) -> bool:
    return config.tune and call.sized and local_gpu_target() == target and can_agree()


def _agreed(call: StageCall, candidates: Sequence[Candidate], target: str) -> Measurement | None:
    """What this process or, in a program of several, the first that measured the call found."""
    if jax.process_count() == 1:
        return _read_or_measure(call, candidates)
    asked = {"target": target, "call": asdict(call), "kernels": [c.kernel for c in candidates]}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def answer() -> str:
        found = _read_or_measure(call, candidates)
        return json.dumps(found.to_json() if found else None)

    told = json.loads(agreed(f"swiglu_jax/tuning/{digest}", answer))
    return Measurement.from_json(told) if told else None


def _read_or_measure(call: StageCall, candidates: Sequence[Candidate]) -> Measurement | None:
    device = jax.local_devices(backend="cuda")[0]
    machine = _machine(device)
    path = _tuning_cache.path_of(config.cache_dir, machine, call)
    found = _complete(_tuning_cache.read(path), candidates)
    if found is not None:
        return found
    with _tuning_cache.turn(config.cache_dir):
        # Another process may have measured this call while we waited for our turn on the GPU.
        found = _complete(_tuning_cache.read(path), candidates)
        if found is not None:
            return found
        logger.info("measuring %s", call)
        # The caller may be in the middle of a compilation, whose meshes, default device and x64
        # mode must not reach the trials.
        try:
            measured = in_clean_thread(_measure, call, candidates, device)
        except jax.errors.JaxRuntimeError as error:
            logger.warning("not measured, since XLA's form could not be run: %s: %s", call, error)
            return None
        if not measured.lacked_memory:
            _tuning_cache.write(path, machine, call, measured)
    return measured


def _complete(found: Measurement | None, candidates: Sequence[Candidate]) -> Measurement | None:
    """``found`` as far as it concerns ``candidates``; None where one of them was not tried."""
    if found is None:
        return None
    tried = {c.kernel for c, _ in found.candidates} | set(found.failed)
    return found.restricted_to(candidates) if {c.kernel for c in candidates} <= tried else None


def _measure(call: StageCall, candidates: Sequence[Candidate], device: Any) -> Measurement:
    refined = [_refined(candidate, call) for candidate in candidates]
    return _timing.measure(call, refined, device)


def _refined(candidate: Candidate, call: StageCall) -> Candidate:
    """The candidate with what its own route measures first (cuDNN: which plan)."""
    refine = getattr(provider(candidate.route), "refine", None)
    return refine(candidate, call) if refine else candidate


@functools.cache
def _machine(device: Any) -> dict[str, str]:
    """All that a measurement depends on besides the call."""
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "jaxlib": metadata.version("jaxlib"),
        "cudnn": _cudnn_version(),
        "kernels": digest_of_artifacts(),
    }


def _cudnn_version() -> str:
    """It comes in a package of its own, and the name of a plan holds for one version alone."""
    try:
        return str(_native.call_json("swiglu_jax_cudnn_version")["version"])
    except RuntimeError as error:
        return str(error)


def decide(
    call: StageCall, candidates: Sequence[Candidate], target: str, *, fused: bool
) -> tuple[Candidate | None, dict[str, Decline]]:
    """The candidate that serves a call, and why the others do not.

    Args:
        call: the stage call.
        candidates: what the routes offer for it; at least one.
        target: the GPU architecture that the call is lowered for.
        fused: whether a fused candidate must be taken, XLA's form being out of the question.

    Returns:
        A candidate, or None for XLA's form; and declines as Choice has them.
    """
    force = ""  # the gradients' GEMMs take no "fused"
    if call.stage in FUSED_STAGES:
        force = ' (implementation="fused" takes the fastest kernel all the same)'
    measured = measurement(call, candidates, target)
    if measured is not None:
        best = measured.best()
        winner = best[0] if fused and best else measured.preferred()
        return winner, _measured_declines(measured, winner, force)
    # Without it the facts speak: a symbolic size is never timed.
    to_measure = TO_MEASURE if call.sized else None
    row = _table.lookup(call, candidates, target)
    if row is not None:
        ranking = _table.ranked(row, candidates)
        winner = ranking[0] if fused else _table.preferred(row, candidates)
        lost = f"the shipped table has XLA's form at {row.xla_us:.1f} us for {row.call}"
        advice = f"nothing; XLA was faster where the table was measured{force}"
    else:
        winner = candidates[0] if fused else None
        lost = "never measured for this shape, and no row of the shipped table speaks for it"
        advice = to_measure
    declined: dict[str, Decline] = {}
    for candidate in candidates:  # the preferred one of each route comes first
        if winner is None:
            reason = f"{candidate.kernel}: {lost}"
            if row is None and candidate == candidates[0] and call.stage in FUSED_STAGES:
                reason += '; implementation="fused" takes it'
            declined.setdefault(candidate.route, Decline(reason, advice))
        elif candidate.route != winner.route:
            by = "never measured for this shape" if row is None else "by the shipped table"
            reason = f"{candidate.kernel}: {by}, {winner.kernel} comes first"
            todo = to_measure if row is None else None
            declined.setdefault(candidate.route, Decline(reason, todo))
    return winner, declined


def _measured_declines(
    measured: Measurement, winner: Candidate | None, force: str
) -> dict[str, Decline]:
    """For each route that lost, how its best kernel compared; and each trial that failed."""
    rival = "XLA's form"
    rival_us = measured.xla_us
    for candidate, us in measured.candidates:
        if candidate == winner:
            rival, rival_us = candidate.kernel, us
    declined: dict[str, Decline] = {}
    for candidate, us in sorted(measured.candidates, key=lambda timed: timed[1]):
        if winner is None or candidate.route != winner.route:
            reason = f"{candidate.kernel} measured {us:.1f} us against {rival_us:.1f} us of {rival}"
            todo = f"nothing; the faster one serves{force}"
            declined.setdefault(candidate.route, Decline(reason, todo))
    for kernel, reason in measured.failed.items():
        if for_want_of_memory(reason):
            todo = "compile before memory fills up: a new process tries this kernel again"
        else:
            todo = "nothing; its trial failed, and that of what serves did not (do report it)"
        declined.setdefault(f"{kernel} (trial)", Decline(reason, todo))
    return declined

"""The cuDNN route: each stage as one fused cuDNN graph, or the backward as a GEMM and a graph.

cuDNN takes every output set of both stages, in both layouts and both dtypes, for SM90 and SM100
alike, so a call writes what is asked; but for backward sets whose h stands beside the GEMM
instead of behind it, the plans that were tried compute something else (docs/cudnn.md).
"""

import re
from dataclasses import replace
from typing import Any

from swiglu_jax import _native
from swiglu_jax._candidate import FUSED_STAGES, Candidate, Declined, StageCall, padding
from swiglu_jax._config import config
from swiglu_jax._device import local_gpu_ordinal, local_gpu_target
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, outputs_mask

OLDEST_SM = 90
"""The fused graphs run on the engines that cuDNN generates for SM90 and newer."""

ROW_MULTIPLE = 8
"""H and I must be multiples of this: rows of 16 bytes. Other sizes build too, on slow engines."""

DTYPES = ("bfloat16", "float16")

SERVED_BY = {frozenset({"dgate", "h"}): ("dgate", "dup", "h")}
"""Backward output sets that a larger one serves."""

TUNING_PLANS = 24
TUNING_MEMORY = 4 << 30
"""How many plans are built and timed, and bytes of scratch for that."""


def candidates(call: StageCall, target: str) -> list[Candidate]:
    """The cuDNN graphs that serve a stage call.

    Args:
        call: the stage call.
        target: the GPU architecture that the call is lowered for; the GPU need not be here.

    Raises:
        Declined: with the reason.
    """
    if call.stage not in FUSED_STAGES:
        raise Declined("a GEMM without an epilogue: XLA times cuBLAS and cuDNN for it by itself")
    _check(call, target)
    written = _written(call)
    attributes = (
        ("outputs", outputs_mask(call.stage, written)),
        ("weight_layout", call.weight_layout),
        ("plan", ""),
    )
    listed = ", ".join(written)
    found: list[Candidate] = []
    if call.stage == "gate_up" or config.frost_backward:
        found.append(
            Candidate(
                route="cudnn",
                kernel=f"cuDNN graph ({listed})",
                ffi_target=f"swiglu_jax_cudnn_{call.stage}",
                attributes=attributes,
                outputs=written,
            )
        )
    if call.stage == "down_dswiglu":
        assert call.m is not None and call.i is not None
        found.append(
            Candidate(
                route="cudnn",
                kernel=f"cuDNN GEMM and pointwise graph ({listed})",
                ffi_target="swiglu_jax_cudnn_down_dswiglu_two_step",
                attributes=attributes,
                outputs=written,
                scratch_bytes=2 * call.m * call.i,  # dh, in the 2-byte dtype of the call
            )
        )
    return found


def refine(candidate: Candidate, call: StageCall) -> Candidate:
    """The candidate with the plans that are the fastest on this machine's GPU.

    cuDNN's heuristics rank plans, but their first can be ten times slower than their best. Where
    no plan can be timed the candidate comes back as it was: a trial of it then fails with
    cuDNN's reason.
    """
    try:
        served = replace(call, outputs=candidate.outputs)
        plan = "|".join(tune(graph, served)["plan"] for graph in graphs(candidate))
    except RuntimeError:
        return candidate
    attributes = tuple((k, plan if k == "plan" else v) for k, v in candidate.attributes)
    return replace(candidate, attributes=attributes)


def graphs(candidate: Candidate) -> tuple[str, ...]:
    """Names of the graphs, as the native library calls them, that a candidate runs in turn."""
    name = candidate.ffi_target.removeprefix("swiglu_jax_cudnn_")
    return ("dgrad", "dswiglu") if name == "down_dswiglu_two_step" else (name,)


def tune(
    graph: str,
    call: StageCall,
    *,
    device: int | None = None,
    plans: int = TUNING_PLANS,
    memory: int = TUNING_MEMORY,
) -> dict[str, Any]:
    """Build, check and time cuDNN's plans of a graph on a GPU of this machine.

    Args:
        graph: "gate_up", "down_dswiglu", "dgrad" or "dswiglu".
        call: the stage call that the graph serves, with what the graph writes; every size known.
        device: the CUDA ordinal; None is the first GPU that this process uses.
        plans: how many of the heuristics' plans to build, in their order.
        memory: bytes of scratch; a call that needs more is timed with fewer rows.

    Returns:
        "plan" (its name, for the attribute), "tag" (cuDNN's name), "us" (median of one run),
        "rows" that were timed, "cudnn" (version), and "trials", one for each plan with the reason
        why it was "passed_over".

    Raises:
        RuntimeError: with cuDNN's reason, where no plan runs.
    """
    spec = native_graph(graph, call)
    device = local_gpu_ordinal() if device is None else device
    return _native.call_json("swiglu_jax_cudnn_tune", spec, device, plans, memory)


def native_graph(graph: str, call: StageCall) -> _native.Graph:
    """A graph that serves a call, in the native library's terms."""
    outputs = 1 if graph == "dgrad" else outputs_mask(call.stage, call.outputs)
    return _native.Graph(
        graph.encode(), outputs, call.weight_layout.encode(), call.dtype.encode(),
        call.m, call.h, call.i,
    )  # fmt: skip


def _written(call: StageCall) -> tuple[str, ...]:
    """What the graph that serves a call writes."""
    if call.stage == "down_dswiglu":
        if call.outputs == ("h",):
            raise Declined("h alone needs no GEMM: XLA's pointwise form is all there is to it")
        larger = SERVED_BY.get(frozenset(call.outputs))
        if larger is not None:
            return larger
    return tuple(name for name in STAGE_OUTPUTS[call.stage] if name in call.outputs)


def _check(call: StageCall, target: str) -> None:
    match = re.match(r"sm_(\d+)", target)
    if match is None or int(match[1]) < OLDEST_SM:
        raise Declined(
            f"cuDNN's fused graphs need a GPU of compute capability 9.0 or newer; this is {target}"
        )
    if call.dtype not in DTYPES:
        raise Declined(f"cuDNN's graphs are built for {' or '.join(DTYPES)}, not {call.dtype}")
    if call.m is None or call.h is None or call.i is None:
        raise Declined("cuDNN's graphs have fixed sizes; here M, H or I is symbolic")
    for letter, size in (("H", call.h), ("I", call.i)):
        if size % ROW_MULTIPLE:
            raise Declined(
                f"{letter}={size} is not a multiple of {ROW_MULTIPLE}: cuDNN's fast kernels load "
                "rows of 16 bytes",
                padding(call, h=ROW_MULTIPLE, i=ROW_MULTIPLE),
            )
    reason = _native.unavailable_reason()
    if reason is not None:
        raise Declined(reason, _native.ADVICE)
    if local_gpu_target() is not None:
        # Only the machine that runs the call needs cuDNN; a lowering from elsewhere does not.
        try:
            _native.call_json("swiglu_jax_cudnn_version")
        except RuntimeError as error:
            raise Declined(
                str(error), "pip install 'swiglu-jax[cuda13]' brings the cuDNN that JAX uses too"
            ) from error
    _native.register()

"""The modules that offer fused candidates, by route.

Each has ``candidates(call, target) -> list[Candidate]``, which raises Declined for a reason known
before launch, and may have ``refine(candidate, call) -> Candidate``, which fills in what the
route itself measures on this machine's GPU.
"""

import importlib
from types import ModuleType

from swiglu_jax._candidate import StageCall

PROVIDERS = {"exported": "swiglu_jax._exported", "cudnn": "swiglu_jax._cudnn"}
"""In order of preference where nothing was measured and ``preference`` knows nothing better."""

CUDNN_FORWARD = ("sm_100a", "sm_103a")
"""Where NVIDIA's own SwiGLU op, which this one renders, runs the forward as a cuDNN graph."""


def provider(route: str) -> ModuleType:
    """The module of a route, imported when first asked."""
    return importlib.import_module(PROVIDERS[route])


SUPERSEDED = {
    "sm_90a": (
        "not tried where an exported kernel serves: at every shape timed on an H200 cuDNN's graph "
        "took 1.1 to 1.4 times as long as one, and timing its plans takes 4 to 25 s for each call"
    )
}
"""Targets whose exported kernels leave nothing to try to cuDNN, and why."""


def preference(call: StageCall, target: str) -> list[str]:
    """The routes, the one that serves ``call`` on ``target`` where nothing was measured first."""
    if call.stage == "gate_up" and target in CUDNN_FORWARD:
        return sorted(PROVIDERS, key=lambda route: route != "cudnn")
    return list(PROVIDERS)

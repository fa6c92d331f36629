"""The modules that offer fused candidates, by route.

Each has ``candidates(call, target) -> list[Candidate]``, which raises Declined for a reason known
before launch, and may have ``refine(candidate, call) -> Candidate``, which fills in what the
route itself measures on this machine's GPU.
"""

import importlib
from types import ModuleType

PROVIDERS = {"exported": "swiglu_jax._exported", "cudnn": "swiglu_jax._cudnn"}
"""In order of preference where nothing was measured."""


def provider(route: str) -> ModuleType:
    """The module of a route, imported when first asked."""
    return importlib.import_module(PROVIDERS[route])

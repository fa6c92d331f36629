"""Prints, as JSON, the source that FROST generates for variants, before and after the rewriting.

Run as a file: it makes its process pretend to be on a B200. Arguments: m h i, then names of
variants. Nothing is compiled.
"""

import importlib
import json
import sys
from typing import Any

from swiglu_jax.kernels import sm100, sm120
from swiglu_jax.kernels.sm100 import _device, _graphs, _pitch, _recipe


class Rendered(Exception):
    """Ends FROST's compilation once its source is there."""


def sources(name: str, shape: _pitch.Shape) -> dict[str, Any]:
    variant = next(v for v in (*sm100.variants(), *sm120.variants()) if v.name == name)
    _device.pretend(variant.arch)

    family = _recipe.family_of(variant)
    compiler = importlib.import_module(family.compiler)
    from cudnn.gemm.frost.tile_config import by_name  # noqa: PLC0415

    found: list[str] = []

    def stop(source: str) -> None:
        found.append(source)
        raise Rendered

    compiler._import_kernel, original = stop, compiler._import_kernel
    graph, auxiliaries = getattr(_graphs, variant.stage)(variant, shape)
    try:
        compiler.jit_from_cudnn_graph(graph, by_name(family.tile_name(variant)))
    except Rendered:
        pass
    finally:
        compiler._import_kernel = original
    (source,) = found
    rewritten = family.read_pitch(source, tuple(auxiliaries), shape)
    return {"auxiliaries": auxiliaries, "source": source, "rewritten": rewritten}


def main() -> None:
    shape = _pitch.Shape(*map(int, sys.argv[1:4]))
    print(json.dumps({name: sources(name, shape) for name in sys.argv[4:]}))


main()

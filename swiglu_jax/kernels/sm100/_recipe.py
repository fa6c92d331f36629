# ruff: noqa: PLC0415 - cuDNN is imported once the environment says what to compile for
"""One FROST variant: its cuDNN graph, FROST's source rewritten, compiled and exported."""

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiglu_jax.kernels._host_code import use_baseline_host_code
from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm100 import _device, _graphs, _pitch
from swiglu_jax.kernels.sm100._seam import SeamMoved, check_versions


@dataclass(frozen=True)
class Family:
    """One of FROST's families of kernels, as far as the recipe sees a difference."""

    compiler: str
    """The module that renders and compiles its kernels."""
    store_mode: str
    """How its kernels store outputs."""
    tile_name: Callable[[KernelVariant], str]
    """FROST's name of a variant's tile configuration."""
    read_pitch: Callable[[str, tuple[str, ...], _pitch.Shape], str]
    """The rewriting of its sources."""


def _tile_sm100(variant: KernelVariant) -> str:
    m, n, k = variant.tile
    cluster_m, cluster_n = variant.cluster
    return (
        f"CONFIG_sm100_{m}x{n}x{2 * k}_{m}x{n}x32_cluster{cluster_m}x{cluster_n}"
        f"_{variant.ctas}ctamma"
    )


def _tile_sm120(variant: KernelVariant) -> str:
    m, n, k = variant.tile
    return f"CONFIG_sm120_{m}x{n}x{2 * k}_16x16x32_cluster1x1_warps4x2"


FAMILIES = {
    "sm100": Family(
        "cudnn.gemm.frost.sm100.compiler", "tma", _tile_sm100, _pitch.read_pitch_from_problem
    ),
    "sm120": Family(
        "cudnn.gemm.frost.sm120.compiler", "stg", _tile_sm120, _pitch.read_pitch_from_problem_sm120
    ),
}


def family_of(variant: KernelVariant) -> Family:
    """The family that compiles a variant."""
    return FAMILIES[_device.DEVICES[variant.arch].family]


@contextlib.contextmanager
def _rewritten_source(
    family: Family, auxiliaries: tuple[str, ...], shape: _pitch.Shape
) -> Iterator[list[str]]:
    """Put `_pitch` between FROST's renderer and its compiler; yields the sources that passed."""
    compiler = importlib.import_module(family.compiler)
    original = getattr(compiler, "_import_kernel", None)
    if not callable(original):
        raise SeamMoved(f"{family.compiler} has no _import_kernel(source)")
    sources: list[str] = []

    def import_rewritten(source: str) -> Any:
        sources.append(family.read_pitch(source, auxiliaries, shape))
        return original(sources[-1])

    compiler._import_kernel = import_rewritten  # type: ignore[attr-defined]
    try:
        yield sources
    finally:
        compiler._import_kernel = original  # type: ignore[attr-defined]


def compile_variant(
    variant: KernelVariant, shape: _pitch.Shape = _pitch.PLACEHOLDER
) -> tuple[Any, str]:
    """FROST's compiled kernel of ``variant``, and the source that it was compiled from.

    Args:
        variant: what to compile.
        shape: the sizes that the graph is built for; the kernel serves every other as well.

    Raises:
        SeamMoved: where what came out is not what was asked for.
    """
    check_versions()
    _device.pretend(variant.arch)
    with tempfile.TemporaryDirectory(prefix="swiglu_jax_frost_") as folder:
        # FROST writes the source to a file to import it; a folder of one's own is safe with
        # several processes at once.
        os.environ["CUDNN_FRONTEND_GEMM_KERNEL_CACHE"] = folder
        import cudnn.gemm.frost  # noqa: F401 - installs the hook that records graphs
        from cudnn.gemm.frost.tile_config import by_name

        family = family_of(variant)
        compiler = importlib.import_module(family.compiler)
        build = {"down_dswiglu": _graphs.down_dswiglu, "gate_up": _graphs.gate_up}[variant.stage]
        graph, auxiliaries = build(variant, shape)
        with _rewritten_source(family, tuple(auxiliaries), shape) as sources:
            compiled = compiler.jit_from_cudnn_graph(graph, by_name(family.tile_name(variant)))
        if len(sources) != 1:
            raise SeamMoved(f"FROST compiled {len(sources)} sources for one graph")
        _check(variant, compiled, auxiliaries)
    return compiled, sources[0]


def _check(variant: KernelVariant, compiled: Any, auxiliaries: list[str]) -> None:
    """Compare what FROST compiled with what was asked for."""
    outputs = [tensor.get_name() for tensor in compiled.binding.outputs]
    expected = list(variant.entry_outputs or variant.outputs)
    if outputs != expected:
        raise SeamMoved(f"{variant.name}: FROST binds the outputs {outputs}, not {expected}")
    if list(compiled.aux_names) != auxiliaries:
        raise SeamMoved(
            f"{variant.name}: FROST reads {compiled.aux_names} in the epilogue, not {auxiliaries}"
        )
    if set(compiled.store_modes) != {family_of(variant).store_mode}:
        raise SeamMoved(f"{variant.name}: outputs are stored by {compiled.store_modes}")
    if compiled.workspace_bytes:
        raise SeamMoved(
            f"{variant.name}: the kernel wants {compiled.workspace_bytes} scratch bytes"
        )


def compile_and_export(variant: KernelVariant, path: Path) -> None:
    """Write the object of ``variant`` at ``path``, with the one entry ``__tvm_ffi_<name>``."""
    compiled, _ = compile_variant(variant)
    launchable = compiled._launchable
    use_baseline_host_code(launchable)
    launchable.export_to_c(str(path), function_name=variant.name, export_only_tvm_ffi_symbols=True)

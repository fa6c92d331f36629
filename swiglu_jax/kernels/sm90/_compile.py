"""From a variant to an object file: entry function, fake tensors, compiler."""

from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute

from swiglu_jax.kernels._host_code import use_baseline_host_code
from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90._entries import entry_of, shapes_of
from swiglu_jax.kernels.sm90._epilogue import DownDswiglu, GateUp, Product
from swiglu_jax.kernels.sm90._gemm import Gemm
from swiglu_jax.kernels.sm90._plan import Plan
from swiglu_jax.kernels.sm90._tile import Tile
from swiglu_jax.kernels.sm90._tiles import TILES
from swiglu_jax.kernels.sm90._variants import label_of

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"


def plan_of(variant: KernelVariant, tile: Tile | None = None) -> Plan:
    """The tile, epilogue, dtype and layouts that a variant names.

    Args:
        variant: what to compile.
        tile: one to try; None: the shipped one that the variant's name ends in.

    Raises:
        KeyError: where no shipped tile has that name.
    """
    tile = tile or TILES[variant.stage][label_of(variant)]
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[variant.dtype]
    # A weight whose rows run along the contraction is N-contiguous: the contraction of gate_up and
    # of down_dswiglu runs along H, that of input_gradient along I.
    oi = variant.weight_layout == "OI"
    if variant.stage == "gate_up":
        return Plan(tile, GateUp(variant.outputs), dtype, b_mn=not oi)
    if variant.stage == "down_dswiglu":
        return Plan(tile, DownDswiglu(variant.outputs), dtype, b_mn=oi)
    if variant.stage == "input_gradient":
        return Plan(tile, Product(), dtype, b_mn=oi, terms=2)
    # The contraction runs along the tokens, the rows of every operand.
    return Plan(tile, Product(), dtype, b_mn=True, a_mn=True, problems=len(variant.outputs))


def compile_variant(variant: KernelVariant, options: str = "", tile: Tile | None = None) -> Any:
    """Compile a variant for symbolic M, H and I.

    Args:
        variant: what to compile.
        options: further options of ``cute.compile``.
        tile: as ``plan_of`` takes it.

    Returns:
        What ``cute.compile`` returns.
    """
    plan = plan_of(variant, tile)
    m = cute.sym_int()
    h = cute.sym_int(divisibility=variant.h_multiple)
    i = cute.sym_int(divisibility=variant.i_multiple)
    tensors = [
        cute.runtime.make_fake_compact_tensor(
            plan.dtype, shape, stride_order=(1, 0), assumed_align=variant.alignment
        )
        for shape in shapes_of(variant, m, h, i)
    ]
    stream = cute.runtime.make_fake_stream()
    entry = entry_of(variant, Gemm(plan))
    return cute.compile(entry, *tensors, stream, options=f"{OPTIONS} {options}")


def compile_and_export(variant: KernelVariant, path: Path, tile: Tile | None = None) -> None:
    """Write the object of ``variant`` at ``path``, with the one entry ``__tvm_ffi_<name>``."""
    compiled = compile_variant(variant, tile=tile)
    use_baseline_host_code(compiled)
    compiled.export_to_c(str(path), function_name=variant.name, export_only_tvm_ffi_symbols=True)

"""From a variant to an object file: entry function, fake tensors, compiler."""

from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute

from swiglu_jax.kernels._host_code import use_baseline_host_code
from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90._entries import entry_of
from swiglu_jax.kernels.sm90._epilogue import DownDswiglu, GateUp
from swiglu_jax.kernels.sm90._gemm import Gemm
from swiglu_jax.kernels.sm90._plan import Plan
from swiglu_jax.kernels.sm90._tiles import TILES
from swiglu_jax.kernels.sm90._variants import label_of

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"


def plan_of(variant: KernelVariant) -> Plan:
    """The tile, epilogue, dtype and layout of B that a variant names.

    Raises:
        KeyError: where no tile has the variant's name.
    """
    epilogue = {"gate_up": GateUp, "down_dswiglu": DownDswiglu}[variant.stage](variant.outputs)
    # The contraction runs along H: a weight stored [I, H] is K-contiguous, one [H, I] is not.
    h_first = {"gate_up": "IO", "down_dswiglu": "OI"}[variant.stage]
    return Plan(
        tile=TILES[variant.stage][label_of(variant)],
        epilogue=epilogue,
        dtype={"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[variant.dtype],
        b_mn=variant.weight_layout == h_first,
    )


def compile_variant(variant: KernelVariant, options: str = "") -> Any:
    """Compile a variant for symbolic M, H and I.

    Args:
        variant: what to compile.
        options: further options of ``cute.compile``.

    Returns:
        What ``cute.compile`` returns.
    """
    plan = plan_of(variant)
    m = cute.sym_int()
    h = cute.sym_int(divisibility=variant.h_multiple)
    i = cute.sym_int(divisibility=variant.i_multiple)

    def tensor(*shape: Any) -> Any:
        return cute.runtime.make_fake_compact_tensor(
            plan.dtype, shape, stride_order=(1, 0), assumed_align=variant.alignment
        )

    weight = tensor(h, i) if plan.b_mn else tensor(i, h)
    aux, outputs = len(plan.epilogue.aux), len(variant.outputs)
    tensors = [tensor(m, h)] + [weight] * plan.epilogue.operands
    tensors += [tensor(m, i)] * (aux + outputs)
    stream = cute.runtime.make_fake_stream()
    return cute.compile(entry_of(Gemm(plan)), *tensors, stream, options=f"{OPTIONS} {options}")


def compile_and_export(variant: KernelVariant, path: Path) -> None:
    """Write the object of ``variant`` at ``path``, with the one entry ``__tvm_ffi_<name>``."""
    compiled = compile_variant(variant)
    use_baseline_host_code(compiled)
    compiled.export_to_c(str(path), function_name=variant.name, export_only_tvm_ffi_symbols=True)

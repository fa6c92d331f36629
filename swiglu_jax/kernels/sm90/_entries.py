"""What a caller sees: functions of plain tensors in the order of the ABI "cute2d".

The DSL reads a function's signature, so there is one for each number of tensors.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from swiglu_jax.kernels.sm90._gemm import Gemm


def entry_of(gemm: Gemm) -> Callable[..., None]:
    """The entry of ``gemm``: operands, the epilogue's inputs, its outputs, the stream."""
    by_counts = {
        (2, 0, 1): _gate_up_1,
        (2, 0, 2): _gate_up_2,
        (2, 0, 3): _gate_up_3,
        (1, 1, 1): _down_dswiglu_1,
        (1, 2, 2): _down_dswiglu_2,
        (1, 2, 3): _down_dswiglu_3,
    }
    epilogue = gemm.plan.epilogue
    return by_counts[epilogue.operands, len(epilogue.aux), len(epilogue.outputs)](gemm)


def _gate_up_1(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, w_gate: cute.Tensor, w_up: cute.Tensor, out: cute.Tensor,
        stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(x, (w_gate, w_up), (), (out,), stream)

    return entry


def _gate_up_2(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, w_gate: cute.Tensor, w_up: cute.Tensor, out0: cute.Tensor,
        out1: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(x, (w_gate, w_up), (), (out0, out1), stream)

    return entry


def _gate_up_3(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, w_gate: cute.Tensor, w_up: cute.Tensor, out0: cute.Tensor,
        out1: cute.Tensor, out2: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(x, (w_gate, w_up), (), (out0, out1, out2), stream)

    return entry


def _down_dswiglu_1(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        dy: cute.Tensor, w_down: cute.Tensor, gate: cute.Tensor, out: cute.Tensor,
        stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(dy, (w_down,), (gate,), (out,), stream)

    return entry


def _down_dswiglu_2(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        dy: cute.Tensor, w_down: cute.Tensor, gate: cute.Tensor, up: cute.Tensor,
        out0: cute.Tensor, out1: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(dy, (w_down,), (gate, up), (out0, out1), stream)

    return entry


def _down_dswiglu_3(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        dy: cute.Tensor, w_down: cute.Tensor, gate: cute.Tensor, up: cute.Tensor,
        out0: cute.Tensor, out1: cute.Tensor, out2: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(dy, (w_down,), (gate, up), (out0, out1, out2), stream)

    return entry

"""What a caller sees: functions of plain tensors in the order of the ABI "cute2d".

The DSL reads a function's signature, so there is one for each number of tensors.
"""

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90._gemm import Gemm


def entry_of(variant: KernelVariant, gemm: Gemm) -> Callable[..., None]:
    """The entry of a variant: operands, outputs, the stream."""
    if variant.stage == "weight_gradients":
        made = {1: _weight_gradients_1, 2: _weight_gradients_2, 3: _weight_gradients_3}
        return made[len(variant.outputs)](gemm, variant.weight_layout == "OI")
    made = {
        ("gate_up", 1): _gate_up_1,
        ("gate_up", 2): _gate_up_2,
        ("gate_up", 3): _gate_up_3,
        ("down_dswiglu", 1): _down_dswiglu_1,
        ("down_dswiglu", 2): _down_dswiglu_2,
        ("down_dswiglu", 3): _down_dswiglu_3,
        ("input_gradient", 1): _input_gradient,
    }
    return made[variant.stage, len(variant.outputs)](gemm)


def shapes_of(variant: KernelVariant, m: Any, h: Any, i: Any) -> list[tuple[Any, Any]]:
    """Shapes of the entry's tensors, in its order."""
    oi = variant.weight_layout == "OI"
    tokens, hidden = (m, h), (m, i)
    gate_or_up = (i, h) if oi else (h, i)
    down = (h, i) if oi else (i, h)
    count = len(variant.outputs)
    if variant.stage == "gate_up":
        return [tokens, gate_or_up, gate_or_up, *[hidden] * count]
    if variant.stage == "down_dswiglu":
        residuals = 1 if variant.outputs == ("dup",) else 2
        return [tokens, down, *[hidden] * (residuals + count)]
    if variant.stage == "input_gradient":
        return [hidden, hidden, gate_or_up, gate_or_up, tokens]
    operands = {
        ("w_down",): [hidden, tokens],
        ("w_gate", "w_up"): [tokens, hidden, hidden],
        ("w_gate", "w_up", "w_down"): [tokens, hidden, hidden, hidden, tokens],
    }[variant.outputs]
    return operands + [down if output == "w_down" else gate_or_up for output in variant.outputs]


def _gate_up_1(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, w_gate: cute.Tensor, w_up: cute.Tensor, out: cute.Tensor,
        stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(((x, w_gate, w_up),), (), (out,), stream)

    return entry


def _gate_up_2(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, w_gate: cute.Tensor, w_up: cute.Tensor, out0: cute.Tensor,
        out1: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(((x, w_gate, w_up),), (), (out0, out1), stream)

    return entry


def _gate_up_3(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, w_gate: cute.Tensor, w_up: cute.Tensor, out0: cute.Tensor,
        out1: cute.Tensor, out2: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(((x, w_gate, w_up),), (), (out0, out1, out2), stream)

    return entry


def _down_dswiglu_1(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        dy: cute.Tensor, w_down: cute.Tensor, gate: cute.Tensor, out: cute.Tensor,
        stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(((dy, w_down),), (gate,), (out,), stream)

    return entry


def _down_dswiglu_2(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        dy: cute.Tensor, w_down: cute.Tensor, gate: cute.Tensor, up: cute.Tensor,
        out0: cute.Tensor, out1: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(((dy, w_down),), (gate, up), (out0, out1), stream)

    return entry


def _down_dswiglu_3(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        dy: cute.Tensor, w_down: cute.Tensor, gate: cute.Tensor, up: cute.Tensor,
        out0: cute.Tensor, out1: cute.Tensor, out2: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(((dy, w_down),), (gate, up), (out0, out1, out2), stream)

    return entry


def _input_gradient(gemm: Gemm) -> Callable[..., None]:
    @cute.jit
    def entry(
        dgate: cute.Tensor, dup: cute.Tensor, w_gate: cute.Tensor, w_up: cute.Tensor,
        out: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(((dgate, w_gate), (dup, w_up)), (), (out,), stream)

    return entry


def _weight_gradients_1(gemm: Gemm, oi: bool) -> Callable[..., None]:
    @cute.jit
    def entry(h: cute.Tensor, dy: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        gemm(_rows_out(oi, (dy, h)), (), (out,), stream)

    return entry


def _weight_gradients_2(gemm: Gemm, oi: bool) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, dgate: cute.Tensor, dup: cute.Tensor, out0: cute.Tensor,
        out1: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(_rows_out(oi, (dgate, x), (dup, x)), (), (out0, out1), stream)

    return entry


def _weight_gradients_3(gemm: Gemm, oi: bool) -> Callable[..., None]:
    @cute.jit
    def entry(
        x: cute.Tensor, dgate: cute.Tensor, dup: cute.Tensor, h: cute.Tensor, dy: cute.Tensor,
        out0: cute.Tensor, out1: cute.Tensor, out2: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        gemm(_rows_out(oi, (dgate, x), (dup, x), (dy, h)), (), (out0, out1, out2), stream)

    return entry


def _rows_out(oi: bool, *products: tuple[cute.Tensor, cute.Tensor]) -> tuple:
    """(A, B) of each weight's gradient, whose rows follow A: "OI" weights have rows of outputs."""
    return products if oi else tuple((b, a) for a, b in products)

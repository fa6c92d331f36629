# ruff: noqa: PLC0415 - cuDNN is imported once the environment says what to compile for
"""The two stages as cuDNN graphs, with the rounding that every route of the package has.

gate and up are rounded to the tensors' dtype before the activation; everything else is computed in
float32 from the accumulators and rounded once.
"""

from typing import Any

from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm100._pitch import Shape


def _cudnn_dtype(dtype: str) -> Any:
    import cudnn

    return {"bfloat16": cudnn.data_type.BFLOAT16, "float16": cudnn.data_type.HALF}[dtype]


def _empty_graph(dtype: Any) -> Any:
    import cudnn

    return cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )


def down_dswiglu(variant: KernelVariant, shape: Shape) -> tuple[Any, list[str]]:
    """dgate, dup and h from dy @ w_down, gate and up.

    Returns:
        The graph, and the names of its auxiliary inputs in the order of the entry's arguments.
    """
    dtype = _cudnn_dtype(variant.dtype)
    graph = _empty_graph(dtype)
    m, h, i = shape.m, shape.h, shape.i

    def tensor(name: str, dim: list[int], stride: list[int]) -> Any:
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)

    def output(value: Any, name: str) -> None:
        value.set_output(True).set_data_type(dtype).set_name(name)

    dy = tensor("dy", [1, m, h], [m * h, h, 1])
    w_stride = [h * i, i, 1] if variant.weight_layout == "OI" else [h * i, 1, h]
    w_down = tensor("w_down", [1, h, i], w_stride)
    gate = tensor("gate", [1, m, i], [m * i, i, 1])
    auxiliaries = ["gate"]
    dh = graph.matmul(name="dh", A=dy, B=w_down)
    silu = graph.swish(input=gate, swish_beta=1.0, name="silu")
    up = None
    if {"dgate", "h"} & set(variant.outputs):
        up = tensor("up", [1, m, i], [m * i, i, 1])
        auxiliaries.append("up")
    if "dgate" in variant.outputs:
        dsilu = graph.mul(a=dh, b=up, name="dsilu")
        output(graph.swish_backward(loss=dsilu, input=gate, swish_beta=1.0, name="dgate"), "dgate")
    if "dup" in variant.outputs:
        output(graph.mul(a=dh, b=silu, name="dup"), "dup")
    if "h" in variant.outputs:
        output(graph.mul(a=silu, b=up, name="h"), "h")
    return graph, auxiliaries


def gate_up(variant: KernelVariant, shape: Shape) -> tuple[Any, list[str]]:
    """gate, up and h = silu(gate) * up from two GEMMs that share x.

    An output that is a GEMM's own result is dropped by FROST without a word, hence the identities.

    Returns:
        The graph, and no auxiliary inputs.
    """
    dtype = _cudnn_dtype(variant.dtype)
    graph = _empty_graph(dtype)
    m, h, i = shape.m, shape.h, shape.i
    x = graph.tensor(name="x", dim=[1, m, h], stride=[m * h, h, 1], data_type=dtype)
    w_stride = [h * i, 1, h] if variant.weight_layout == "OI" else [h * i, i, 1]
    rounded = {}
    for name in ("gate", "up"):
        weight = graph.tensor(name=f"w_{name}", dim=[1, h, i], stride=w_stride, data_type=dtype)
        product = graph.matmul(name=f"x_w_{name}", A=x, B=weight)
        product.set_data_type(dtype)
        rounded[name] = graph.identity(input=product, name=name)
        rounded[name].set_data_type(dtype)
        if name in variant.outputs:
            rounded[name].set_output(True).set_name(name)
    if "h" in variant.outputs:
        silu = graph.swish(input=rounded["gate"], swish_beta=1.0, name="silu")
        value = graph.mul(a=silu, b=rounded["up"], name="h")
        value.set_output(True).set_data_type(dtype).set_name("h")
    return graph, []

"""What times single kernels hands each its operands in the order that its entry takes."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import gradients, try_tiles
from benchmarks.kernels.trials import parse
from swiglu_jax import _stages
from swiglu_jax.kernels._variant import STAGE_OUTPUTS

M, H, I = 48, 16, 32  # noqa: E741
SHAPES = {
    **dict.fromkeys(("x", "dy"), (M, H)),
    **dict.fromkeys(("gate", "up", "h", "dgate", "dup"), (M, I)),
    **dict.fromkeys(("w_gate", "w_up"), (I, H)),
    "w_down": (H, I),
}
ENTRIES = {
    "gate_up": ("x", "w_gate", "w_up"),
    "down_dswiglu": ("dy", "w_down", "gate", "up"),
    "input_gradient": ("dgate", "dup", "w_gate", "w_up"),
    "weight_gradients": ("x", "dgate", "dup", "h", "dy"),
}


@pytest.mark.parametrize("stage", ENTRIES)
def test_a_kernel_gets_its_operands_in_order(stage):
    assert set(ENTRIES) == set(STAGE_OUTPUTS)
    variant = parse(f"{stage}:n=256,stages=4").variant
    data = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
    given = try_tiles._operands(variant, data)
    call = jax.jit(gradients.positional(try_tiles._kernel(variant), given))
    text = call.trace(*given.values()).lower(lowering_platforms=("cuda",)).as_text()
    (found,) = re.findall(rf"@swiglu_jax_exported_{stage}\(.*: \((.*)\) ->", text)
    assert re.findall(r"tensor<(\d+)x(\d+)xbf16>", found) == [
        tuple(map(str, SHAPES[name])) for name in ENTRIES[stage]
    ]
    plain = gradients.positional(try_tiles._plain(variant), given)
    results = {
        "gate_up": ["gate", "up"], "down_dswiglu": ["h"], "input_gradient": ["x"],
        "weight_gradients": ["w_gate", "w_up", "w_down"],
    }[stage]  # fmt: skip
    shapes = [out.shape for out in jax.eval_shape(plain, *given.values())]
    assert shapes == [SHAPES[name] for name in results]
    assert _stages.stage_named(stage).name == stage

"""Exported kernels on a real GPU, through the launcher inside jax.jit, command buffers included."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import error

from swiglu_jax import _device, _native
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant

HERE = Path(__file__).parent
BOUNDS = {"bfloat16": 6e-3, "float16": 2e-3}
SHAPES = [(1, 64, 128), (300, 136, 272), (257, 1032, 2064), (2048, 1024, 3072)]
"""M, H, I; ragged in every size, then several whole tiles."""


def _local_kernels() -> list[KernelVariant]:
    target = _device.local_gpu_target()
    found = [kernel.variant for kernel in _manifest.installed().kernels]
    return [variant for variant in found if variant.arch == target]


LOCAL = _local_kernels() or [None]
SAMPLE = list(dict.fromkeys(LOCAL[:2] + LOCAL[-2:]))
pytestmark = pytest.mark.gpu(targets=("sm_90a", "sm_100a", "sm_103a", "sm_120a"))


def _name(variant: KernelVariant | None) -> str:
    return variant.name if variant else "none"


def problem(
    rng: np.random.Generator, variant: KernelVariant, m: int, h: int, i: int
) -> list[np.ndarray]:
    """Operands in stage order, of order one where they are activations."""

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape) * scale, jnp.dtype(variant.dtype)))

    if variant.stage == "gate_up":
        shape = (i, h) if variant.weight_layout == "OI" else (h, i)
        return [normal(m, h), normal(*shape, scale=h**-0.5), normal(*shape, scale=h**-0.5)]
    shape = (h, i) if variant.weight_layout == "OI" else (i, h)
    operands = [normal(m, h), normal(*shape, scale=h**-0.5), normal(m, i), normal(m, i)]
    return operands if {"dgate", "h"} & set(variant.outputs) else operands[:3]


def reference(variant: KernelVariant, operands: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Every output in float64, from gate and up as they are stored."""
    first, *rest = (operand.astype(np.float64) for operand in operands)
    oi = variant.weight_layout == "OI"
    if variant.stage == "gate_up":
        gate, up = (first @ (w.T if oi else w) for w in rest)
        gate, up = (v.astype(variant.dtype).astype(np.float64) for v in (gate, up))
        return {"h": gate / (1 + np.exp(-gate)) * up, "gate": gate, "up": up}
    w_down, gate, *up = rest
    dh = first @ (w_down if oi else w_down.T)
    s = 1 / (1 + np.exp(-gate))
    found = {"dup": dh * gate * s}
    if up:
        found["dgate"] = dh * up[0] * s * (1 + gate * (1 - s))
        found["h"] = gate * s * up[0]
    return found


def launcher(variant: KernelVariant) -> Callable:
    """The variant's custom call, as the lowering of a stage writes it."""
    _native.register()
    canonical = STAGE_OUTPUTS[variant.stage]
    mask = sum(1 << canonical.index(output) for output in variant.outputs)

    def run(*operands: jax.Array) -> list[jax.Array]:
        rows = operands[0].shape[:-1]
        first = operands[1].shape
        hidden_first = (variant.stage == "gate_up") == (variant.weight_layout == "OI")
        result = jax.ShapeDtypeStruct((*rows, first[0 if hidden_first else 1]), operands[0].dtype)
        call = jax.ffi.ffi_call(
            f"swiglu_jax_exported_{variant.stage}", [result] * len(variant.outputs)
        )
        return call(
            *operands,
            outputs=np.int64(mask),
            weight_layout=variant.weight_layout,
            kernel=variant.name,
        )

    return run


def check(variant: KernelVariant, got: Sequence[jax.Array], operands: Sequence) -> None:
    expected = reference(variant, [np.asarray(operand) for operand in operands])
    for name, array in zip(variant.outputs, got, strict=True):
        found = error(np.asarray(array), expected[name])
        assert found <= BOUNDS[variant.dtype], f"{variant.name} {name}: {found:.2e}"


def fits(variant: KernelVariant, m: int, h: int, i: int) -> bool:
    return not (m % variant.m_multiple or h % variant.h_multiple or i % variant.i_multiple)


@pytest.mark.parametrize("variant", LOCAL, ids=_name)
def test_values(rng: np.random.Generator, variant: KernelVariant) -> None:
    run = jax.jit(launcher(variant))
    tried = 0
    for m, h, i in SHAPES:
        if not fits(variant, m, h, i):
            continue
        operands = problem(rng, variant, m, h, i)
        check(variant, run(*map(jnp.asarray, operands)), operands)
        tried += 1
    assert tried >= 2, "the kernel fits too few of the shapes"


def replay(rng: np.random.Generator, variant: KernelVariant) -> None:
    """Run three calls with work between them, four times with other data."""
    run = launcher(variant)

    @jax.jit
    def chain(first: jax.Array, *others: jax.Array) -> list[list[jax.Array]]:
        return [run(first * scale, *others) for scale in (1, 2, 4)]

    for _ in range(4):
        operands = problem(rng, variant, 256, 512, 1024)
        arrays = [jnp.asarray(operand) for operand in operands]
        for scale, outputs in zip((1, 2, 4), chain(*arrays), strict=True):
            scaled = [(operands[0] * scale).astype(operands[0].dtype), *operands[1:]]
            check(variant, outputs, scaled)


def test_replays_of_a_captured_graph_read_their_own_buffers() -> None:
    """In a process of its own, since the flags that make XLA capture are the process's."""
    done = subprocess.run(
        [sys.executable, HERE / "replay_kernels.py"],
        env=os.environ | {
            "XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1 "
                         "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2",
            "PYTHONPATH": os.pathsep.join(str(p) for p in (HERE, HERE.parent, HERE.parents[1])),
        },
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == len(SAMPLE)


def test_no_rows(rng: np.random.Generator) -> None:
    variant = LOCAL[0]
    assert variant is not None
    operands = problem(rng, variant, 0, 64, 128)
    got = jax.jit(launcher(variant))(*map(jnp.asarray, operands))
    assert [array.shape for array in got] == [(0, 128)] * len(variant.outputs)


def test_a_refusal_is_an_error_with_its_text(rng: np.random.Generator) -> None:
    variant = LOCAL[0]
    assert variant is not None
    operands = problem(rng, variant, 64, 64 + variant.h_multiple // 2, 128)
    with pytest.raises(Exception, match="H: expected a multiple"):
        jax.block_until_ready(jax.jit(launcher(variant))(*map(jnp.asarray, operands)))

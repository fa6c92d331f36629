"""Exported kernels on a real GPU, through the launcher inside jax.jit, command buffers included."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stage_shapes import stage_shapes
from support import error

from swiglu_jax import _device, _native
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant, outputs_mask

HERE = Path(__file__).parent
BOUNDS = {"bfloat16": 6e-3, "float16": 2e-3}
SHAPES = [(1, 64, 128), (300, 136, 272), (257, 1032, 2064), (2048, 1024, 3072)]
"""M, H, I; ragged in every size, then several whole tiles."""


def _local_kernels() -> list[KernelVariant]:
    target = _device.local_gpu_target()
    found = [kernel.variant for kernel in _manifest.installed().kernels]
    return [variant for variant in found if variant.arch == target]


LOCAL = _local_kernels() or [None]
_BY_STAGE = [[v for v in LOCAL if v is not None and v.stage == stage] for stage in STAGE_OUTPUTS]
SAMPLE = list(dict.fromkeys(v for found in _BY_STAGE if found for v in (found[0], found[-1])))
TARGETS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
pytestmark = pytest.mark.gpu(targets=TARGETS)


def _name(variant: KernelVariant | None) -> str:
    return variant.name if variant else "none"


def problem(
    rng: np.random.Generator, variant: KernelVariant, m: int, h: int, i: int
) -> list[np.ndarray]:
    """Operands in stage order, of order one where they are activations."""

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape) * scale, jnp.dtype(variant.dtype)))

    contraction = i if variant.stage == "input_gradient" else h
    return [
        normal(*shape, scale=contraction**-0.5 if name.startswith("w_") else 1.0)
        for name, shape in stage_shapes(variant, (m,), h, i)[0].items()
    ]


def reference(variant: KernelVariant, operands: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Every output in float64, from gate and up as they are stored."""
    names = stage_shapes(variant, (1,), 1, 1)[0]
    given = {k: v.astype(np.float64) for k, v in zip(names, operands, strict=True)}
    oi = variant.weight_layout == "OI"
    if variant.stage == "input_gradient":
        terms = (("dgate", "w_gate"), ("dup", "w_up"))
        return {"x": sum(given[d] @ (given[w] if oi else given[w].T) for d, w in terms)}
    if variant.stage == "weight_gradients":
        # A weight's gradient is its output's cotangent by its input, each summed over tokens.
        pairs = {"w_gate": ("dgate", "x"), "w_up": ("dup", "x"), "w_down": ("dy", "h")}
        chosen = {name: pairs[name] if oi else pairs[name][::-1] for name in variant.outputs}
        return {name: given[a].T @ given[b] for name, (a, b) in chosen.items()}
    first, *rest = given.values()
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


def sizes_of(variant: KernelVariant, operands: Sequence[Any]) -> tuple[tuple[int, ...], int, int]:
    """Leading dimensions, H and I of a call, from its operands."""
    symbols = stage_shapes(variant, (), -1, -2)[0].values()
    found = {}
    for dims, operand in zip(symbols, operands, strict=True):
        for symbol, size in zip(dims[::-1], operand.shape[::-1], strict=False):
            found[symbol] = size
    lead = next(o.shape[:-1] for d, o in zip(symbols, operands, strict=True) if len(d) == 1)
    return lead, found[-1], found[-2]


def launcher(variant: KernelVariant, in_place: bool = False) -> Callable:
    """The variant's custom call, as the lowering of a stage writes it.

    ``in_place``: its first outputs in the memory of gate and up.
    """
    _native.register()

    def run(*operands: jax.Array) -> list[jax.Array]:
        lead, h, i = sizes_of(variant, operands)
        shapes = stage_shapes(variant, lead, h, i)[1].values()
        results = [jax.ShapeDtypeStruct(shape, operands[0].dtype) for shape in shapes]
        pairs = zip(range(2, len(operands)), range(len(results)), strict=False)
        call = jax.ffi.ffi_call(
            f"swiglu_jax_exported_{variant.stage}",
            results,
            input_output_aliases=dict(pairs) if in_place else {},
        )
        return call(
            *operands,
            outputs=np.int64(outputs_mask(variant.stage, variant.outputs)),
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


@pytest.mark.parametrize("variant", [v for v in LOCAL if v is None or v.overwrites], ids=_name)
def test_in_place(rng: np.random.Generator, variant: KernelVariant) -> None:
    """The same bits where outputs take the memory of gate and up, from one tile to many waves."""
    apart = jax.jit(launcher(variant))
    gate_and_up = tuple(range(2, 3 if variant.outputs == ("dup",) else 4))
    together = jax.jit(launcher(variant, in_place=True), donate_argnums=gate_and_up)
    for m, h, i in (*SHAPES, (8192, 256, 4096)):
        if not fits(variant, m, h, i):
            continue
        arrays = [jnp.asarray(operand) for operand in problem(rng, variant, m, h, i)]
        expected = [np.asarray(output) for output in apart(*arrays)]
        compiled = together.lower(*arrays).compile()
        assert " copy(" not in compiled.as_text()
        for _ in range(3):
            given = [jnp.copy(a) if k in gate_and_up else a for k, a in enumerate(arrays)]
            for want, got in zip(expected, compiled(*given), strict=True):
                assert want.tobytes() == np.asarray(got).tobytes()
            assert all(given[k].is_deleted() for k in gate_and_up)


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


@pytest.mark.gpu(count=2, targets=TARGETS)
@pytest.mark.parametrize("variant", SAMPLE or [None], ids=_name)
def test_each_device_loads_a_kernel_for_itself(
    rng: np.random.Generator, variant: KernelVariant
) -> None:
    """The second one while the first one may be running it."""
    operands = problem(rng, variant, *SHAPES[-1])
    run = jax.jit(launcher(variant))
    devices = jax.local_devices(backend="cuda")[1::-1]
    there = [jax.device_put(operands, device) for device in devices]
    for k, outputs in enumerate([run(*there[k % 2]) for k in range(6)]):
        assert {array.device for array in outputs} == {devices[k % 2]}
        check(variant, outputs, operands)


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

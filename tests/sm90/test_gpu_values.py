"""The SM90 kernels on a GPU, against float64: ragged sizes, edges, repeatability."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import error
from test_gpu_launcher import BOUNDS, LOCAL, check, launcher, problem, reference

from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant

SM90 = [v for v in LOCAL if v is not None and v.arch == "sm_90a"] or [None]
pytestmark = pytest.mark.gpu(targets=("sm_90a",))
WIDEST = [v for v in SM90 if v is not None and v.outputs == STAGE_OUTPUTS[v.stage]] or [None]
GRADIENTS = [
    v for v in SM90 if v is not None and v.stage in ("input_gradient", "weight_gradients")
] or [None]
ROUNDED_ONCE = {"bfloat16": 1.9e-3, "float16": 2.4e-4}
"""Relative L2 error of normal values rounded to nearest is 1.66e-3 and 2.08e-4; of a sum whose two
terms were rounded first, sqrt(2) times that."""
SHAPES = [
    (1, 8, 8),
    (7, 24, 40),
    (64, 72, 200),
    (129, 136, 264),
    (300, 1000, 520),
    (1000, 2056, 1032),
    (2304, 1024, 4096),
    (640, 4096, 3080),
]
"""M, H, I: below one tile, ragged in each, one block with several tiles, every block with many."""


def _name(variant: KernelVariant | None) -> str:
    return variant.name if variant else "none"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("variant", WIDEST, ids=_name)
def test_ragged(
    rng: np.random.Generator, variant: KernelVariant, shape: tuple[int, int, int]
) -> None:
    """Near float64, from gate and up as the kernel itself rounded them: those may fall either way.

    And the same bits each time: no output depends on the order of anything.
    """
    operands = problem(rng, variant, *shape)
    run = jax.jit(launcher(variant))
    arrays = [jnp.asarray(operand) for operand in operands]
    first = [np.asarray(output) for output in run(*arrays)]
    expected = reference(variant, operands)
    if variant.stage == "gate_up":
        gate, up = (first[k].astype(np.float64) for k in (1, 2))
        expected["h"] = gate / (1 + np.exp(-gate)) * up
    for name, got in zip(variant.outputs, first, strict=True):
        found = error(got, expected[name])
        assert found <= BOUNDS[variant.dtype], f"{name}: {found:.2e}"
    for _ in range(3):
        for once, again in zip(first, run(*arrays), strict=True):
            assert once.tobytes() == np.asarray(again).tobytes()


@pytest.mark.parametrize("variant", SM90, ids=_name)
def test_every_output_set(rng: np.random.Generator, variant: KernelVariant) -> None:
    operands = problem(rng, variant, 200, 520, 776)
    check(variant, jax.jit(launcher(variant))(*map(jnp.asarray, operands)), operands)


@pytest.mark.parametrize("shape", [(1500, 2048, 1024), (4096, 512, 2056)], ids=str)
@pytest.mark.parametrize("variant", GRADIENTS, ids=_name)
def test_gradients_round_once(
    rng: np.random.Generator, variant: KernelVariant, shape: tuple[int, int, int]
) -> None:
    """One float32 sum over both terms of dx, and over all tokens of a weight's gradient."""
    operands = problem(rng, variant, *shape)
    got = jax.jit(launcher(variant))(*map(jnp.asarray, operands))
    for name, array in zip(variant.outputs, got, strict=True):
        found = error(np.asarray(array), reference(variant, operands)[name])
        assert found <= ROUNDED_ONCE[variant.dtype], f"{name}: {found:.2e}"


@pytest.mark.parametrize("variant", GRADIENTS, ids=_name)
def test_gradients_keep_infinities_and_nans_where_they_belong(
    rng: np.random.Generator, variant: KernelVariant
) -> None:
    """What lies beyond a ragged end is read as zero on both sides: it spoils nothing.

    One row of A and one of B are not finite; every other element of the result must be.
    """
    operands = [operand.copy() for operand in problem(rng, variant, 300, 136, 264)]
    operands[0][5, 3] = np.inf
    operands[-1][7, 2] = np.nan
    with np.errstate(invalid="ignore"):
        expected = reference(variant, operands)
    for name, array in zip(
        variant.outputs, jax.jit(launcher(variant))(*map(jnp.asarray, operands)), strict=True
    ):
        finite = np.isfinite(np.asarray(array, np.float64))
        assert (finite == np.isfinite(expected[name])).all(), name


@pytest.mark.parametrize(
    "variant", [v for v in WIDEST if v is None or v.stage == "down_dswiglu"], ids=_name
)
def test_extreme_gates(rng: np.random.Generator, variant: KernelVariant) -> None:
    """Outputs stay finite at gates so large that exp overflows, of either sign, and at zero."""
    operands = [operand.copy() for operand in problem(rng, variant, 64, 128, 256)]
    gate = operands[2]
    largest = float(jnp.finfo(gate.dtype).max)
    edges = np.array([0, -0.0, 88, -88, 200, -200, 3e4, -3e4, largest, -largest])
    gate[...] = rng.choice(edges, gate.shape).astype(gate.dtype)
    # With up and dh this small no product of finite values overflows.
    operands[3][...] = 0
    operands[0][...] = (operands[0].astype(np.float32) * 1e-6).astype(gate.dtype)
    for name, output in zip(
        variant.outputs, jax.jit(launcher(variant))(*map(jnp.asarray, operands)), strict=True
    ):
        if name != "dup":  # dup grows with the gate itself
            assert np.isfinite(np.asarray(output, np.float64)).all(), name
        assert not np.isnan(np.asarray(output, np.float64)).any(), name

"""What the SM120 kernels' entries ask of the driver (test_frost_launches.py, for the other family).

These store without the copy engine: outputs travel as tensors, and A and B alone as tensor maps.
"""

from collections.abc import Callable

import numpy as np
import pytest
from exported_recorder import STREAM, Buffer, TensorMap, buffers_of, integer
from test_frost_launches import SHAPES, SWIZZLE_128B, check_map

from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant

KERNELS = [k.variant for k in _manifest.installed().kernels if k.variant.abi == "frost_stg"]
SHARED_LIMIT = 101376


def words(parameter: bytes) -> list[int]:
    return np.frombuffer(parameter, np.int64).tolist()


@pytest.mark.parametrize("variant", KERNELS, ids=lambda v: v.name)
def test_a_launch_is_what_the_problem_calls_for(
    recorder_of: Callable, variant: KernelVariant
) -> None:
    recorder = recorder_of(variant.arch)
    tile_m, tile_n, tile_k = variant.tile
    for lead, h, i in SHAPES:
        m = int(np.prod(lead))
        operands, results = buffers_of(variant, lead, h, i)
        launch = recorder.call(variant, operands, results).launch
        assert launch.grid == (-(-m // tile_m), -(-i // tile_n), 1)
        assert (launch.cluster, launch.stream, launch.loaded) == ((1, 1, 1), STREAM, True)
        assert f"_{tile_m}x{tile_n}x{2 * tile_k}_" in launch.kernel
        weights = 2 if variant.stage == "gate_up" else 1
        stage = 2 * tile_k * (tile_m + weights * tile_n)
        assert stage < launch.shared <= SHARED_LIMIT

        maps = [p for p in launch.parameters if isinstance(p, TensorMap)]
        assert len(maps) == 1 + weights
        check_map(maps[0], operands[0], m, h, (tile_k, tile_m), SWIZZLE_128B)
        hidden_first = (variant.stage == "gate_up") == (variant.weight_layout == "OI")
        for found, weight in zip(maps[1:], operands[1 : 1 + weights], strict=True):
            rows, columns = (i, h) if hidden_first else (h, i)
            box = (tile_k, tile_n) if hidden_first else (64, tile_k)
            check_map(found, weight, rows, columns, box, SWIZZLE_128B)

        others = [p for p in launch.parameters if not isinstance(p, TensorMap)]
        assert [integer(p) for p in others[:3]] == [m, i, h]
        by_name: dict[str, Buffer] = {b.name.removeprefix("result "): b for b in results}
        order = variant.entry_outputs or variant.outputs
        tensors = [words(p) for p in others[3:] if len(p) > 8]
        # Outputs as (M, I, 1) with the row pitch, then gate and up as (1, M, I) with theirs.
        outputs = [[by_name[name].data, m, i, 1, i, m * i] for name in order]
        residuals = operands[2:] if variant.stage == "down_dswiglu" else []
        assert tensors == outputs + [[b.data, m, i, m * i, i] for b in residuals]
        strides = [integer(p) for p in others[3:] if len(p) == 8]
        assert strides == [i, 1, m * i] * len(results)


def test_sm120_kernels_are_shipped() -> None:
    from swiglu_jax.kernels import sm120  # noqa: PLC0415

    assert set(sm120.variants()) == set(KERNELS)

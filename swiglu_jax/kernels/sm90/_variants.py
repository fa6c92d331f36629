"""Which SM90 kernels are shipped, the preferred first where nothing was timed."""

import itertools

from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90._tiles import TILES

ARCHITECTURE = "sm_90a"
DTYPES = {"bfloat16": "bf16", "float16": "f16"}
OUTPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up": (("h",), ("h", "gate"), ("h", "gate", "up")),
    "down_dswiglu": (("dup",), ("dgate", "dup"), ("dgate", "dup", "h")),
    "input_gradient": (("x",),),
    "weight_gradients": (("w_down",), ("w_gate", "w_up"), ("w_gate", "w_up", "w_down")),
}
"""What a step asks for; gate and up without h, which remat asks for, are served by all three."""
WAVE = 66
"""Clusters of two blocks that an H100 or H200 runs at once."""
FLOAT16_TILES = ("large", "small")
"""float16 gets fewer tiles: models train in bfloat16, and each kernel takes seconds to compile."""


def variants() -> list[KernelVariant]:
    """Every SM90 kernel that the package ships."""
    found = []
    for stage, tiles in TILES.items():
        for (label, tile), (dtype, short), layout, outputs in itertools.product(
            tiles.items(), DTYPES.items(), ("OI", "IO"), OUTPUTS[stage]
        ):
            if dtype == "float16" and label not in FLOAT16_TILES:
                continue
            operands = 2 if stage == "gate_up" else 1
            found.append(
                KernelVariant(
                    name=f"sm90_{stage}_{'_'.join(outputs)}_{label}_{layout.lower()}_{short}",
                    stage=stage,
                    arch=ARCHITECTURE,
                    outputs=outputs,
                    weight_layout=layout,
                    dtype=dtype,
                    tile=(tile.m, tile.n // operands, tile.k),
                    cluster=tile.cluster,
                )
            )
    return found


def label_of(variant: KernelVariant) -> str:
    """Name of a variant's tile in ``TILES``."""
    return variant.name.split("_")[-3]


def preferred_tiles(stage: str, m: int, h: int, i: int | None = None) -> tuple[str, ...]:
    """Names of ``stage``'s tiles, the one that an H200 preferred at such sizes first.

    A rule for where nothing was timed, read off docs/hopper.md; the best tile also depends on how
    I divides into waves, which only timing shows. ``i`` matters to weight_gradients alone.
    """
    if stage == "input_gradient":
        first = ("large",)
    elif stage == "weight_gradients":
        large = TILES[stage]["large"]
        rows, columns = large.m * large.cluster[0], large.n * large.cluster[1]
        # Gradients that a wave of clusters covers whole; rows and columns are as good as equal.
        few = i is not None and -(-h // columns) * -(-i // rows) <= WAVE
        first = ("medium",) if few else ("large",)
    elif m <= 64:
        first = ("small", "narrow")
    elif m <= 128:
        first = ("narrow", "small")
    elif stage == "down_dswiglu" and h < 1536:
        first = ("short",)
    elif m <= 512:
        first = ("medium",)
    else:
        first = ("large",)
    return (*first, *(label for label in TILES[stage] if label not in first))

"""Which SM100 kernels are shipped. (Adding one compiles no other anew: export.py.)"""

import dataclasses

from swiglu_jax.kernels._variant import KernelVariant

ARCHITECTURES = ("sm_100a", "sm_103a")
DTYPES = {"bfloat16": "bf16", "float16": "f16"}

DOWN_DSWIGLU_OUTPUTS = (("dup",), ("dgate", "dup"), ("dgate", "dup", "h"))
"""What the backward of a differentiated set asks for (swiglu_jax/_residuals.py)."""
GATE_UP_OUTPUTS = (("h",), ("h", "gate"), ("h", "gate", "up"), ("gate", "up"))
"""What the forward emits, and what remat asks for: gate and up without h."""

K_BYTES = 128
"""Depth of a tile along the contraction: one 128-byte swizzle atom."""


def _tile_widths(arch: str, dtype: str, outputs: tuple[str, ...]) -> tuple[int, ...]:
    """Widths N of the tiles to ship: both where they are timed against each other, else 256."""
    if outputs == ("gate", "up"):
        # ptxas gives the epilogue without h 64 registers at 256 columns, and spills.
        return (128,)
    return (256, 128) if (arch, dtype) == ("sm_100a", "bfloat16") else (256,)


def _name(arch: str, stage: str, outputs: tuple[str, ...], n: int, ctas: int, layout: str,
          dtype: str) -> str:  # fmt: skip
    number = arch.removeprefix("sm_").rstrip("a")
    tile = f"128x{n}_{ctas}cta"
    return f"sm{number}_{stage}_{'_'.join(outputs)}_{tile}_{layout.lower()}_{DTYPES[dtype]}"


def _variant(arch: str, stage: str, outputs: tuple[str, ...], n: int, ctas: int, layout: str,
             dtype: str) -> KernelVariant:  # fmt: skip
    return KernelVariant(
        name=_name(arch, stage, outputs, n, ctas, layout, dtype),
        stage=stage,
        arch=arch,
        outputs=outputs,
        weight_layout=layout,
        dtype=dtype,
        tile=(128, n, K_BYTES // 2),
        cluster=(ctas, 1),
        ctas=ctas,
        abi="frost",
        h_multiple=8,
        i_multiple=16,
        # gate and up are read 32 bytes at a time; everything else goes through TMA.
        residual_alignment=32,
    )


def variants() -> list[KernelVariant]:
    """Every SM100 kernel that the package ships."""
    found = []
    for arch in ARCHITECTURES:
        # B300 gets what a bfloat16 model needs; its float16 goes through cuDNN.
        for dtype in DTYPES if arch == "sm_100a" else ("bfloat16",):
            for layout in ("OI", "IO"):
                for outputs in DOWN_DSWIGLU_OUTPUTS:
                    for n in _tile_widths(arch, dtype, outputs):
                        for ctas in (2, 1):
                            found.append(
                                _variant(arch, "down_dswiglu", outputs, n, ctas, layout, dtype)
                            )
                for outputs in GATE_UP_OUTPUTS:
                    for n in _tile_widths(arch, dtype, outputs):
                        # FROST compiles several GEMMs into one kernel with 1 CTA only. It stores
                        # h last, since it is computed from the other two.
                        one = _variant(arch, "gate_up", outputs, n, 1, layout, dtype)
                        order = tuple(o for o in ("gate", "up", "h") if o in outputs)
                        found.append(dataclasses.replace(one, entry_outputs=order))
    return found

"""Which SM120 kernels are shipped."""

from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm100._variants import DOWN_DSWIGLU_OUTPUTS, GATE_UP_OUTPUTS, K_BYTES

ARCHITECTURE = "sm_120a"


def variants() -> list[KernelVariant]:
    """Every SM120 kernel that the package ships: bfloat16, one tile a stage."""
    stages = {"down_dswiglu": DOWN_DSWIGLU_OUTPUTS, "gate_up": GATE_UP_OUTPUTS}
    return [
        KernelVariant(
            name=f"sm120_{stage}_{'_'.join(outputs)}_128x128_{layout.lower()}_bf16",
            stage=stage,
            arch=ARCHITECTURE,
            outputs=outputs,
            weight_layout=layout,
            dtype="bfloat16",
            tile=(128, 128, K_BYTES // 2),
            abi="frost_stg",
            entry_outputs=(
                tuple(o for o in ("gate", "up", "h") if o in outputs) if stage == "gate_up" else ()
            ),
            h_multiple=8,
            i_multiple=16,
            residual_alignment=16,
        )
        for layout in ("OI", "IO")
        for stage, outputs_of_stage in stages.items()
        for outputs in outputs_of_stage
    ]

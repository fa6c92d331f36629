"""Every exported kernel's machine code: its target, its tensor-core instructions, no spills."""

import functools
import tempfile
from pathlib import Path

import pytest
from cubins import Cubin, Sass, cubins, disassemble

from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant

KERNELS = [kernel.variant for kernel in _manifest.installed().kernels]
TENSOR_CORE = {
    "sm_90a": "HGMMA",
    "sm_100a": "UTCHMMA",
    "sm_103a": "UTCHMMA",
    "sm_120a": "HMMA",
}
"""wgmma on SM90, tcgen05.mma of 16-bit floats on SM100, mma of a warp on SM120."""


@functools.cache
def _of_library(arch: str) -> list[Cubin]:
    return cubins(_manifest.LIB / _manifest.library_name(arch))


def cubin_of(variant: KernelVariant) -> Cubin:
    """A library holds its kernels' cubins in the order of the manifest."""
    mine = [other for other in KERNELS if other.arch == variant.arch]
    found = _of_library(variant.arch)
    assert len(found) == len(mine), "one cubin a kernel"
    return found[mine.index(variant)]


@functools.cache
def sass_of(variant: KernelVariant) -> Sass:
    with tempfile.TemporaryDirectory() as folder:
        return disassemble(cubin_of(variant), Path(folder))


@pytest.mark.parametrize("variant", KERNELS, ids=lambda v: v.name)
def test_machine_code(variant: KernelVariant) -> None:
    cubin = cubin_of(variant)
    assert len(cubin.kernels) == 1, cubin.kernels
    sass = sass_of(variant)
    assert sass.target == variant.arch
    mma = {n for n in sass.opcodes if n.split(".")[0] == TENSOR_CORE[variant.arch]}
    assert mma, sorted(sass.opcodes)
    if variant.abi == "frost":
        m, n, k = variant.tile
        assert f"_{m}x{n}x{2 * k}_" in cubin.kernels[0]
        assert f"_{variant.ctas}ctamma" in cubin.kernels[0]
        assert {("2CTA" in name.split(".")) for name in mma} == {variant.ctas == 2}
        # The tiles travel through the copy engine both ways.
        assert sass.count("UTMALDG") and sass.count("UTMASTG")
        assert sass.count("UTMASTG") % len(variant.outputs) == 0
    assert sass.count("LDL") == 0 and sass.count("STL") == 0
    assert cubin.stack_bytes == 0
    # A 256-thread block must fit the register file; warps trade registers only after the launch.
    assert 0 < cubin.registers <= 255


@pytest.mark.parametrize("variant", [v for v in KERNELS if v.abi == "frost"], ids=lambda v: v.name)
def test_residuals_are_read_in_wide_loads(variant: KernelVariant) -> None:
    """The rewritten pitch must not cost the 32-byte loads of whole tiles."""
    sass = sass_of(variant)
    wide = sum(n for name, n in sass.opcodes.items() if name.startswith("LDG") and "256" in name)
    assert (wide > 0) == (variant.stage == "down_dswiglu")


def test_the_disassembler_sees_spills_and_registers() -> None:
    """Guards the checks above: opcodes are read with modifiers, and registers are plausible."""
    sass = sass_of(KERNELS[0])
    assert sum(sass.opcodes.values()) > 500
    assert any("." in name for name in sass.opcodes) and sass.count("EXIT") >= 1
    assert {cubin_of(v).registers for v in KERNELS} != {0}

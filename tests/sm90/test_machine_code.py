"""What the compiler made of each SM90 kernel: the instructions that its tile and layout ask for."""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from cubins import Cubin, cubins, nvdisasm

from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import KernelVariant
from swiglu_jax.kernels.sm90 import compile_and_export, variants
from swiglu_jax.kernels.sm90._tile import GROUP_COLUMNS
from swiglu_jax.kernels.sm90._tiles import TILES
from swiglu_jax.kernels.sm90._variants import ARCHITECTURE, label_of

INSTALLED = [
    kernel.variant
    for kernel in _manifest.installed().kernels
    if kernel.variant.arch == ARCHITECTURE
]
needs_library = pytest.mark.skipif(not INSTALLED, reason="make kernels has not run for sm_90a")


LINE = re.compile(
    r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);\s+/\* 0x\w+ \*/\n"
    r"\s+/\* 0x(\w+) \*/",
    re.M,
)
"""Opcode, operands and the upper 64 bits of an instruction."""


class Instruction(NamedTuple):
    opcode: str
    """With its modifiers, such as "HGMMA.64x256x16.F32.BF16"."""
    operands: str
    sets: int | None
    """The scoreboard that it sets until its result is there (of six), if any."""
    waits: int
    """The scoreboards that it waits for, a bit each."""


def code_of(cubin: Cubin) -> list[Instruction]:
    """The kernel's instructions, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin.image)
        text = subprocess.run(
            [nvdisasm(), "-c", "-ndf", "-hex", path], check=True, capture_output=True, text=True
        ).stdout
    found = []
    for opcode, operands, upper in LINE.findall(text):
        # From bit 105 of the 128: 4 bits of stall, a yield, 3 of the scoreboard set on write (7:
        # none), 3 of the one set on read, 6 waited for. (Jia et al. 2018, arXiv 1804.06826, 2.1)
        control = int(upper, 16) >> 41
        sets = control >> 5 & 7
        found.append(Instruction(opcode, operands, sets if sets < 7 else None, control >> 11 & 63))
    return found


def instructions(code: list[Instruction]) -> Counter[str]:
    """How often each opcode occurs, and how many take A or B transposed: "tnspA", "tnspB"."""
    found = Counter(line.opcode for line in code)
    for name in ("tnspA", "tnspB"):
        found[name] = sum(name in x.operands for x in code if x.opcode.startswith("HGMMA"))
    return found


def overtaking(code: list[Instruction]) -> int:
    """Arrivals at barriers that do not wait for a load from shared memory before them.

    Shared memory that was given back by such an arrival can be written before it is read.
    """
    under_way: set[int] = set()
    found = 0
    for line in code:
        under_way -= {k for k in under_way if line.waits >> k & 1}
        if line.opcode.startswith("LDS"):  # and LDSM
            assert line.sets is not None
            under_way.add(line.sets)
        found += line.opcode.startswith("SYNCS.ARRIVE") and bool(under_way)
    return found


def count(found: Counter[str], start: str) -> int:
    return sum(number for opcode, number in found.items() if opcode.startswith(start))


def transposed(variant: KernelVariant) -> tuple[bool, bool]:
    """Whether A and B reach the tensor cores with their rows along the contraction."""
    oi = variant.weight_layout == "OI"
    if variant.stage == "weight_gradients":
        return True, True
    return False, {"gate_up": not oi, "down_dswiglu": oi, "input_gradient": oi}[variant.stage]


def check(variant: KernelVariant, cubin: Cubin) -> None:
    tile = TILES[variant.stage][label_of(variant)]
    code = code_of(cubin)
    found = instructions(code)
    assert overtaking(code) == 0
    element = {"bfloat16": "BF16", "float16": "F16"}[variant.dtype]
    wgmma = {opcode for opcode in found if opcode.startswith("HGMMA")}
    expected = f"HGMMA.64x{tile.n}x16.F32"
    assert wgmma == {f"{expected}.{element}" if element == "BF16" else expected}
    # Every operand as it is stored: nothing is transposed on the way to the tensor cores.
    for name, expected in zip(("tnspA", "tnspB"), transposed(variant), strict=True):
        assert found[name] == (count(found, "HGMMA") if expected else 0), name
    assert (count(found, "UTMALDG.2D.MULTICAST") > 0) == (tile.cluster != (1, 1))
    # Inside the next tile's main loop, and once more after the last tile.
    groups = variant.tile[1] // GROUP_COLUMNS
    assert count(found, "UTMASTG") == 2 * groups * len(variant.outputs)
    staged = 1 if variant.stage == "weight_gradients" else len(variant.outputs)
    assert count(found, "STSM.16.M88.4") == 2 * 2 * groups * staged
    assert count(found, "STG") == 0 and count(found, "LDG") == 0, "everything travels by TMA"
    assert count(found, "LDL") == 0 and count(found, "STL") == 0
    assert cubin.stack_bytes == 0
    # What a block may have before its warpgroups trade registers.
    assert cubin.registers * 128 * (tile.warpgroups + 1) <= 65536


@needs_library
@pytest.mark.parametrize("variant", INSTALLED, ids=lambda v: v.name)
def test_shipped(variant: KernelVariant) -> None:
    check(variant, _library()[INSTALLED.index(variant)])


@functools.cache
def _library() -> list[Cubin]:
    """In the order of the manifest."""
    found = cubins(_manifest.LIB / _manifest.library_name(ARCHITECTURE))
    assert len(found) == len(INSTALLED)
    return found


@needs_library
def test_every_variant_is_shipped() -> None:
    assert variants() == INSTALLED, "make kernels has not run since the variants changed"


@pytest.mark.parametrize(
    "name",
    ["sm90_down_dswiglu_dup_small_oi_bf16", "sm90_weight_gradients_w_gate_w_up_medium_io_bf16"],
)
def test_fresh(tmp_path: Path, name: str) -> None:
    """A kernel compiled now, so that this file tests the sources also where no library is."""
    pytest.importorskip("cutlass", reason="the compiler is the build's")
    (variant,) = [variant for variant in variants() if variant.name == name]
    compile_and_export(variant, tmp_path / "kernel.o")
    (cubin,) = cubins(tmp_path / "kernel.o")
    check(variant, cubin)

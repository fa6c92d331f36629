"""The kernel libraries as files: what they show, need and run on."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiglu_jax.kernels import _linker, _manifest, export
from swiglu_jax.kernels._variant import KernelVariant

ARCHITECTURES = _manifest.installed().architectures
REPOSITORY = Path(__file__).parents[2]
WHEEL_BYTES = 60e6
MODULES = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100", "sm_120a": "sm120"}


def library(arch: str) -> Path:
    return _manifest.LIB / _manifest.library_name(arch)


def kernels(arch: str) -> list[KernelVariant]:
    return [k.variant for k in _manifest.installed().kernels if k.variant.arch == arch]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_library_shows_its_entries_and_nothing_else(arch: str) -> None:
    shown = set(_linker.defined_symbols(library(arch), dynamic=True))
    entries = {f"__tvm_ffi_{variant.name}" for variant in kernels(arch)}
    assert shown == entries | {"__tvm_ffi_swiglu_jax_kernel_library"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_library_needs_neither_cuda_nor_the_dsl(arch: str) -> None:
    text = subprocess.run(
        ["readelf", "--dynamic", "--wide", library(arch)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    assert needed <= {"libc.so.6"}
    undefined = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", "--format=posix", library(arch)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    strong = {line.split()[0] for line in undefined.splitlines() if line.split()[1] == "U"}
    assert not {name for name in strong if "@GLIBC" not in name}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_host_code_runs_on_every_x86_64(arch: str) -> None:
    """No VEX or EVEX instruction (AVX and later), whatever machine built it."""
    text = subprocess.run(
        ["objdump", "-d", "-w", "--section=.ltext", "--section=.text", library(arch)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    lines = re.findall(r"^\s+[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(\S+)(.*)$", text, re.M)
    assert len(lines) > 1000 * len(kernels(arch))
    # In 64-bit code c4 and c5 only begin VEX instructions, and 62 only EVEX ones.
    beyond = [line for line in lines if line[0][:2] in ("c4", "c5", "62")]
    assert not beyond, beyond[:3]
    assert not re.search(r"%[yz]mm", text)


def test_the_wheel_stays_small() -> None:
    assert sum(path.stat().st_size for path in _manifest.LIB.iterdir()) < WHEEL_BYTES


def test_the_manifest_is_what_the_sources_say() -> None:
    """What is installed was exported from these sources, with the compilers that are here."""
    manifest = _manifest.installed()
    assert manifest.versions == export.versions()
    for kernel in manifest.kernels:
        assert kernel.digest == export.digest(kernel.variant, MODULES[kernel.variant.arch])


def test_a_digest_names_the_variant_and_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [kernel.variant for kernel in _manifest.installed().kernels][:10]
    assert len({export.digest(v, "sm100") for v in variants}) == len(variants)
    before = export.digest(variants[0], "sm100")
    copy = tmp_path / "kernels"
    shutil.copytree(export.KERNELS, copy)
    monkeypatch.setattr(export, "KERNELS", copy)
    assert export.digest(variants[0], "sm100") == before
    (copy / "sm100/_variants.py").write_text("# another list\n")
    assert export.digest(variants[0], "sm100") == before
    (copy / "sm100/_graphs.py").write_text("# another graph\n")
    assert export.digest(variants[0], "sm100") != before


def test_nothing_is_built_again_when_nothing_changed(tmp_path: Path) -> None:
    """With every object there, the exporter leaves the libraries and the manifest alone."""
    objects = REPOSITORY / "build/kernels"
    if not objects.exists():
        pytest.skip("the kernels were not exported in this checkout")
    for kernel in _manifest.installed().kernels:
        v = kernel.variant
        name = f"{v.name}.{export.digest(v, MODULES[v.arch])}.o"
        assert (objects / v.arch / name).exists(), f"{name} is missing: run `make kernels`"
    folder = tmp_path / "lib"
    shutil.copytree(_manifest.LIB, folder)  # with the times of the files
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    archs = [flag for arch in ARCHITECTURES for flag in ("--arch", arch)]
    done = subprocess.run(
        [sys.executable, export.__file__, "--objects", objects, "--lib", folder, *archs],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == ""
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_object_that_shows_more_than_its_entry_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "kernel.c"
    source.write_text("int __tvm_ffi_one(void) { return 0; }\nint helper(void) { return 1; }\n")
    made = tmp_path / "kernel.o"
    subprocess.run(["gcc", "-c", source, "-o", made], check=True)
    with pytest.raises(ValueError, match="helper"):
        _linker.check_object(made, "one")


@pytest.mark.parametrize(("changes", "said"), [
    ({"stage": "down"}, "stage: expected one of"),
    ({"outputs": ()}, "outputs: expected some of"),
    ({"outputs": ("gate", "h")}, "outputs: expected some of"),
    ({"entry_outputs": ("h", "up")}, "entry_outputs: expected"),
    ({"abi": "cute3d"}, "abi: expected one of"),
    ({"abi": "frost", "stage": "input_gradient", "outputs": ("x",)}, "FROST has no input_gradient"),
    ({"weight_layout": "OO"}, "weight_layout: expected"),
    ({"name": "gate-up"}, "name: expected a C identifier"),
])  # fmt: skip
def test_a_variant_that_is_none_is_refused(changes: dict[str, Any], said: str) -> None:
    right: dict[str, Any] = {
        "name": "gate_up", "stage": "gate_up", "arch": "sm_90a", "outputs": ("h", "gate"),
        "weight_layout": "OI", "dtype": "bfloat16", "tile": (128, 256, 64),
    }  # fmt: skip
    assert KernelVariant(**right)
    with pytest.raises(ValueError, match=said):
        KernelVariant(**right | changes)


def test_another_manifest_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert _manifest.read(path).kernels == ()
    path.write_text(json.dumps({"format": 0, "versions": {}, "kernels": []}))
    with pytest.raises(ValueError, match="expected format 1, got 0"):
        _manifest.read(path)


def test_a_manifest_survives_writing_and_reading(tmp_path: Path) -> None:
    manifest = _manifest.installed()
    copy = _manifest.Manifest(tmp_path, manifest.kernels, manifest.versions)
    _manifest.write(copy)
    assert _manifest.read(tmp_path / "kernels.json") == copy

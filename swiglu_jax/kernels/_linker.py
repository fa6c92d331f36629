"""Objects of one architecture into one shared library that shows nothing but its entries."""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant, outputs_mask

HERE = Path(__file__).parent
VERSION_SCRIPT = "{ global: __tvm_ffi_*; local: *; };\n"


def _tool(variable: str, *names: str) -> str:
    chosen = os.environ.get(variable)
    for name in [chosen] if chosen else names:
        found = shutil.which(name)
        if found:
            return found
    raise FileNotFoundError(f"none of {', '.join(names)} is on PATH; set {variable}")


def tvm_ffi_include() -> Path:
    """The folder of the tvm-ffi and DLPack headers, in the apache-tvm-ffi package."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("linking kernels needs the PyPI package apache-tvm-ffi")
    return Path(spec.submodule_search_locations[0]) / "include"


def defined_symbols(path: Path, dynamic: bool = False) -> list[str]:
    """The global symbols that an object, or the dynamic symbols that a library, defines."""
    command = [_tool("NM", "nm"), "--defined-only", "--extern-only", "--format=posix", str(path)]
    if dynamic:
        command.insert(1, "--dynamic")
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def check_object(path: Path, name: str) -> None:
    """Refuse an object that shows anything but its entry: it could collide with another's.

    Raises:
        ValueError: listing what it shows.
    """
    found = defined_symbols(path)
    if found != [f"__tvm_ffi_{name}"]:
        raise ValueError(f"{path.name}: expected the one symbol __tvm_ffi_{name}, found {found}")


def _table(variants: Sequence[KernelVariant]) -> str:
    """C source of the library's description of itself."""
    lines = ['#include "kernel_library.h"']
    for v in variants:
        lines.append(
            f"extern int __tvm_ffi_{v.name}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);"
        )
    lines.append("static const SwigluJaxKernel kernels[] = {")
    for v in variants:
        canonical = STAGE_OUTPUTS[v.stage]
        order = [canonical.index(o) for o in v.entry_outputs or v.outputs]
        order += [-1] * (3 - len(order))
        fields = {
            "name": f'"{v.name}"',
            "entry": f"__tvm_ffi_{v.name}",
            "architecture": v.arch.removeprefix("sm_").rstrip("a"),
            "stage": {
                "gate_up": "kSwigluJaxGateUp",
                "down_dswiglu": "kSwigluJaxDownDswiglu",
                "input_gradient": "kSwigluJaxInputGradient",
                "weight_gradients": "kSwigluJaxWeightGradients",
            }[v.stage],
            "abi": {
                "cute2d": "kSwigluJaxCute2d",
                "frost": "kSwigluJaxFrost",
                "frost_stg": "kSwigluJaxFrostStg",
            }[v.abi],
            "outputs": outputs_mask(v.stage, v.outputs),
            "entry_outputs": "{" + ", ".join(map(str, order)) + "}",
            "layout_oi": int(v.weight_layout == "OI"),
            "dlpack_code": {"bfloat16": "kDLBfloat", "float16": "kDLFloat"}[v.dtype],
            "m_multiple": v.m_multiple,
            "h_multiple": v.h_multiple,
            "i_multiple": v.i_multiple,
            "alignment": v.alignment,
            "residual_alignment": v.residual_alignment,
            "fixed_i": v.fixed_i or 0,
        }
        lines.append("  {" + ", ".join(f".{k} = {x}" for k, x in fields.items()) + "},")
    lines += [
        "};",
        "const SwigluJaxKernelLibrary swiglu_jax_kernel_library = {",
        "  SWIGLU_JAX_KERNEL_LIBRARY_VERSION, sizeof(kernels) / sizeof(kernels[0]), kernels};",
    ]
    return "\n".join(lines) + "\n"


def link(objects: Sequence[tuple[KernelVariant, Path]], library: Path) -> None:
    """Link kernels of one architecture into ``library``.

    Args:
        objects: each variant and its object file.
        library: where to put the library; replaced in one step.

    Raises:
        ValueError: where an object or the library shows more than entries.
        subprocess.CalledProcessError: where the linker fails, for example since an object calls
            something that kernel_library.c does not offer; its output says what.
    """
    for variant, path in objects:
        check_object(path, variant.name)
    with tempfile.TemporaryDirectory(prefix="swiglu_jax_link_") as folder:
        work = Path(folder)
        (work / "exports.map").write_text(VERSION_SCRIPT)
        (work / "table.c").write_text(_table([variant for variant, _ in objects]))
        (work / "objects").write_text("".join(f'"{path}"\n' for _, path in objects))
        made = work / library.name
        command = [
            _tool("CC", "cc", "gcc", "clang"),
            "-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
            f"-I{HERE}", f"-isystem{tvm_ffi_include()}",
            str(HERE / "kernel_library.c"), str(work / "table.c"),
            f"@{work / 'objects'}",
            f"-Wl,--version-script={work / 'exports.map'}", "-Wl,--no-undefined", "-Wl,-s",
            "-o", str(made),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        shown = defined_symbols(made, dynamic=True)
        if extra := [s for s in shown if not s.startswith("__tvm_ffi_")]:
            raise ValueError(f"{library.name} shows {extra}")
        library.parent.mkdir(parents=True, exist_ok=True)
        staged = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(made, staged)
        staged.replace(library)

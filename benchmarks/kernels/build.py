"""Compile SM90 kernels to one shared library each, loadable by tvm_ffi without this package."""

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from pathlib import Path

from swiglu_jax.kernels.sm90 import compile_and_export, variants

RUNTIME = "libsm90_runtime.so"
STUBS = """
#include <stdio.h>
void CuteDSLRT_TVMFFISetRaisedCudaError(int e) { fprintf(stderr, "CUDA error %d\\n", e); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(int e) { fprintf(stderr, "launch error %d\\n", e); }
"""
"""Two functions that the DSL's static runtime calls and does not have (cutlass issue 3635)."""


def link_runtime(folder: Path) -> None:
    """The DSL's runtime and a static cudart in one library that every kernel shares."""
    import nvidia  # noqa: PLC0415 - wheels of the build
    import nvidia_cutlass_dsl  # noqa: PLC0415

    dsl = Path(nvidia_cutlass_dsl.__path__[0]) / "cu13/lib/libcuda_dialect_runtime_static.a"
    cudart = Path(nvidia.__path__[0]) / "cu13/lib/libcudart_static.a"
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "stubs.c"
        source.write_text(STUBS)
        command = ["cc", "-shared", "-fPIC", "-o", folder / RUNTIME, source]
        command += ["-Wl,--whole-archive", dsl, "-Wl,--no-whole-archive", cudart]
        subprocess.run([*command, "-lpthread", "-ldl", "-lrt", "-Wl,-Bsymbolic"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pattern", nargs="?", default="", help="of the kernels' names")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    link_runtime(folder)
    chosen = [v for v in variants() if re.search(arguments.pattern, v.name)]
    for variant in chosen:
        with tempfile.TemporaryDirectory() as work:
            compiled = Path(work) / "kernel.o"
            compile_and_export(variant, compiled)
            command = ["cc", "-shared", "-o", folder / f"{variant.name}.so", compiled]
            command += [f"-L{folder}", f"-l:{RUNTIME}", "-Wl,-rpath,$ORIGIN"]
            subprocess.run(command, check=True)
        print(variant.name, flush=True)
    listing = [dataclasses.asdict(variant) for variant in chosen]
    (folder / "kernels.json").write_text(json.dumps(listing, indent=1))


if __name__ == "__main__":
    main()

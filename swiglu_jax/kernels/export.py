"""The exporter, a build step: every kernel to an object, the objects to libraries and a manifest.

Run it as a file, ``python swiglu_jax/kernels/export.py``: it imports the kernels and their
compilers, but neither JAX nor the rest of the package.
"""

import argparse
import concurrent.futures
import dataclasses
import fcntl
import hashlib
import importlib
import importlib.metadata
import json
import multiprocessing
import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path

KERNELS = Path(__file__).resolve().parent

if __name__ in ("__main__", "__mp_main__"):  # the second is this file in a worker process
    # A package without its __init__: the build environment has no JAX.
    _package = types.ModuleType("swiglu_jax")
    _package.__path__ = [str(KERNELS.parent)]
    sys.modules.setdefault("swiglu_jax", _package)

from swiglu_jax.kernels import _linker, _manifest  # noqa: E402
from swiglu_jax.kernels._variant import KernelVariant  # noqa: E402

MODULES = ("sm90", "sm100", "sm120")
BUILT_ON = {"sm120": ("sm100",)}
"""Modules whose sources a module's kernels depend on besides its own."""
PACKAGES = (
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "apache-tvm-ffi",
)
"""Whose versions decide what a kernel compiles to."""
SHARED_SOURCES = ("_host_code.py",)
LISTING = "_variants.py"
"""A module's list of variants, if it has it in a file of its own: no kernel depends on it."""


def versions() -> dict[str, str]:
    """Versions of the packages that compile kernels; empty text for one that is missing."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def digest(variant: KernelVariant, module: str) -> str:
    """Names everything that a variant's object depends on: 16 hexadecimal digits."""
    summary = hashlib.sha256(json.dumps(dataclasses.asdict(variant), sort_keys=True).encode())
    summary.update(json.dumps(versions(), sort_keys=True).encode())
    modules = (module, *BUILT_ON.get(module, ()))
    sources = [s for m in modules for s in sorted((KERNELS / m).glob("*.py")) if s.name != LISTING]
    for source in [*sources, *(KERNELS / s for s in SHARED_SOURCES)]:
        summary.update(source.name.encode() + b"\0" + source.read_bytes())
    return summary.hexdigest()[:16]


def compile_one(module: str, variant: KernelVariant, path: Path) -> float:
    """In a worker process: export ``variant`` to ``path``. Returns the seconds it took."""
    start = time.monotonic()
    staged = path.with_suffix(".part.o")
    importlib.import_module(f"swiglu_jax.kernels.{module}").compile_and_export(variant, staged)
    _linker.check_object(staged, variant.name)
    staged.replace(path)
    return time.monotonic() - start


def export_missing(
    wanted: Iterable[tuple[str, KernelVariant, Path]], processes: int, log: bool = True
) -> None:
    """Export what has no object yet, in worker processes: one architecture after another.

    A compiler decides at import what it compiles for, so no worker sees two architectures.
    """
    groups: dict[tuple[str, str], list[tuple[str, KernelVariant, Path]]] = {}
    for module, variant, path in wanted:
        if not path.exists():
            groups.setdefault((module, variant.arch), []).append((module, variant, path))
    context = multiprocessing.get_context("spawn")
    for group in groups.values():
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
            running = {pool.submit(compile_one, *one): one[1] for one in group}
            try:
                for number, done in enumerate(concurrent.futures.as_completed(running), 1):
                    seconds = done.result()
                    if log:
                        name = running[done].name
                        print(f"[{number}/{len(group)}] {name} {seconds:.1f} s", flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def build(objects: Path, library_folder: Path, archs: tuple[str, ...], processes: int) -> None:
    """Export, link and describe the kernels of ``archs`` (empty: all).

    Args:
        objects: folder that keeps the objects between builds.
        library_folder: where the libraries and kernels.json go; what is there for other
            architectures stays.
        archs: architectures such as "sm_100a".
        processes: compilers to run at once.
    """
    every = [
        (module, variant)
        for module in MODULES
        if (KERNELS / module / "__init__.py").exists()
        for variant in importlib.import_module(f"swiglu_jax.kernels.{module}").variants()
    ]
    wanted = [
        (module, variant, objects / variant.arch / f"{variant.name}.{digest(variant, module)}.o")
        for module, variant in every
        if not archs or variant.arch in archs
    ]
    names = [variant.name for _, variant, _ in wanted]
    if len(set(names)) != len(names):
        raise ValueError("two variants have one name")
    for arch in {variant.arch for _, variant, _ in wanted}:
        (objects / arch).mkdir(parents=True, exist_ok=True)
    with (objects / ".lock").open("w") as lock:
        # One build at a time: each removes what the sources that it sees no longer need.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _export_and_link(every, wanted, objects, library_folder, archs, processes)


def _export_and_link(
    every: list[tuple[str, KernelVariant]],
    wanted: list[tuple[str, KernelVariant, Path]],
    objects: Path,
    library_folder: Path,
    archs: tuple[str, ...],
    processes: int,
) -> None:
    export_missing(wanted, processes)

    old = _manifest.read(library_folder / _manifest.MANIFEST.name)
    new: list[_manifest.Kernel] = []
    for arch in dict.fromkeys(variant.arch for _, variant, _ in wanted):
        mine = [(variant, path) for _, variant, path in wanted if variant.arch == arch]
        linked = [_manifest.Kernel(variant, path.suffixes[-2][1:]) for variant, path in mine]
        library = library_folder / _manifest.library_name(arch)
        current = [kernel for kernel in old.kernels if kernel.variant.arch == arch]
        newest_glue = max((KERNELS / f).stat().st_mtime for f in
                          ("kernel_library.c", "kernel_library.h", "_linker.py"))  # fmt: skip
        if current != linked or not library.exists() or library.stat().st_mtime < newest_glue:
            _linker.link(mine, library)
            print(f"{library} ({library.stat().st_size / 1e6:.1f} MB, {len(mine)} kernels)")
        _remove_stale(objects / arch, {path for _, path in mine})
        new += linked
    made = {kernel.variant.arch for kernel in new}
    kept = [
        kernel
        for kernel in old.kernels
        if archs
        and kernel.variant.arch not in made
        and kernel.variant.arch in {variant.arch for _, variant in every}
        and (library_folder / _manifest.library_name(kernel.variant.arch)).exists()
    ]
    # One order, whatever was built last.
    order = list(dict.fromkeys(variant.arch for _, variant in every))
    kernels = sorted((*kept, *new), key=lambda kernel: order.index(kernel.variant.arch))
    manifest = _manifest.Manifest(library_folder, tuple(kernels), versions())
    if manifest != old:
        _manifest.write(manifest)


def _remove_stale(folder: Path, current: set[Path]) -> None:
    for path in folder.glob("*.o"):
        if path not in current:
            path.unlink()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=Path, default=Path("build/kernels"))
    parser.add_argument("--lib", type=Path, default=KERNELS.parent / "lib")
    parser.add_argument("--arch", action="append", default=[], help="such as sm_100a; default: all")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    build(options.objects.resolve(), options.lib.resolve(), tuple(options.arch), options.processes)


if __name__ == "__main__":
    main()

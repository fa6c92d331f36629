"""Compile tiles to try into a library of their own; try_tiles.py measures them.

    python -m benchmarks.kernels.trials FOLDER STAGE:FIELD=VALUE,... ...     # needs the DSL, no GPU
    python -m benchmarks.kernels.trials /tmp/trials \\
        gate_up:n=256,stages=4,raster=4 down_dswiglu:n=128,stages=5,cluster=2x1

The fields are those of ``swiglu_jax/kernels/sm90/_tile.py``. Each tile is compiled for bfloat16,
layout "OI" and all outputs. What wins moves to ``_tiles.py`` beside it, what loses to the table in
docs/hopper.md.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiglu_jax.kernels import _linker, _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant
from swiglu_jax.kernels.sm90 import compile_and_export
from swiglu_jax.kernels.sm90._tile import Tile

ARCHITECTURE = "sm_90a"


@dataclass(frozen=True)
class Trial:
    """A tile to try on one stage."""

    stage: str
    label: str
    """Of its fields."""
    tile: Tile

    @property
    def variant(self) -> KernelVariant:
        """The kernel's description; its name is none of the shipped ones."""
        tile = self.tile
        return KernelVariant(
            name=f"trial_{self.stage}_{self.label}",
            stage=self.stage,
            arch=ARCHITECTURE,
            outputs=STAGE_OUTPUTS[self.stage],
            weight_layout="OI",
            dtype="bfloat16",
            tile=(tile.m, tile.n // (2 if self.stage == "gate_up" else 1), tile.k),
            cluster=tile.cluster,
        )


def parse(text: str) -> Trial:
    """``STAGE:FIELD=VALUE,...`` as a trial.

    Raises:
        ValueError: naming the stage or the field that is none, or the value.
    """
    stage, _, items = text.partition(":")
    if stage not in STAGE_OUTPUTS:
        raise ValueError(f"stage: expected one of {', '.join(STAGE_OUTPUTS)}, got {stage!r}")
    known = [field.name for field in dataclasses.fields(Tile)]
    given: dict[str, Any] = {}
    for item in filter(None, items.split(",")):
        name, _, value = item.partition("=")
        if name not in known:
            raise ValueError(f"field: expected one of {', '.join(known)}, got {name!r}")
        if value in ("True", "False"):
            given[name] = value == "True"
        elif re.fullmatch(r"\d+x\d+", value):
            given[name] = tuple(map(int, value.split("x")))
        elif value.isdecimal():
            given[name] = int(value)
        else:
            raise ValueError(f"{name}: expected a number, MxN, True or False, got {value!r}")
    return Trial(stage, re.sub(r"\W+", "_", items), Tile(**given))


def _export(trial: Trial, path: Path) -> None:
    compile_and_export(trial.variant, path, trial.tile)


def build(folder: Path, trials: list[Trial], processes: int) -> None:
    """Compile and link ``trials`` into ``folder``; library and manifest are named as shipped."""
    with tempfile.TemporaryDirectory() as work:
        objects = [(t.variant, Path(work) / f"{t.variant.name}.o") for t in trials]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
            paths = [path for _, path in objects]
            for trial, _ in zip(trials, pool.map(_export, trials, paths), strict=True):
                print(trial.variant.name, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _linker.link(objects, folder / _manifest.library_name(ARCHITECTURE))
    kernels = tuple(_manifest.Kernel(trial.variant, digest="") for trial in trials)
    _manifest.write(_manifest.Manifest(folder, kernels, versions={}))


def listed(folder: Path) -> list[KernelVariant]:
    """The kernels of the library that ``build`` left in ``folder``.

    Raises:
        FileNotFoundError: there are none.
    """
    path = folder / _manifest.MANIFEST.name
    kernels = _manifest.read(path).kernels
    if not kernels:
        raise FileNotFoundError(f"{path}: no kernels; python -m benchmarks.kernels.trials first")
    return [kernel.variant for kernel in kernels]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("trials", nargs="+", type=parse, metavar="STAGE:FIELD=VALUE,...")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    build(given.folder, given.trials, given.processes)


if __name__ == "__main__":
    main()

"""Tiles that were not measured yet, and how to compile them into a library of their own.

    python -m benchmarks.kernels.trials FOLDER [PATTERN]    # anywhere; needs the DSL, no GPU

Each is compiled for bfloat16, layout "OI" and all outputs. try_tiles.py measures them; what wins
moves to swiglu_jax/kernels/sm90/_tiles.py, what loses to the table in docs/hopper.md.
"""

import argparse
import concurrent.futures
import multiprocessing
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from swiglu_jax.kernels import _linker, _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant
from swiglu_jax.kernels.sm90 import compile_and_export
from swiglu_jax.kernels.sm90._tile import Tile

ARCHITECTURE = "sm_90a"
ANY = (1, 1 << 20)
LONG = (1536, 1 << 20)
"""H of main loops long enough to spread an epilogue over."""
SHORT = (1, 2048)


@dataclass(frozen=True)
class Trial:
    """A tile to try on one stage."""

    stage: str
    label: str
    tile: Tile
    h: tuple[int, int] = ANY
    """The least and the largest H to try it at."""

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


def _down(label: str, tile: Tile, h: tuple[int, int] = ANY) -> Trial:
    return Trial("down_dswiglu", label, tile, h)


def _ring(n: int, stages: int, inputs: int, cluster: tuple[int, int] = (2, 1), **options) -> Tile:
    return Tile(n, stages, cluster=cluster, in_place=True, inputs=inputs, **options)


def _grids(label: str, tile: Tile, h: tuple[int, int] = ANY) -> list[Trial]:
    """A tile of clusters of four, with the grids that 132 multiprocessors may hold."""
    return [_down(f"{label}_{n}", replace(tile, clusters=n), h) for n in (32, 30)]


def _fours(stage: str, n: int, stages: int, label: str = "large", **options) -> list[Trial]:
    """Clusters of four; try_tiles.py takes those of the largest grid that the GPU holds at once.

    A group of the raster is 2048 rows in either form.
    """
    forms = (((2, 2), 8, 32), ((4, 1), 4, 32), ((2, 2), 8, 30))
    return [
        Trial(
            stage,
            f"{label}_{cluster[0]}x{cluster[1]}_{clusters}",
            Tile(n, stages, cluster=cluster, raster=raster, clusters=clusters, **options),
            LONG if stage == "down_dswiglu" else ANY,
        )
        for cluster, raster, clusters in forms
    ]


TRIALS = [
    # Fewer operand bytes from L2 for a block's stage: 32 KiB of (2, 1), 24 of (2, 2), (4, 1).
    *_fours("gate_up", 256, 4),
    *_fours("input_gradient", 256, 4),
    *_fours("weight_gradients", 256, 4)[:2],
    *_fours("weight_gradients", 128, 6, "medium")[:1],
    # Stores of 128-byte rows where one output leaves room for them.
    Trial("input_gradient", "large_wide", Tile(256, 4, group=64)),
    Trial("weight_gradients", "medium_wide", Tile(128, 6, group=64)),
    *_fours("down_dswiglu", 192, 5, in_place=True),
    _down("large_prefetch", Tile(192, 5, in_place=True, prefetch=True), LONG),
    *_grids("medium_2x2", Tile(128, 6, cluster=(2, 2), in_place=True), LONG),
    _down("medium_prefetch", Tile(128, 6, in_place=True, prefetch=True), LONG),
    _down("wide_192", Tile(192, 4, in_place=True, group=64, prefetch=True), LONG),
    # Short contractions: inputs that wait for no store, stores that wait for no load.
    _down("short_prefetch", Tile(192, 4, prefetch=True), SHORT),
    _down("narrow_prefetch", Tile(128, 5, cluster=(1, 1), prefetch=True), SHORT),
    _down("narrow_four_inputs", Tile(128, 4, cluster=(1, 1), inputs=4), SHORT),
    _down("ring_128_1x1", _ring(128, 4, 4, (1, 1))),
    _down("ring_128_2x1", _ring(128, 4, 4)),
    *_grids("ring_128_2x2", _ring(128, 4, 4, (2, 2))),
    _down("ring_128_5_stages", _ring(128, 5, 2, prefetch=True), SHORT),
    _down("ring_192_1x1", _ring(192, 4, 2, (1, 1), prefetch=True), SHORT),
    _down("ring_192_2x1", _ring(192, 4, 2), SHORT),
    _down("ring_192_prefetch", _ring(192, 4, 2, prefetch=True)),
    *_grids("ring_192_2x2", _ring(192, 4, 2, (2, 2), prefetch=True)),
    # The same with rows of 128 bytes: half as many for the copy engine, whole lines for L2.
    _down("ring_128_wide_1x1", _ring(128, 4, 2, (1, 1), group=64), SHORT),
    _down("ring_128_wide_2x1", _ring(128, 4, 2, group=64)),
    *_grids("ring_128_wide_2x2", _ring(128, 4, 2, (2, 2), group=64)),
    _down("ring_192_wide", _ring(192, 3, 2, group=64, prefetch=True), SHORT),
]


def _export(trial: Trial, path: Path) -> None:
    compile_and_export(trial.variant, path, trial.tile)


def build(folder: Path, trials: list[Trial], processes: int) -> None:
    """Compile and link ``trials`` into ``folder``; the library's name is the package's own."""
    with tempfile.TemporaryDirectory() as work:
        objects = [(t.variant, Path(work) / f"{t.variant.name}.o") for t in trials]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
            paths = [path for _, path in objects]
            for trial, _ in zip(trials, pool.map(_export, trials, paths), strict=True):
                print(trial.variant.name, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _linker.link(objects, folder / _manifest.library_name(ARCHITECTURE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pattern", nargs="?", default="", help="of the trials' names")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    chosen = [trial for trial in TRIALS if re.search(given.pattern, trial.variant.name)]
    build(given.folder, chosen, given.processes)


if __name__ == "__main__":
    main()

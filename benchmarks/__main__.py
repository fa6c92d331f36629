"""The benchmark's command line.

    python -m benchmarks                                  # the claims' shapes, a minute and a half
    python -m benchmarks --preset peers                   # every peer that is installed
    python -m benchmarks --preset full                    # all measures, within eight minutes
    python -m benchmarks --preset sweep --models Qwen3-8B --rows 1 128
    python -m benchmarks --shapes 8192,5120,17408 --methods 'plain/*' 'swiglu_jax/*'

Writes <date>-<device>-<what>.json; ``python -m benchmarks.bounds`` and ``python -m
benchmarks.report`` read such files.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

# JAX and PyTorch share the GPU: neither may take all of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.presets import MEASURES, PRESETS, narrowed
from benchmarks.results import Results
from benchmarks.runner import Run
from benchmarks.shapes import MODELS, parse_shape, sweep_shapes

RESULTS = Path(__file__).parent / "results"


def parser() -> argparse.ArgumentParser:
    """The options."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--preset", choices=list(PRESETS), default="quick")
    for name in ("quick", "full"):
        command.add_argument(f"--{name}", dest="preset", action="store_const", const=name,
                             help=f"the same as --preset {name}")  # fmt: skip
    command.add_argument("--shapes", nargs="+", type=parse_shape, metavar="M,H,I",
                         help="instead of the preset's shapes")  # fmt: skip
    command.add_argument("--models", nargs="+", choices=list(MODELS),
                         help="sweep these models, instead of the preset's shapes")  # fmt: skip
    command.add_argument("--rows", nargs="+", type=int, metavar="M",
                         help="sweep these numbers of tokens")  # fmt: skip
    command.add_argument("--methods", nargs="+", metavar="PATTERN",
                         help="contenders: plain/OI, swiglu_jax*, tokamax-*, quack*")  # fmt: skip
    command.add_argument("--only", nargs="+", choices=MEASURES, help="measures to take")
    command.add_argument("--rounds", type=int, help="interleaved samples that count, at least 5")
    command.add_argument("--sample-ms", type=float, help="least length of a sample")
    command.add_argument("--seconds", type=float, help="start nothing new after this long")
    command.add_argument("--mode", choices=["direct", "loop"],
                         help="how JAX repeats a call; default: by predicted time")  # fmt: skip
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--what", help="name of the result file's last part; default: the preset")
    command.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return command


def main(arguments: list[str] | None = None) -> Path:
    """Run what the command line asks for; returns the result file."""
    options = parser().parse_args(arguments)
    shapes = options.shapes
    if options.models or options.rows:
        shapes = (shapes or []) + sweep_shapes(options.models, options.rows)
    preset = narrowed(PRESETS[options.preset], shapes, options.methods, options.only)
    changes = {}
    if options.rounds is not None:
        changes["rounds"] = options.rounds
    if options.sample_ms is not None:
        changes["sample_seconds"] = options.sample_ms / 1e3
    preset = replace(
        preset,
        blocks=tuple(replace(b, **changes) for b in preset.blocks),
        seconds=preset.seconds if options.seconds is None else options.seconds,
    )

    told = {"argv": arguments if arguments is not None else sys.argv[1:], "seed": options.seed}
    results = Results(options.what or options.preset, options.out, told)
    machine = results.data["machine"]
    print(f"{machine['device']}, jax {machine['packages']['jax']}, commit "
          f"{results.data['commit']}, preset {options.preset}", flush=True)  # fmt: skip
    Run(results, options.seed, options.mode).run(preset)
    print(f"{results.data['seconds']:.0f} s; wrote {results.path}")
    return results.path


if __name__ == "__main__":
    main()

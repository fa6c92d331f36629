"""Measure the tiles that trials.py compiled against XLA's GEMMs, beside the shipped, on a GPU.

    python -m benchmarks.kernels.try_tiles FOLDER [M,H,I ...] [--pattern P] [--seconds S]

FOLDER is what trials.py built; the package must be built too. XLA's side is what JAX users have:
autotuned GEMMs, two for gate_up, one for down_dswiglu, dx's two and a sum, three for the weights.
XLA and all kernels of a stage take turns, and each turn is compared with XLA's of its round. A line
for each kernel: milliseconds, the median ratio to XLA, the spread without the extremes, and how far
its results are from those of the first shipped tile ("same bits" is what to expect: the order of
the sums is one for all tiles). The shipped tiles come first. A kernel that does not return is given
up after HANG seconds: the worker process is killed and another goes on after that kernel.
"""

import argparse
import json
import math
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.trials import ARCHITECTURE, listed
from swiglu_jax.kernels import _manifest
from swiglu_jax.kernels._variant import STAGE_OUTPUTS, KernelVariant, outputs_mask

SHAPES = ("32768,1024,3072", "8192,5120,17408", "8192,2048,8192", "2048,5120,17408")
HANG = 40.0
"""Seconds without a line: several times what autotuning a shape's GEMMs takes."""
FEWEST_TURNS = 2
"""What a spread needs, also where time is over."""
FAR = 2e-2
"""Of the largest element: beyond what another order of sums does to a bfloat16."""


def candidates(stage: str, pattern: str, trials: list[KernelVariant]) -> list[KernelVariant]:
    """Shipped kernels of a stage, then those of ``trials`` whose names have ``pattern``."""
    shipped = [kernel.variant for kernel in _manifest.installed().kernels]
    found = [
        v for v in shipped
        if (v.stage, v.arch, v.outputs, v.weight_layout, v.dtype)
        == (stage, ARCHITECTURE, STAGE_OUTPUTS[stage], "OI", "bfloat16") and v.tile[0] == 128
    ]  # fmt: skip
    return found + [v for v in trials if v.stage == stage and re.search(pattern, v.name)]


def work(
    folder: Path, shapes: list[str], pattern: str, turns: int, deadline: float, skip: set[str]
) -> None:
    """In the worker: a JSON line before each kernel, and one with what it measured."""
    import jax  # noqa: PLC0415 - the parent must not hold the GPU

    from benchmarks.kernels.gradients import TURN, bound, turn  # noqa: PLC0415
    from swiglu_jax import _native  # noqa: PLC0415

    _native.register()
    library = folder.resolve() / _manifest.library_name(ARCHITECTURE)
    _native.load().swiglu_jax_exported_add_library(str(library).encode())
    jax.block_until_ready(jax.numpy.zeros(8))
    trials = listed(folder)
    for shape in shapes:
        m, h, i = map(int, shape.split(","))
        data = _problem(m, h, i)
        for stage in STAGE_OUTPUTS:
            kernels = candidates(stage, pattern, trials)
            left = [v for v in kernels if f"{shape}/{v.name}" not in skip]
            if all(v.name.startswith("sm90_") for v in left) or time.time() > deadline:
                continue
            given = _operands(kernels[0], data)
            theirs = bound(_plain(kernels[0]), given)
            repeats = min(200, max(4, int(TURN / (turn(theirs, 4) * 1e-3))))
            for _ in range(5):  # until the clock has settled
                turn(theirs, repeats)
            expected = bound(_kernel(kernels[0]), given)()
            calls = {}
            for variant in left:
                if time.time() > deadline:
                    _say(note=f"{shape} {stage}: out of time before {variant.name}")
                    break
                _say(starts=f"{shape}/{variant.name}")
                ours = bound(_kernel(variant), given)
                apart = 0.0
                for _ in range(2):
                    _poison(expected)
                    apart = max(apart, _apart(ours(), expected))
                calls[variant.name] = (ours, apart)
            _say(starts=f"{shape}/{stage}: turns")
            # Each turn is compared with the others of its round: clock and temperature drift by
            # more than tiles differ.
            rounds = []
            for _ in range(turns):
                if time.time() > deadline and len(rounds) >= FEWEST_TURNS:
                    break
                xla = turn(theirs, repeats)
                rounds.append(
                    (xla, {name: turn(ours, repeats) for name, (ours, _) in calls.items()})
                )
            for name, (_, apart) in calls.items():
                ratios = sorted(times[name] / xla for xla, times in rounds)
                _say(done=f"{shape}/{name}", shape=shape, kernel=name,
                     ms=statistics.median(times[name] for _, times in rounds),
                     xla_ms=statistics.median(xla for xla, _ in rounds),
                     ratio=statistics.median(ratios), spread=[ratios[1], ratios[-2]],
                     apart=apart)  # fmt: skip
            del expected


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _poison(like: list[Any]) -> None:
    """Leave NaN in memory about to be handed out: what a kernel does not write must be seen."""
    import jax.numpy as jnp  # noqa: PLC0415

    for made in [jnp.full_like(array, jnp.nan) for array in like]:
        made.block_until_ready()


def _apart(got: list[Any], want: list[Any]) -> float:
    """Largest difference, relative to the largest element; 0 for the same bits, else not 0."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    @jax.jit
    def compare(got: Any, want: Any) -> Any:
        words = [jax.lax.bitcast_convert_type(v, jnp.uint16) for v in (got, want)]
        differs = (words[0] != words[1]).any()
        wide, reference = got.astype(jnp.float32), want.astype(jnp.float32)
        largest = jnp.abs(wide - reference).max() / jnp.abs(reference).max()
        return jnp.where(differs, jnp.maximum(largest, 1e-9), 0.0)

    found = [float(compare(a, b)) for a, b in zip(got, want, strict=True)]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def _problem(m: int, h: int, i: int) -> dict[str, Any]:
    """Every stage's operands, fresh; weights in layout "OI" and of a sum's scale."""
    import jax  # noqa: PLC0415

    shapes = {"x": (m, h), "dy": (m, h), "gate": (m, i), "up": (m, i), "h": (m, i)}
    shapes |= {"w_gate": (i, h), "w_up": (i, h), "w_down": (h, i)}

    @jax.jit
    def make(key: Any) -> dict[str, Any]:
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(key, shape, jax.numpy.bfloat16)
            * (h**-0.5 if name.startswith("w_") else 1)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    return make(jax.random.key(time.time_ns()))


def _operands(variant: KernelVariant, data: dict[str, Any]) -> dict[str, Any]:
    """What the variant's entry takes, in its order."""
    names = {
        "gate_up": ("x", "w_gate", "w_up"),
        "down_dswiglu": ("dy", "w_down", "gate", "up"),
        "input_gradient": ("dgate", "dup", "w_gate", "w_up"),
        "weight_gradients": ("x", "dgate", "dup", "h", "dy"),
    }[variant.stage]
    # Any numbers serve as cotangents.
    data = {**data, "dgate": data["gate"], "dup": data["up"]}
    return {name: data[name] for name in names}


def _plain(variant: KernelVariant) -> Callable[..., Any]:
    """The stage's GEMMs alone."""
    from benchmarks.kernels import gradients  # noqa: PLC0415 - it imports JAX

    if variant.stage == "gate_up":
        return lambda x, w_gate, w_up: [x @ w_gate.T, x @ w_up.T]
    if variant.stage == "down_dswiglu":
        return lambda dy, w_down, gate, up: [dy @ w_down]
    return gradients.plain(variant)


def _kernel(variant: KernelVariant) -> Callable[..., Any]:
    """The kernel, called as the lowering of its stage calls it."""
    import jax  # noqa: PLC0415

    from benchmarks.kernels import gradients  # noqa: PLC0415

    if variant.stage in ("input_gradient", "weight_gradients"):
        return gradients.exported(variant)

    def call(**given: Any) -> Any:
        token, weight = list(given.values())[:2]
        hidden = weight.shape[0 if variant.stage == "gate_up" else 1]
        result = jax.ShapeDtypeStruct((token.shape[0], hidden), token.dtype)
        return jax.ffi.ffi_call(
            f"swiglu_jax_exported_{variant.stage}", [result] * len(variant.outputs)
        )(
            *given.values(),
            outputs=np.int64(outputs_mask(variant.stage, variant.outputs)),
            weight_layout=variant.weight_layout,
            kernel=variant.name,
        )

    return call


def watch(command: list[str], deadline: float, hang: float = HANG) -> list[dict[str, Any]]:
    """Run workers until one ends by itself; a kernel that hangs or fails is left out of the next.

    Args:
        command: a worker's, which takes ``--skip`` with the names of what needs no turn any more.
        deadline: starts no worker after it, by ``time.time()``.
        hang: seconds without a line after which a worker is killed.

    Returns:
        What was measured.
    """
    found: list[dict[str, Any]] = []
    skip: list[str] = []
    while time.time() < deadline:
        given = [*command, "--skip", *skip]
        worker = subprocess.Popen(given, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True).start()
        current = None
        try:
            while (line := lines.get(timeout=hang)) is not None:
                fields = json.loads(line) if line.startswith("{") else {"note": line.rstrip()}
                current = fields.get("starts", current)
                if "note" in fields:
                    print(fields["note"], flush=True)
                if "done" in fields:
                    found.append(fields)
                    skip.append(fields["done"])
                    current = None
                    _show(fields)
        except queue.Empty:
            worker.kill()
        code = worker.wait()
        if code == 0:
            break
        print(f"GIVEN UP (exit {code}): {current}", flush=True)
        if current is None:
            break
        skip.append(current)
    return found


def _read(stream: Any, lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _show(fields: dict[str, Any]) -> None:
    apart = fields["apart"]
    values = f"apart {apart:.1e}" if apart else "same bits"
    low, high = fields["spread"]
    print(
        f"{fields['shape']:>16} {fields['kernel']:<52} {fields['ms']:8.4f} ms "
        f"{fields['ratio']:6.3f} of XLA [{low:.3f}, {high:.3f}] {values}"
        f"{' WRONG' if apart > FAR else ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="*", help="M,H,I")
    parser.add_argument("--pattern", default="", help="of the trials' names")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=85, help="start nothing new after")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=(), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turns < FEWEST_TURNS:
        parser.error(f"--turns: expected at least {FEWEST_TURNS}, got {given.turns}")
    shapes: list[str] = given.shapes or list(SHAPES)
    if given.deadline is not None:
        work(given.folder, shapes, given.pattern, given.turns, given.deadline, set(given.skip))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    began = time.time()
    deadline = began + given.seconds
    command = [sys.executable, "-m", "benchmarks.kernels.try_tiles", str(given.folder), *shapes,
               "--pattern", given.pattern, "--turns", str(given.turns),
               "--deadline", str(deadline)]  # fmt: skip
    found = watch(command, deadline)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print(f"{time.time() - began:.0f} s")
    if any(fields["apart"] > FAR for fields in found):
        sys.exit("wrong values, see above")


if __name__ == "__main__":
    main()

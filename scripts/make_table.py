"""Measure stage calls on this machine's GPU and write them as the package's shipped table.

Run on a GPU machine: ``python scripts/make_table.py --out swiglu_jax/tables/sm_90a.json``. Rows
that the file holds already are kept unless their call is measured again, so that a table can be
built up over several short runs.
"""

import argparse
import datetime
import itertools
import json
import time
from dataclasses import asdict
from pathlib import Path

import jax

from swiglu_jax import _routes, _tuning
from swiglu_jax._candidate import StageCall
from swiglu_jax._device import local_gpu_target

WIDTHS = {
    "Qwen3-0.6B": (1024, 3072),
    "Llama-3.2-1B": (2048, 8192),
    "Qwen3-8B": (4096, 12288),
    "Llama-3-8B": (4096, 14336),
    "Qwen-27B": (5120, 17408),
    "Llama-3-70B": (8192, 28672),
}
"""Model to (H, I), of published models."""

ROWS = (16, 128, 512, 2048, 8192, 32768)

STAGES = {
    "gate_up": (("h",), ("h", "gate", "up")),
    "down_dswiglu": (("dup",), ("dgate", "dup"), ("dgate", "dup", "h")),
    "input_gradient": (("x",),),
    "weight_gradients": (("w_down",), ("w_gate", "w_up"), ("w_gate", "w_up", "w_down")),
}


def main() -> None:
    """Measure until the calls or the time run out, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS), metavar="M")
    parser.add_argument("--layouts", nargs="*", default=["OI", "IO"], choices=["OI", "IO"])
    parser.add_argument("--training-only", action="store_true",
                        help="only the output sets of a step with all gradients")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="start no further measurement after this long")  # fmt: skip
    options = parser.parse_args()
    target = local_gpu_target()
    if target is None:
        parser.error("JAX sees no GPU here")

    rows = _existing(options.out)
    start = time.monotonic()
    for call in _calls(options):
        if time.monotonic() - start > options.seconds:
            print(f"stopped after {options.seconds:.0f} s; run again for the rest")
            break
        started = time.monotonic()
        candidates, _ = _routes.candidates(call, target)
        measured = _tuning.measurement(call, candidates, target)
        if measured is None:
            parser.error("tuning is off (SWIGLU_JAX_TUNE=0)")
        row = {
            "call": asdict(call),
            "xla_us": round(measured.xla_us, 2),
            "kernels": {c.kernel: round(us, 2) for c, us in measured.candidates},
        }
        rows[_key(row["call"])] = row
        best = min(row["kernels"].values(), default=float("nan")) / row["xla_us"]
        name = f"{call.stage} {'+'.join(call.outputs)} {call.weight_layout}"
        took = time.monotonic() - started
        print(
            f"{name} M={call.m} H={call.h} I={call.i}: fused / XLA {best:.3f}; "
            f"{took:.1f} s for {len(candidates)} candidates; {measured.failed or 'none failed'}",
            flush=True,
        )
    table = {
        "device": jax.local_devices(backend="cuda")[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "rows": list(rows.values()),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(rows)} rows in {options.out}")


def _calls(options: argparse.Namespace) -> list[StageCall]:
    calls = []
    for m, model, layout in itertools.product(options.rows, options.models, options.layouts):
        h, i = WIDTHS[model]
        for stage, output_sets in STAGES.items():
            for outputs in output_sets[-1:] if options.training_only else output_sets:
                calls.append(StageCall(stage, outputs, layout, "bfloat16", m, h, i))
    return calls


def _existing(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    return {_key(row["call"]): row for row in json.loads(path.read_text())["rows"]}


def _key(call: dict) -> str:
    return json.dumps(call | {"outputs": list(call["outputs"])}, sort_keys=True)


if __name__ == "__main__":
    main()

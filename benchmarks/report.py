"""Markdown table and plots from result files.

    python -m benchmarks.report benchmarks/results/*.json --out benchmarks/results/report

Writes report.md, speedup.png and gemm_share.png into the folder. Needs matplotlib for the plots.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bounds import OURS, PLAIN, Record, Records, check, line, paired_ratios, ratio
from benchmarks.plots import plot_gemm_share, plot_speedup
from benchmarks.results import load
from benchmarks.shapes import MODELS
from benchmarks.timing import quartiles


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def shape_key(record: Record) -> tuple[int, int, int]:
    return record["m"], record["h"], record["i"]


def _name(record: Record) -> str:
    return f"{record['name']} ({record['layout']})" if record.get("layout") else record["name"]


def times_table(records: Records, measure: str) -> str:
    """One row a shape and contender: median, quartiles, and how much longer it takes than ours."""
    rows: list[tuple[Any, ...]] = []
    of = records.of(measure) + (records.of("gemm_sum") if measure == "step" else [])
    for record in sorted(of, key=lambda r: (shape_key(r)[1:], r["m"], r["file"], r["group"])):
        ours = records.beside(record, measure, OURS) or records.beside(
            record, measure, OURS, same_layout=False
        )
        relative = "" if ours is None or ours is record else _ratio_text(record, ours)
        rows.append(
            (
                ", ".join(map(str, shape_key(record))),
                _name(record),
                f"{record['median_ms']:.3f}",
                f"{record['q1_ms']:.3f} to {record['q3_ms']:.3f}",
                relative,
            )
        )
    return table(("M, H, I", "contender", "median, ms", "quartiles, ms", "over ours"), rows)


def _ratio_text(record: Record, ours: Record) -> str:
    q1, _, q3 = quartiles(paired_ratios(record, ours))
    return f"{ratio(record, ours):.3f} ({q1:.3f} to {q3:.3f})"


def stages_table(records: Records) -> str:
    """Each fused stage alone against its plain GEMMs."""
    rows = []
    for stage, measure, plain in (("gate_up", "part", "gate+up"), ("down_dswiglu", "gemm", "dh")):
        for record in records.of("part"):
            if record["name"] != stage:
                continue
            other = records.beside(record, measure, plain)
            if other:
                rows.append((", ".join(map(str, shape_key(record))), record["layout"], stage,
                             f"{record['median_ms']:.3f}", f"{other['median_ms']:.3f}",
                             _ratio_text(record, other)))  # fmt: skip
    head = ("M, H, I", "layout", "stage, three outputs", "ms", "plain GEMMs, ms", "ratio")
    return table(head, rows)


def memory_table(records: Records) -> str:
    """Bytes kept a layer under lax.scan."""
    rows = [
        (", ".join(map(str, shape_key(r))), _name(r), r["wrt"], f"{r['hidden_tensors']:.2f}",
         f"{r['kept_bytes_per_layer'] / 2**20:.0f}", f"{r['temp_bytes'] / 2**30:.2f}")
        for r in records.of("memory")
    ]  # fmt: skip
    head = ("M, H, I", "contender", "gradients of", "[M, I] tensors a layer, less one [M, H]",
            "MiB a layer", "temporaries of all layers, GiB")  # fmt: skip
    return table(head, rows)


def errors_table(records: Records) -> str:
    """Relative L2 errors against float64."""
    names = ("y", "dx", "dw_gate", "dw_up", "dw_down")
    rows = [
        (
            ", ".join(map(str, shape_key(r))),
            _name(r),
            *(f"{r['relative_l2'][n]:.2e}" for n in names),
        )
        for r in records.of("errors")
    ]
    return table(("M, H, I", "contender", *names), rows)


def _sections(records: Records) -> Iterator[str]:
    for file in records.files:
        machine = file["machine"]
        smi = machine.get("nvidia_smi") or {}
        packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
        yield (
            f"- {Path(file['path']).name}: {machine['device']}, driver "
            f"{smi.get('driver_version', 'unknown')}, {file['date']}, commit "
            f"{file['commit'] or 'unknown'}; {packages}\n"
        )
    yield "\n## Bounds\n\n```\n" + "\n".join(map(line, check(records))) + "\n```\n"
    for title, measure in (("Step", "step"), ("Forward", "forward")):
        if records.of(measure):
            yield f"\n## {title}\n\n" + times_table(records, measure)
    if records.of("part"):
        yield "\n## Fused stages\n\n" + stages_table(records)
    selected = sorted({r["measure"] for r in records.all if r["measure"].startswith("select-")})
    for measure in selected:
        title = measure.removeprefix("select-").replace("nothing", "nothing (frozen)")
        yield f"\n## Step, gradients of {title}\n\n" + times_table(records, measure)
    if records.of("memory"):
        yield "\n## Kept for the backward pass\n\n" + memory_table(records)
    if records.of("errors"):
        yield "\n## Errors against float64\n\n" + errors_table(records)
    missing = [(m["what"], m["reason"], file["what"]) for file in records.files
               for m in file["not_made"]]  # fmt: skip
    if missing:
        yield "\n## Not made\n\n" + table(("what", "why", "run"), missing)


def report(records: Records) -> str:
    """The whole report in Markdown."""
    return "# Benchmark results\n\n" + "".join(_sections(records))


def sweep_of(records: Records, measure: str) -> dict[str, dict[int, float]]:
    """Model to M to plain JAX over ours; the last measurement of a point counts."""
    found: dict[str, dict[int, float]] = {}
    for record in records.of(measure, OURS):
        other = records.beside(record, measure, PLAIN)
        if other and record["model"] in MODELS:
            found.setdefault(record["model"], {})[record["m"]] = ratio(other, record)
    return found


def shares_of(records: Records) -> list[tuple[str, str, float]]:
    """(shape, contender, the nine GEMMs' time as a share of its step), last measurements."""
    found: dict[tuple[str, str], float] = {}
    for record in records.of("step"):
        floor = records.beside(record, "gemm_sum", "nine GEMMs alone", same_layout=False)
        if floor:
            place = ", ".join(map(str, shape_key(record)))
            found[place, _name(record)] = ratio(floor, record)
    return [(*key, value) for key, value in found.items()]


def main() -> None:
    """The command."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    command.add_argument("files", nargs="+", type=Path)
    command.add_argument("--out", type=Path, required=True)
    options = command.parse_args()
    records = Records(load(options.files))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(report(records))
    written = ["report.md"]
    speedups = {m: s for m in ("forward", "step") if (s := sweep_of(records, m))}
    if speedups:
        plot_speedup(speedups, options.out / "speedup.png")
        written.append("speedup.png")
    shares = shares_of(records)
    if shares:
        plot_gemm_share(shares, options.out / "gemm_share.png")
        written.append("gemm_share.png")
    print(f"wrote {', '.join(written)} in {options.out}")


if __name__ == "__main__":
    main()

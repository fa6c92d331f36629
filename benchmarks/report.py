"""Markdown tables and plots from result files.

    python -m benchmarks.report benchmarks/results/*.json --out benchmarks/results/report
    python -m benchmarks.report --update-docs

The first writes report.md, speedup.png, gemm_share.png and model.png into the folder, as far as the
files have what they show. The second writes the tables between the markers in README.md and
docs/performance.md, and the plots that they show, from all that is in benchmarks/results. Needs
matplotlib for the plots.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bounds import Records, check, line
from benchmarks.docs_blocks import update_docs
from benchmarks.model_report import model_runs, model_text
from benchmarks.plots import write_plots
from benchmarks.results import load
from benchmarks.tables import errors_table, memory_table, stages_table, table, times_table


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
    for run in model_runs(records):
        yield f"\n## {run.title}\n\n" + "".join(model_text(run))
    missing = [(m["what"], m["reason"], file["what"]) for file in records.files
               for m in file["not_made"]]  # fmt: skip
    if missing:
        yield "\n## Not made\n\n" + table(("what", "why", "run"), missing)


def report(records: Records) -> str:
    """The whole report in Markdown."""
    return "# Benchmark results\n\n" + "".join(_sections(records))


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("files", nargs="*", type=Path)
    command.add_argument("--out", type=Path)
    command.add_argument("--update-docs", action="store_true")
    options = command.parse_args(arguments)
    if options.update_docs:
        if options.files or options.out:
            command.error(
                "--update-docs reads benchmarks/results and takes neither files nor --out"
            )
        print(f"wrote {', '.join(update_docs())}")
        return
    if not options.files or options.out is None:
        command.error("expected result files and --out, or --update-docs")
    records = Records(load(options.files))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(report(records))
    written = ["report.md", *write_plots(records, options.out)]
    print(f"wrote {', '.join(written)} in {options.out}")


if __name__ == "__main__":
    main()

"""The measured parts of README.md and docs/, written from what is in benchmarks/results.

A block stands between ``<!-- measured: NAME -->`` and ``<!-- /measured -->``. Nothing in it is
written by hand: ``python -m benchmarks.report --update-docs`` renews it, and a test compares.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.bounds import OURS, PEERS, PLAIN, Record, Records, check, line, ratio
from benchmarks.model_report import model_runs, model_text
from benchmarks.plots import write_plots
from benchmarks.results import ROOT, load
from benchmarks.series import shares_of, sweep_of
from benchmarks.shapes import HEADLINE
from benchmarks.tables import (
    errors_table,
    memory_table,
    ms_text,
    shape_key,
    shape_text,
    stages_table,
    table,
    times_table,
)

PAGES = ("README.md", "docs/performance.md")
PLOTS = Path("docs") / "measured"
NOT_YET = "*Not measured yet.*\n"
LAYOUT = "OI"
"""The layout that the short tables speak of; the long ones have both."""

SWEEP_POINTS = 4
"""Numbers of tokens at which one model must have been measured for a plot over them."""

_BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- /measured -->)", re.S)


def measurements(root: Path = ROOT, paths: Iterable[Path] | None = None) -> Records:
    """Result files, the oldest first: the last measurement counts.

    Args:
        root: of the checkout.
        paths: of the files; None takes every one in benchmarks/results.
    """
    if paths is None:
        paths = sorted((root / "benchmarks" / "results").glob("*.json"))
    files = load(paths)
    return Records(sorted(files, key=lambda file: (file["date"], file["path"])))


def updated(page: str, text: str, records: Records) -> str:
    """A page's text with every block renewed.

    Raises:
        ValueError: a block of a name that nothing writes.
    """

    def renew(found: re.Match[str]) -> str:
        start, name, end = found.groups()
        if name not in BLOCKS:
            raise ValueError(f"{page}: no block is named {name!r}; there are {', '.join(BLOCKS)}")
        body = BLOCKS[name](records) or NOT_YET
        plots = "../" * page.count("/") + PLOTS.as_posix()
        plots = plots.replace("../docs/", "")  # pages of docs/ see it beside themselves
        return f"{start}\n{body.replace(_HERE, plots)}\n{end}"

    return _BLOCK.sub(renew, text)


def update_docs(root: Path = ROOT) -> list[str]:
    """Write the blocks and their plots; return what was written."""
    records = measurements(root)
    written = []
    if records.files:
        (root / PLOTS).mkdir(parents=True, exist_ok=True)
        written = [str(PLOTS / name) for name in write_plots(records, root / PLOTS)]
    for page in PAGES:
        path = root / page
        path.write_text(updated(page, path.read_text(), records))
    return [*PAGES, *written]


_HERE = "{plots}"


def _plot(name: str, says: str) -> str:
    return f"![{says}]({_HERE}/{name})\n"


def _devices(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record["device"] for record in records))


def _pairs(records: Records, measure: str, device: str) -> dict[tuple[int, int, int], tuple]:
    """Shape to (plain JAX's record, ours), of one layout; the last measurement of each."""
    pairs: dict[tuple[int, int, int], tuple] = {}
    for ours in records.of(measure, OURS):
        plain = records.beside(ours, measure, PLAIN)
        if plain and (ours["device"], ours["layout"]) == (device, LAYOUT):
            pairs[shape_key(ours)] = (plain, ours)
    return pairs


def speed(records: Records) -> str:
    """Plain JAX and this op at the shapes of the claims, a table a device."""
    text = ""
    order = [(s.m, s.h, s.i) for s in HEADLINE]
    for device in _devices(records.of("step", OURS)):
        forward, step = (_pairs(records, measure, device) for measure in ("forward", "step"))
        rows = []
        for shape in (s for s in order if s in forward and s in step):
            cells = [", ".join(map(str, shape))]
            for plain, ours in (forward[shape], step[shape]):
                cells += [ms_text(plain["median_ms"]), ms_text(ours["median_ms"]),
                          f"**{ratio(plain, ours):.3f}**"]  # fmt: skip
            rows.append(cells)
        if rows:
            head = ("M, H, I", "forward: plain JAX, ms", "this op, ms", "ratio",
                    "step: plain JAX, ms", "this op, ms", "ratio")  # fmt: skip
            text += f"\n{device}, bfloat16:\n\n" + table(head, rows)
    return text.lstrip("\n")


def kept(records: Records) -> str:
    """[M, I] tensors a layer under a scan, plain JAX and this op."""
    last: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records.of("memory"):
        if record["wrt"] == "all" and record["layout"] == LAYOUT:
            key = (record["device"], shape_text(record))
            last.setdefault(key, {})[record["name"]] = record
    rows = [
        (device, shape, f"{found[PLAIN]['hidden_tensors']:.1f}",
         f"**{found[OURS]['hidden_tensors']:.1f}**",
         f"{found[PLAIN]['kept_bytes_per_layer'] / 2**20:.0f}",
         f"**{found[OURS]['kept_bytes_per_layer'] / 2**20:.0f}**")
        for (device, shape), found in last.items() if {PLAIN, OURS} <= set(found)
    ]  # fmt: skip
    head = ("device", "M, H, I", "[M, I] tensors kept a layer: plain JAX", "this op",
            "MiB a layer: plain JAX", "this op")  # fmt: skip
    return table(head, rows) if rows else ""


def plot(records: Records) -> str:
    """Plain JAX over this op by M where a sweep was made, or else the steps' share of GEMMs."""
    points = [p for m in ("forward", "step") for p in sweep_of(records, m).values()]
    if max(map(len, points), default=0) >= SWEEP_POINTS:
        return _plot("speedup.png", "Time of plain JAX over time of this op, by number of tokens")
    if shares_of(records):
        return _plot("gemm_share.png", "Time of the nine GEMMs run alone over time of the step")
    return ""


def headline(records: Records) -> str:
    """README's tables and plot."""
    parts = [speed(records), kept(records), plot(records)]
    return "\n".join(part for part in parts if part)


def peers(records: Records) -> str:
    """Every contender's step, where peers or the nine GEMMs alone took turns with this op."""
    others = [r for r in records.of("step") if r["name"].startswith(PEERS)]
    groups = {(r["file"], r["group"]) for r in others + records.of("gemm_sum")}
    if not groups:
        return ""
    return times_table(records, "step", lambda r: (r["file"], r["group"]) in groups)


def stages(records: Records) -> str:
    """Each fused stage against its plain GEMMs."""
    return stages_table(records) if records.of("part") else ""


def memory(records: Records) -> str:
    """All that was weighed."""
    return memory_table(records) if records.of("memory") else ""


def errors(records: Records) -> str:
    """Relative L2 errors against float64."""
    return errors_table(records) if records.of("errors") else ""


def models(records: Records) -> str:
    """Whole models, and their plot."""
    runs = model_runs(records)
    text = "\n".join(f"**{run.title}**\n\n" + "".join(model_text(run)) for run in runs)
    picture = _plot("model.png", "Step time of the variants; kernel time by module")
    return f"{text}\n{picture}" if text else ""


def bounds(records: Records) -> str:
    """The claims as a check list."""
    if not records.all:
        return ""
    return "```text\n" + "\n".join(map(line, check(records))) + "\n```\n"


def machines(records: Records) -> str:
    """Which files, on which machines, with which versions."""
    lines = []
    for file in records.files:
        packages = ", ".join(f"{k} {v}" for k, v in file["machine"]["packages"].items() if v)
        driver = (file["machine"].get("nvidia_smi") or {}).get("driver_version")
        lines.append(
            f"- `{Path(file['path']).name}`: {file['machine']['device']}"
            + (f", driver {driver}" if driver else "")
            + f", {file['date'][:10]}, commit {(file['commit'] or 'unknown')[:12]}; {packages}\n"
        )
    return "".join(lines)


BLOCKS: dict[str, Callable[[Records], str]] = {
    f.__name__: f
    for f in (headline, speed, plot, peers, stages, memory, errors, models, bounds, machines)
}

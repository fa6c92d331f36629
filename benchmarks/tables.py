"""Markdown tables of records, for the reports."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.bounds import OURS, Record, Records, paired_ratios, ratio
from benchmarks.timing import quartiles


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def shape_key(record: Record) -> tuple[int, int, int]:
    return record["m"], record["h"], record["i"]


def shape_text(record: Record) -> str:
    return ", ".join(map(str, shape_key(record)))


def contender_text(record: Record) -> str:
    return f"{record['name']} ({record['layout']})" if record.get("layout") else record["name"]


def ms_text(ms: float) -> str:
    """Milliseconds, to three or four figures."""
    return f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def times_table(
    records: Records, measure: str, keep: Callable[[Record], bool] = lambda _: True
) -> str:
    """One row a shape and contender: median, quartiles, and how much longer it takes than ours."""
    rows: list[tuple[Any, ...]] = []
    of = records.of(measure) + (records.of("gemm_sum") if measure == "step" else [])
    of = [record for record in of if keep(record)]
    for record in sorted(of, key=lambda r: (shape_key(r)[1:], r["m"], r["file"], r["group"])):
        ours = records.beside(record, measure, OURS) or records.beside(
            record, measure, OURS, same_layout=False
        )
        relative = "" if ours is None or ours is record else _ratio_text(record, ours)
        rows.append(
            (
                shape_text(record),
                contender_text(record),
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
                rows.append((shape_text(record), record["layout"], stage,
                             f"{record['median_ms']:.3f}", f"{other['median_ms']:.3f}",
                             _ratio_text(record, other)))  # fmt: skip
    head = ("M, H, I", "layout", "stage, three outputs", "ms", "plain GEMMs, ms", "ratio")
    return table(head, rows)


def memory_table(records: Records) -> str:
    """Bytes kept a layer under lax.scan."""
    rows = [
        (shape_text(r), contender_text(r), r["wrt"], f"{r['hidden_tensors']:.2f}",
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
            shape_text(r),
            contender_text(r),
            *(f"{r['relative_l2'][n]:.2e}" for n in names),
        )
        for r in records.of("errors")
    ]
    return table(("M, H, I", "contender", *names), rows)

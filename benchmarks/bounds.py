"""The claims as a check list: which bounds hold in given result files.

    python -m benchmarks.bounds benchmarks/results/*.json [--json]

Exit status 1 if a bound is broken; one that nothing in the files speaks about is "not measured".
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import load

Record = dict[str, Any]

OURS, PLAIN = "swiglu_jax", "plain"
PEERS = ("tokamax", "torch", "liger", "fla", "quack")
WIDE = 4096
"""Model width from which the bounds of the fused stages hold."""


@dataclass(frozen=True)
class Finding:
    """A bound, and what was measured against it."""

    bound: str
    limit: float
    at_most: bool
    """Whether the value must be at most, or at least, the limit."""
    value: float | None
    """The worst value that was measured; None: not measured."""
    where: str = ""
    aim: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


class Records:
    """Records of one or several result files; the last measurement of a thing counts."""

    def __init__(self, files: Iterable[dict[str, Any]]):
        self.files = list(files)
        self.all: list[Record] = []
        for number, file in enumerate(self.files):
            self.all += [r | {"file": number, "device": file["machine"]["device"]}
                         for r in file["records"]]  # fmt: skip

    def of(self, measure: str, name: str | None = None) -> list[Record]:
        return [
            r for r in self.all if r["measure"] == measure and (name is None or r["name"] == name)
        ]

    def beside(self, record: Record, measure: str, name: str, same_layout: bool = True):
        """The record of another contender that was interleaved with this one, or None."""
        for other in self.all:
            if (
                (other["measure"], other.get("name")) == (measure, name)
                and other["file"] == record["file"]
                and other["group"] == record["group"]
                and (not same_layout or other["layout"] == record["layout"])
            ):
                return other
        return None


def ratio(numerator: Record, denominator: Record) -> float:
    """Ratio of medians of two contenders that were interleaved."""
    return numerator["median_ms"] / denominator["median_ms"]


def paired_ratios(numerator: Record, denominator: Record) -> list[float]:
    """Ratios round by round, for a spread."""
    pairs = zip(numerator["samples_ms"], denominator["samples_ms"], strict=True)
    return [a / b for a, b in pairs]


def place(record: Record) -> str:
    """Where a record was taken, for a person."""
    layout = f" {record['layout']}" if record.get("layout") else ""
    return f"{record['m']},{record['h']},{record['i']}{layout}"


def _latest(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    return dict(values)


def _worst(values: Iterable[tuple[str, float]], at_most: bool) -> tuple[float | None, str]:
    latest = _latest(values)
    if not latest:
        return None, ""
    where = (max if at_most else min)(latest, key=lambda k: latest[k])
    return latest[where], where


def _finding(
    bound: str,
    limit: float,
    values: Iterable[tuple[str, float]],
    at_most: bool,
    aim: float | None = None,
) -> Finding:
    value, where = _worst(values, at_most)
    return Finding(bound, limit, at_most, value, where, aim)


def check(records: Records) -> list[Finding]:
    """Every bound, with the worst value that the records hold for it."""
    findings = [
        _finding("output and gradients: relative L2 error against float64", 6e-3,
                 _errors(records), at_most=True),
        _finding("that error over plain JAX's own", 1.1, _error_ratios(records), at_most=True),
        _finding("gate_up with three outputs over two plain GEMMs, H >= 4096", 0.99,
                 _stage(records, "gate_up", "part", "gate+up"), at_most=True),
        _finding("down_dswiglu with three outputs over the plain dgrad GEMM, H >= 4096", 1.05,
                 _stage(records, "down_dswiglu", "gemm", "dh"), at_most=True),
    ]  # fmt: skip
    for shape, limit, aim in (
        ("8192,5120,17408", 1.04, 1.06),
        ("8192,2048,8192", 1.065, 1.09),
        ("32768,1024,3072", 1.11, 1.14),
    ):
        values = [v for v in _speedups(records, "step") if v[0].startswith(shape + " ")]
        findings.append(
            _finding(f"step: plain JAX over ours at {shape}", limit, values, False, aim)
        )
    findings += [
        _finding("step over the sum of its nine GEMMs alone", 1.0, _over_gemms(records), True),
        _finding("worst shape, forward: plain JAX over ours", 0.99,
                 _speedups(records, "forward"), False),
        _finding("worst shape, step: plain JAX over ours", 0.99, _speedups(records, "step"), False),
        _finding("[M, I] tensors kept per layer under lax.scan", 2.05, _kept(records), True),
        _finding("first call beyond plain JAX's, warm tuning cache, seconds", 1.0,
                 _first_call(records), True),
        _finding("repeated runs bit-identical (1: yes)", 1.0, _identical(records), False),
        _finding("required peers measured (1: yes)", 1.0, _peers_made(records), False),
        _finding("step: fastest peer over ours", 1.0, _against_peers(records), False),
    ]  # fmt: skip
    return findings


def _errors(records: Records) -> Iterator[tuple[str, float]]:
    for record in records.of("errors", OURS):
        for name, error in record["relative_l2"].items():
            # A NaN must break the bound, and compares false with everything.
            yield f"{place(record)} {name}", error if error == error else float("inf")


def _error_ratios(records: Records) -> Iterator[tuple[str, float]]:
    plain = {(place(r), r["file"]): r["relative_l2"] for r in records.of("errors", PLAIN)}
    for record in records.of("errors", OURS):
        other = plain.get((place(record), record["file"]), {})
        for name, error in record["relative_l2"].items():
            if name not in other:
                continue
            share = error / other[name]
            yield f"{place(record)} {name}", share if share == share else float("inf")


def _stage(records: Records, stage: str, measure: str, plain: str) -> Iterator[tuple[str, float]]:
    for record in records.of("part", stage):
        other = records.beside(record, measure, plain)
        if other and record["h"] >= WIDE:
            yield place(record), ratio(record, other)


def _speedups(records: Records, measure: str) -> Iterator[tuple[str, float]]:
    for record in records.of(measure, OURS):
        other = records.beside(record, measure, PLAIN)
        if other:
            yield place(record), ratio(other, record)


def _over_gemms(records: Records) -> Iterator[tuple[str, float]]:
    for record in records.of("step", OURS):
        other = records.beside(record, "gemm_sum", "nine GEMMs alone")
        if other:
            yield place(record), ratio(record, other)


def _kept(records: Records) -> Iterator[tuple[str, float]]:
    for record in records.of("memory", OURS):
        if record["wrt"] == "all":
            yield place(record), record["hidden_tensors"]


def _first_call(records: Records) -> Iterator[tuple[str, float]]:
    for record in records.of("first_call"):
        seconds = {k: statistics.median(v) for k, v in record["seconds"].items()}
        yield place(record), seconds["warm"] - seconds["plain"]


def _identical(records: Records) -> Iterator[tuple[str, float]]:
    for record in records.of("errors", OURS):
        yield place(record), float(record["bit_identical_twice"])


def _peers_made(records: Records) -> Iterator[tuple[str, float]]:
    asked = [f["peers"]["required"] for f in records.files if f.get("peers", {}).get("asked")]
    for peer in {name for required in asked for name in required}:
        yield peer, float(any(required[peer] for required in asked))


def _against_peers(records: Records) -> Iterator[tuple[str, float]]:
    for record in records.of("step", OURS):
        for other in records.of("step"):
            if other["name"].startswith(PEERS) and (other["file"], other["group"]) == (
                record["file"], record["group"]
            ):  # fmt: skip
                yield f"{place(record)} {other['name']}", ratio(other, record)


def to_json(finding: Finding) -> dict[str, Any]:
    return asdict(finding) | {"holds": finding.holds}


def line(finding: Finding) -> str:
    """One line for a person."""
    mark = {True: "holds", False: "BROKEN", None: "not measured"}[finding.holds]
    sign = "<=" if finding.at_most else ">="
    text = f"{mark:<12}  {finding.bound} {sign} {finding.limit:g}"
    if finding.value is not None:
        text += f": {finding.value:.4g}"
    if finding.aim is not None:
        text += f" (aim {finding.aim:g})"
    return text + (f"  at {finding.where}" if finding.where else "")


def main(show: Callable[[str], None] = print) -> int:
    """The command; returns its exit status."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=__doc__)
    command.add_argument("files", nargs="+", type=Path)
    command.add_argument("--json", action="store_true", help="findings as JSON")
    options = command.parse_args()
    findings = check(Records(load(options.files)))
    if options.json:
        show(json.dumps([to_json(f) for f in findings], indent=1))
    else:
        for finding in findings:
            show(line(finding))
    return int(any(f.holds is False for f in findings))


if __name__ == "__main__":
    sys.exit(main())

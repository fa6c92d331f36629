"""What the plots show, read off the records."""

from benchmarks.bounds import OURS, PLAIN, Records, ratio
from benchmarks.shapes import MODELS
from benchmarks.tables import contender_text, shape_text


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
            found[shape_text(record), contender_text(record)] = ratio(floor, record)
    return [(*key, value) for key, value in found.items()]

"""What ``python -m benchmarks.model`` measured, as Markdown and for the plot."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.bounds import Record, Records
from benchmarks.decoder import CHOICES
from benchmarks.tables import ms_text, table


@dataclass(frozen=True)
class ModelRun:
    """One file of the model benchmark, by variant."""

    name: str
    device: str
    sizes: dict[str, Any]
    sequences: int
    length: int
    steps: dict[str, Record]
    memory: dict[str, Record]
    kernels: dict[str, Record]
    largest: dict[str, Record]
    ratios: dict[str, float]

    @property
    def title(self) -> str:
        """Which model, at what batch, where."""
        return f"{self.name}, {self.sequences} x {self.length} tokens, {self.device}"

    def over_plain(self, variant: str) -> float | None:
        """Step time of the same variant with the plain MLP over its own."""
        plain = "+".join((CHOICES["mlp"][0], *variant.split("+")[1:]))
        if plain not in self.steps or plain == variant:
            return None
        return self.steps[plain]["median_ms"] / self.steps[variant]["median_ms"]


def model_runs(records: Records) -> list[ModelRun]:
    """Every model run in the files; of one model and batch on one device the last one."""
    runs: dict[str, ModelRun] = {}
    for number, file in enumerate(records.files):
        of_file = [r for r in records.all if r["file"] == number]
        by_variant: dict[str, dict[str, Record]] = {}
        ratios: dict[str, float] = {}
        for record in of_file:
            if record["measure"] == "model_attribution":
                ratios = record["ratios"]
            elif "variant" in record:
                by_variant.setdefault(record["measure"], {})[record["variant"]] = record
        if "model_step" not in by_variant:
            continue
        run = ModelRun(
            name=file["options"]["model"],
            device=file["machine"]["device"],
            sizes=file.get("model", {}),
            sequences=file["options"]["sequences"],
            length=file["options"]["length"],
            steps=by_variant["model_step"],
            memory=by_variant.get("model_memory", {}),
            kernels=by_variant.get("model_kernels", {}),
            largest=by_variant.get("model_largest_batch", {}),
            ratios=ratios,
        )
        runs.pop(run.title, None)
        runs[run.title] = run
    return list(runs.values())


def variants_table(run: ModelRun) -> str:
    """A row a variant: step time, what the plain MLP takes in its place, memory, largest batch."""
    rows = []
    for name, step in run.steps.items():
        over = run.over_plain(name)
        memory, largest = run.memory.get(name), run.largest.get(name)
        rows.append(
            (
                *name.split("+"),
                f"{ms_text(step['median_ms'])} ({ms_text(step['q1_ms'])} to "
                f"{ms_text(step['q3_ms'])})",
                "" if over is None else f"{over:.3f}",
                "" if memory is None else f"{memory['peak_bytes'] / 2**30:.2f}",
                # None: a file of before this was an error, where memory was too cut up to tell.
                "" if largest is None else largest["sequences"] or "",
            )
        )
    head = (*CHOICES, "step, ms (quartiles)", "with the plain MLP, over this", "memory, GiB",
            "most sequences that fit")  # fmt: skip
    return table(head, rows)


def attribution_table(run: ModelRun) -> str:
    """What each choice is worth: geometric mean over the pairs that differ in it alone."""
    rows = [
        (axis, f"{CHOICES[axis][0]} over {CHOICES[axis][1]}", f"{ratio:.3f}")
        for axis, ratio in run.ratios.items()
    ]
    return table(("choice", "step time with", "ratio"), rows)


def kernels_table(run: ModelRun) -> str:
    """Kernel time a step by module, in milliseconds and as a share."""
    modules = list(next(iter(run.kernels.values()))["seconds"])
    rows = [
        (
            name,
            *(
                f"{1e3 * record['seconds'][m]:.2f} ({record['shares'].get(m, 0):.0%})"
                for m in modules
            ),
            f"{1e3 * sum(record['seconds'].values()):.2f}",
        )
        for name, record in run.kernels.items()
    ]
    return table(("variant", *(f"{m}, ms" for m in modules), "all, ms"), rows)


def model_text(run: ModelRun) -> Iterator[str]:
    """The tables of a run, each with a line that says what it is."""
    yield variants_table(run)
    if run.ratios:
        yield "\nWhat each choice is worth, the other two being equal:\n\n" + attribution_table(run)
    if run.kernels:
        yield "\nKernel time by module, from a profiler trace:\n\n" + kernels_table(run)

"""The report's plots."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.bounds import Records
from benchmarks.decoder import CHOICES
from benchmarks.model_report import ModelRun, model_runs
from benchmarks.series import shares_of, sweep_of
from benchmarks.tables import ms_text

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, GRID = "#222222", "#dddddd"
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#7a4ea3", "#5c5c5c")


def plot_speedup(measures: dict[str, dict[str, dict[int, float]]], path: Path) -> None:
    """Plain JAX over this op by M, one panel a measure, one line a model.

    Args:
        measures: measure to model to M to ratio.
        path: of the PNG.
    """
    figure, axes = plt.subplots(
        1, len(measures), figsize=(5.5 * len(measures), 4), sharey=True, squeeze=False
    )
    for axis, (measure, models) in zip(axes[0], measures.items(), strict=True):
        for colour, (model, points) in zip(COLOURS, models.items(), strict=False):
            rows = sorted(points)
            axis.plot(rows, [points[m] for m in rows], "o-", color=colour, label=model,
                      markersize=4)  # fmt: skip
        axis.axhline(1, color=INK, linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens M")
        axis.set_title(measure)
        axis.grid(color=GRID)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time of plain JAX / time of swiglu_jax")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_gemm_share(shares: Sequence[tuple[str, str, float]], path: Path) -> None:
    """How near each contender's step comes to its nine GEMMs run alone.

    Args:
        shares: (shape, contender, GEMM time over step time).
        path: of the PNG.
    """
    shapes = list(dict.fromkeys(s for s, _, _ in shares))
    names = list(dict.fromkeys(n for _, n, _ in shares))
    height = 0.8 / len(names)
    figure, axis = plt.subplots(figsize=(8, 1 + 0.3 * len(shapes) * max(2, len(names))))
    for k, name in enumerate(names):
        values = {s: v for s, n, v in shares if n == name}
        positions = [shapes.index(s) + k * height for s in values]
        axis.barh(positions, list(values.values()), height * 0.9, label=name,
                  color=COLOURS[k % len(COLOURS)])  # fmt: skip
        for position, value in zip(positions, values.values(), strict=True):
            # Inside the bar and before the line at 1, which would cross the digits.
            axis.text(min(value, 1), position, f"{value:.3f} ", va="center", ha="right", fontsize=7,
                      color="white")  # fmt: skip
    axis.axvline(1, color=INK, linewidth=1)
    axis.set_yticks([s + height * (len(names) - 1) / 2 for s in range(len(shapes))], shapes)
    axis.invert_yaxis()
    axis.set_ylabel("M, H, I")
    # A bar is compared by its length, so its axis begins at 0.
    axis.set_xlim(0, 1.05 * max(1, *(share for _, _, share in shares)))
    axis.set_xlabel("time of the nine GEMMs run alone / time of the step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_models(runs: Sequence[ModelRun], path: Path) -> None:
    """A row a model run: step time of the variants, and kernel time by module where traced.

    Args:
        runs: from ``model_runs``.
        path: of the PNG.
    """
    figure, axes = plt.subplots(
        len(runs), 2, figsize=(12, 3.2 * len(runs)), squeeze=False, layout="constrained"
    )
    for (left, right), run in zip(axes, runs, strict=True):
        _plot_steps(left, run)
        _plot_kernels(right, run)
        left.set_title(run.title, fontsize=9)
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_steps(axis: Axes, run: ModelRun) -> None:
    others = list(dict.fromkeys(name.split("+", 1)[1] for name in run.steps))
    for k, mlp in enumerate(CHOICES["mlp"]):
        found = {o: run.steps[f"{mlp}+{o}"] for o in others if f"{mlp}+{o}" in run.steps}
        places = [others.index(other) + 0.4 * k for other in found]
        times = [record["median_ms"] for record in found.values()]
        axis.barh(places, times, 0.36, color=COLOURS[1 - k], label=mlp)
        for place, time in zip(places, times, strict=True):
            axis.text(time, place, f" {ms_text(time)}", va="center", fontsize=7, color=INK)
    axis.set_yticks([k + 0.2 for k in range(len(others))], others)
    axis.invert_yaxis()
    axis.set_xlabel("step, ms")
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plot_kernels(axis: Axes, run: ModelRun) -> None:
    if not run.kernels:
        axis.set_axis_off()
        return
    modules = list(next(iter(run.kernels.values()))["seconds"])
    ends = [0.0] * len(run.kernels)
    for colour, module in zip(COLOURS, modules, strict=False):
        times = [1e3 * record["seconds"][module] for record in run.kernels.values()]
        axis.barh(list(run.kernels), times, left=ends, color=colour, label=module, height=0.6)
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("kernel time a step, ms")
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def write_plots(records: Records, folder: Path) -> list[str]:
    """Write every plot that the records have something for; return the files' names."""
    written = []
    speedups = {m: s for m in ("forward", "step") if (s := sweep_of(records, m))}
    shares, runs = shares_of(records), model_runs(records)
    for name, plot, shown in (
        ("speedup.png", plot_speedup, speedups),
        ("gemm_share.png", plot_gemm_share, shares),
        ("model.png", plot_models, runs),
    ):
        if shown:
            plot(shown, folder / name)
            written.append(name)
    return written

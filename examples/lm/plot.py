"""The loss curve as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lm.train import History

_SMOOTHED_SHARE = 0.02


def plot_losses(history: History, unigram: float, title: str, path: Path) -> None:
    """Write training and held-out loss, and the byte-unigram entropy to beat, to `path`."""
    losses = np.asarray(history.losses)
    window = max(1, round(_SMOOTHED_SHARE * losses.size))
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, losses.size + 1)
    axes.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(steps[window - 1 :], smooth, color="C0", label="training")
    axes.plot(*zip(*history.held_out, strict=True), "o-", color="C1", label="held-out files")
    axes.axhline(unigram, color="0.4", linestyle="--", label="byte-unigram entropy, held-out files")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)

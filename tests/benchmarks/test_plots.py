"""The plots draw what was measured as large as it is."""

import pytest
from matplotlib import pyplot as plt

from benchmarks import plots


def _drawn(monkeypatch, plot, *arguments):
    """The only axes of the figure that a plot saved."""
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    plot(*arguments)
    (figure,) = figures
    monkeypatch.undo()
    plt.close(figure)
    (axis,) = figure.axes
    return axis


@pytest.mark.parametrize(("low", "high"), [(0.93, 0.99), (0.95, 1.05), (0.4, 1.6), (1.1, 1.3)])
@pytest.mark.parametrize("contenders", [1, 2, 5])
def test_shares_are_drawn_from_zero_and_can_be_read(
    rng, monkeypatch, tmp_path, low, high, contenders
):
    shares = [
        (f"{1024 << k}, 512, 2048", f"contender {n}", float(rng.uniform(low, high)))
        for k in range(4)
        for n in range(contenders)
    ]
    axis = _drawn(monkeypatch, plots.plot_gemm_share, shares, tmp_path / "shares.png")
    left, right = axis.get_xlim()
    assert left == 0 and right > max(1, *(v for _, _, v in shares))
    assert sorted(bar.get_width() for bar in axis.patches) == sorted(v for _, _, v in shares)
    assert all(bar.get_x() == 0 for bar in axis.patches)
    line = axis.transData.transform((1, 0))[0]
    boxes = [text.get_window_extent() for text in axis.texts]
    for bar, text, box in zip(axis.patches, axis.texts, boxes, strict=True):
        assert text.get_text().strip() == f"{bar.get_width():.3f}"
        assert box.x1 <= min(line, bar.get_window_extent().x1)
        assert box.x0 >= axis.get_window_extent().x0
        assert not any(box.overlaps(other) for other in boxes if other is not box)

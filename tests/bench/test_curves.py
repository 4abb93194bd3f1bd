"""Plots of Figures 2 to 4 of Leviathan et al. 2023.

Each line is checked against its definition, by sums and by search instead of closed forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outpace.bench import curves
from outpace.bench.curves import backend

ALPHAS = curves.ALPHAS


def plotted(panel: Callable[..., None], c: float = 0.05) -> dict[str, Any]:
    pyplot = backend()
    found, axis = pyplot.subplots()
    panel(axis, [], c)
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in axis.get_lines()}
    pyplot.close(found)
    return lines


def tokens(g: int) -> Any:
    """Return the expected tokens: token i + 1 is generated if i draft tokens are accepted."""
    return sum(ALPHAS**i for i in range(g + 1))


def test_figure_2_expected_tokens() -> None:
    lines = plotted(curves.tokens)
    assert set(lines) == {"g = 1", "g = 3", "g = 5", "g = 7", "g = 10", "no limit"}
    for g in curves.LENGTHS:
        assert lines[f"g = {g}"] == pytest.approx(tokens(g))
    assert lines["no limit"] == pytest.approx(tokens(3000))


def test_figure_3_best_g() -> None:
    lines = plotted(curves.lengths)
    assert set(lines) == {f"c = {c:g}" for c in (0.01, 0.02, 0.05, 0.1)}
    for c in curves.COSTS:
        speeds = np.stack([tokens(g) / (1 + c * g) for g in range(150)])  # [g, α]
        chosen = np.take_along_axis(speeds, lines[f"c = {c:g}"][None].astype(int), axis=0)[0]
        assert chosen == pytest.approx(speeds.max(axis=0))
        assert (np.diff(lines[f"c = {c:g}"]) >= 0).all()


def test_figure_3_has_a_curve_for_the_c_of_a_point() -> None:
    points = [curves.Point(0.6, 6.8e-5), curves.Point(0.5, 6.8e-5), curves.Point(0.8, 0.05)]
    pyplot = backend()
    found, axis = pyplot.subplots()
    curves.lengths(axis, points, 0.05)
    labels = [str(line.get_label()) for line in axis.get_lines()]
    assert [one for one in labels if one.startswith("c = ")] == [
        "c = 0.000068", "c = 0.01", "c = 0.02", "c = 0.05", "c = 0.1",
    ]  # fmt: skip
    line = axis.get_lines()[0]
    at = int(np.argmin(abs(ALPHAS - 0.6)))
    assert line.get_ydata()[at] == pytest.approx(points[0].g, abs=1)  # the mark lies on its curve
    pyplot.close(found)


@pytest.mark.parametrize("c", [0.0, 0.05])
def test_figure_4_speedup_and_operations(c: float) -> None:
    speed, operations = plotted(curves.speed, c), plotted(curves.operations, c)
    for g in curves.LENGTHS:
        assert speed[f"g = {g}"] == pytest.approx(tokens(g) / (1 + c * g))
        assert operations[f"g = {g}"] == pytest.approx((g + 1 + c * g) / tokens(g))

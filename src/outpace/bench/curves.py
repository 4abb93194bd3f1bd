"""Curves of the papers, with points of requested or measured drafts.

They need ``pip install 'outpace[plot]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.bench import theory
from outpace.checks.errors import format_small
from outpace.checks.files import check_output

LENGTHS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1)
MOST = 6  # most curves of a panel
LONGEST = 32  # largest g of a point
MARKERS = "osD^vPX*"
ALPHAS = np.linspace(0, 0.99, 199)


@dataclass(frozen=True)
class Point:
    """A draft, at its best g.

    Attributes:
        alpha: Acceptance rate.
        c: Time of a draft's forward pass, relative to the target's.
        name: Label; by default α, c and g.
        ops: Operations of a draft's forward pass, relative to the target's for a token; None means c.
        most: Largest g to consider.
    """

    alpha: float
    c: float
    name: str = ""
    ops: float | None = None
    most: int = LONGEST

    @property
    def g(self) -> int:
        """Best number of draft tokens."""
        return int(theory.best_length(self.alpha, self.c, self.most))

    @property
    def step(self) -> float:
        """Relative operations ĉ of a draft's forward pass."""
        return self.c if self.ops is None else self.ops

    @property
    def operations(self) -> float:
        """Operations relative to decoding without speculation."""
        return float(theory.operations(self.alpha, self.g, self.step))

    @property
    def label(self) -> str:
        """Label in legends."""
        return self.name or f"α = {self.alpha:g}, c = {self.c:g}, g = {self.g}"


def save_plot(path: Path, point: Point) -> None:
    """Plot expected tokens, best draft lengths, speedup and operations over α.

    They are figures 2 to 4 of Leviathan et al. 2023.
    """
    pyplot = backend()
    found, axes = pyplot.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    panels = (tokens, point.c), (lengths, point.c), (speed, point.c), (operations, point.step)
    for (panel, cost), axis in zip(panels, axes.flat, strict=True):
        panel(axis, [point], cost)
        axis.legend(fontsize=7)
    found.savefig(path)
    pyplot.close(found)


def tokens(axis: Any, points: Sequence[Point], c: float) -> None:
    """Plot the expected tokens per forward pass over α."""
    for g in LENGTHS:
        axis.plot(ALPHAS, theory.expected_tokens(ALPHAS, g), label=f"g = {g}")
    axis.plot(ALPHAS, 1 / (1 - ALPHAS), "k:", lw=1, label="no limit")
    axis.set(title="expected tokens per pass", ylim=(1, 11))
    _dots(axis, points, [theory.expected_tokens(one.alpha, one.g) for one in points])


def lengths(axis: Any, points: Sequence[Point], c: float) -> None:
    """Plot the best g over α.

    The c of each point has a curve, too, up to ``MOST`` curves.
    """
    costs = {cost: f"{cost:g}" for cost in COSTS}
    for one in points:
        if len(costs) < MOST and format_small(one.c) not in map(format_small, costs):
            costs[one.c] = format_small(one.c)
    for cost, said in sorted(costs.items()):
        axis.plot(ALPHAS, theory.best_length(ALPHAS, cost), label=f"c = {said}")
    axis.set(title="best g", ylim=(0, 40))
    _dots(axis, points, [one.g for one in points])


def speed(axis: Any, points: Sequence[Point], c: float) -> None:
    """Plot the speedup over α."""
    for g in LENGTHS:
        axis.plot(ALPHAS, theory.speedup(ALPHAS, g, c), label=f"g = {g}")
    axis.plot(ALPHAS, theory.oracle_speedup(ALPHAS, c), "k:", lw=1, label="oracle")
    axis.set(title=f"speedup over the baseline, c = {format_small(c)}", ylim=(0, 10))
    _dots(axis, points, [theory.speedup(one.alpha, one.g, one.c) for one in points])


def operations(axis: Any, points: Sequence[Point], c: float) -> None:
    """Plot the operations relative to decoding without speculation over α."""
    for g in LENGTHS:
        axis.plot(ALPHAS, theory.operations(ALPHAS, g, c), label=f"g = {g}")
    axis.set(title=f"operations over the baseline, ĉ = {format_small(c)}", ylim=(1, 8))
    _dots(axis, points, [one.operations for one in points])


def hollow(axis: Any, marks: Sequence[tuple[float, float | None]]) -> None:
    """Plot a hollow mark over each α, with the markers of the points in the same order."""
    for i, (alpha, value) in enumerate(marks):
        if value is not None:
            low, high = axis.get_ylim()
            axis.set_ylim(low, max(high, 1.05 * value))
            mark = "k" + MARKERS[i % len(MARKERS)]
            name = "by measured times" if i == 0 else None
            axis.plot([alpha], [value], mark, ms=6, mfc="none", clip_on=False, ls="", label=name)


def _dots(axis: Any, points: Sequence[Point], values: Sequence[float]) -> None:
    """Plot all points, and extend the axis to show them."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, max(high, *(1.05 * value for value in values)) if values else high)
    for i, (one, value) in enumerate(zip(points, values, strict=True)):
        mark = "k" + MARKERS[i % len(MARKERS)]
        axis.plot([one.alpha], [value], mark, ms=6, label=one.label, clip_on=False, ls="")
    axis.set_xlabel("α")
    axis.grid(alpha=0.3)


def backend(picture: Path | None = None) -> Any:
    """Return matplotlib's pyplot, without a screen.

    Args:
        picture: File to be plotted; checked for its format and place.

    Raises:
        ValueError: There is no matplotlib, or it cannot write such a file there.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'outpace[plot]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    if picture is not None:
        from matplotlib.figure import Figure

        kinds = sorted(Figure().canvas.get_supported_filetypes())
        if picture.suffix[1:].lower() not in kinds:
            raise ValueError(f"--plot: {picture}: it must end in one of .{', .'.join(kinds)}")
        check_output("--plot", picture)
    return pyplot

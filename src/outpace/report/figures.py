"""matplotlib figures as SVG inside a page, in the page's own colours and fonts."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from outpace.bench.curves import MARKERS, backend
from outpace.report.words import said

SIZE = (3.6, 2.6)  # inches, without the legend: letters stay readable where a figure is as wide as a phone
ROW = 0.17  # inches of a row of the legend

# The style sheet sets the colours, light or dark: matplotlib gets placeholders.
INK, GRID = "#010101", "#020202"
SERIES = tuple(f"#0300{i:02x}" for i in range(6))
VARIABLES = {
    "#000000": "currentColor",
    INK: "currentColor",
    GRID: "var(--grid)",
    **{one: f"var(--series-{i})" for i, one in enumerate(SERIES, 1)},
}
STYLES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
NUMBERS = itertools.count(1)
WHOLE = Markup('<svg viewBox="{}" role="img" aria-label="{}">{}')


@dataclass(frozen=True)
class Line:
    """The points of one series; NaN leaves a gap.

    Attributes:
        name: Name in the legend.
        x: Horizontal positions.
        y: Values.
        colour: Index of the colour and marker.
        spread: Lengths of the error bar below and above each point.
        predicted: Whether the values were predicted; they are plotted as a dotted line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    spread: Sequence[Sequence[float]] | None = None
    predicted: bool = False

    def __str__(self) -> str:
        there = (f"{said(x)}: {said(y)}" for x, y in zip(self.x, self.y, strict=True) if not math.isnan(y))
        return f"{self.name}{', predicted' if self.predicted else ''}: {', '.join(there)}"


def lines(title: str, xlabel: str, shown: Sequence[Line], ticks: dict[float, str] | None = None) -> Markup:
    """Return a plot of lines over x, with the y axis from 0 unless values are negative.

    The numbers are also in the alternative text, for readers who cannot see the plot.

    Args:
        title: Title of the plot.
        xlabel: Label of the x axis.
        shown: The lines.
        ticks: Labels of the x axis, by position.
    """

    def draw(axis: Any) -> None:
        foretold = [one for one in shown if one.predicted]
        for one in shown:
            i = one.colour % len(SERIES)
            if one.predicted:
                label = "predicted" if one is foretold[0] else None
                axis.plot(one.x, one.y, color=SERIES[i], ls=":", lw=1.5, label=label)
                continue
            axis.plot(
                one.x, one.y, color=SERIES[i], ls=STYLES[i], marker=MARKERS[i], lw=1.5, ms=4, label=one.name
            )
            if one.spread:
                ends = [[max(end, 0.0) for end in side] for side in zip(*one.spread, strict=True)]
                axis.errorbar(one.x, one.y, ends, fmt="none", ecolor=SERIES[i], elinewidth=1, capsize=2)
        axis.set(title=title, xlabel=xlabel)
        low, high = axis.get_ylim()
        axis.set_ylim(low if _below(shown) else 0.0, 1.04 * high)  # half a mark above the highest
        if ticks:
            axis.set_xticks([*ticks], [*ticks.values()])
        else:
            axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y")

    return panel(draw, f"{title} over {xlabel}. {'; '.join(map(str, shown))}.")


def panel(draw: Callable[[Any], None], words: str) -> Markup:
    """Return a plot with its legend below.

    Args:
        draw: Function that plots on a matplotlib axis.
        words: Alternative text with the same content.
    """
    pyplot = backend()
    looks = {
        "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
        "ytick.color": INK, "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False,
        "axes.prop_cycle": pyplot.cycler(color=SERIES, linestyle=STYLES), "axes.titlesize": 9,
        "font.size": 8.5, "legend.fontsize": 8, "legend.frameon": False, "legend.handlelength": 2.5,
        "text.parse_math": False, "svg.hashsalt": "outpace",
    }  # fmt: skip
    with pyplot.rc_context(looks):
        figure, axis = pyplot.subplots(figsize=SIZE, layout="constrained")
        draw(axis)
        handles, labels = axis.get_legend_handles_labels()
        if labels:
            longest = max(map(len, labels))
            columns = 3 if longest < 10 else 2 if longest < 20 else 1
            figure.set_size_inches(SIZE[0], SIZE[1] + ROW * math.ceil(len(labels) / columns))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
        pyplot.close(figure)
    return _inline(written.getvalue(), words)


def _below(shown: Sequence[Line]) -> bool:
    return any(y < 0 for one in shown for y in one.y)


def _inline(svg: str, words: str) -> Markup:
    """Return an SVG file as an element of a page.

    It has no header and no size of its own, and ids that no other figure has.
    """
    view = re.search(r'viewBox="([^"]*)"', svg)
    inside = svg[svg.index(">", svg.index("<svg")) + 1 :].replace("xlink:href", "href").strip()
    inside = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{next(NUMBERS)}-", inside)
    inside = re.sub(r"#0[0-9a-f]{5}\b", lambda found: VARIABLES.get(found[0], found[0]), inside)
    return WHOLE.format(view[1] if view else "", words, Markup(inside))

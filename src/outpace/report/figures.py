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
from outpace.report.words import format_value

SIZE = (3.6, 2.6)  # inches without the legend; letters stay readable if the figure is as wide as a phone
LEGEND_ROW = 0.17  # inches

# The style sheet sets the colours, light or dark: matplotlib gets placeholders.
INK, GRID = "#010101", "#020202"
SERIES = tuple(f"#0300{i:02x}" for i in range(6))
VARIABLES = {
    "#000000": "currentColor",
    INK: "currentColor",
    GRID: "var(--grid)",
    **{placeholder: f"var(--series-{i})" for i, placeholder in enumerate(SERIES, 1)},
}
LINE_STYLES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
FIGURE_NUMBERS = itertools.count(1)
SVG = Markup('<svg viewBox="{}" role="img" aria-label="{}">{}')


@dataclass(frozen=True)
class Line:
    """The points of one series; NaN leaves a gap.

    Attributes:
        name: Name in the legend.
        x: Horizontal positions.
        y: Values.
        colour: Index of the colour and marker.
        error_bars: Lengths of the error bar below and above each point.
        predicted: Whether the values were predicted; they are plotted as a dotted line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    error_bars: Sequence[Sequence[float]] | None = None
    predicted: bool = False

    def __str__(self) -> str:
        points = (
            f"{format_value(x)}: {format_value(y)}"
            for x, y in zip(self.x, self.y, strict=True)
            if not math.isnan(y)
        )
        return f"{self.name}{', predicted' if self.predicted else ''}: {', '.join(points)}"


def lines(title: str, xlabel: str, series: Sequence[Line], ticks: dict[float, str] | None = None) -> Markup:
    """Return a plot of lines over x, with the y axis from 0 unless values are negative.

    The numbers are also in the alternative text, for readers who cannot see the plot.

    Args:
        title: Title of the plot.
        xlabel: Label of the x axis.
        series: The lines.
        ticks: Labels of the x axis, by position.
    """

    def plot(axis: Any) -> None:
        predictions = [line for line in series if line.predicted]
        for line in series:
            i = line.colour % len(SERIES)
            if line.predicted:
                label = "predicted" if line is predictions[0] else None
                axis.plot(line.x, line.y, color=SERIES[i], ls=":", lw=1.5, label=label)
                continue
            axis.plot(
                line.x,
                line.y,
                color=SERIES[i],
                ls=LINE_STYLES[i],
                marker=MARKERS[i],
                lw=1.5,
                ms=4,
                label=line.name,
            )
            if line.error_bars:
                below_and_above = [
                    [max(length, 0.0) for length in lengths] for lengths in zip(*line.error_bars, strict=True)
                ]
                axis.errorbar(
                    line.x, line.y, below_and_above, fmt="none", ecolor=SERIES[i], elinewidth=1, capsize=2
                )
        axis.set(title=title, xlabel=xlabel)
        low, high = axis.get_ylim()
        axis.set_ylim(low if _any_negative(series) else 0.0, 1.04 * high)  # half a marker above the highest
        if ticks:
            axis.set_xticks([*ticks], [*ticks.values()])
        else:
            axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y")

    return panel(plot, f"{title} over {xlabel}. {'; '.join(map(str, series))}.")


def panel(plot: Callable[[Any], None], alt_text: str) -> Markup:
    """Return a plot with its legend below.

    Args:
        plot: Function that plots on a matplotlib axis.
        alt_text: Alternative text with the same content.
    """
    pyplot = backend()
    style = {
        "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
        "ytick.color": INK, "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False,
        "axes.prop_cycle": pyplot.cycler(color=SERIES, linestyle=LINE_STYLES), "axes.titlesize": 9,
        "font.size": 8.5, "legend.fontsize": 8, "legend.frameon": False, "legend.handlelength": 2.5,
        "text.parse_math": False, "svg.hashsalt": "outpace",
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, axis = pyplot.subplots(figsize=SIZE, layout="constrained")
        plot(axis)
        handles, labels = axis.get_legend_handles_labels()
        if labels:
            longest = max(map(len, labels))
            columns = 3 if longest < 10 else 2 if longest < 20 else 1
            figure.set_size_inches(SIZE[0], SIZE[1] + LEGEND_ROW * math.ceil(len(labels) / columns))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
        pyplot.close(figure)
    return _inline(buffer.getvalue(), alt_text)


def _any_negative(series: Sequence[Line]) -> bool:
    return any(y < 0 for line in series for y in line.y)


def _inline(svg: str, alt_text: str) -> Markup:
    """Return an SVG file as an element of a page.

    It has no header and no size of its own, and ids that no other figure has.
    """
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :].replace("xlink:href", "href").strip()
    body = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{next(FIGURE_NUMBERS)}-", body)
    body = re.sub(r"#0[0-9a-f]{5}\b", lambda match: VARIABLES.get(match[0], match[0]), body)
    return SVG.format(view_box[1] if view_box else "", alt_text, Markup(body))

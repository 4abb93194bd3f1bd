"""The papers' curves, with a mark for each measured draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.bench import curves, theory
from outpace.bench.curves import Point
from outpace.checks.errors import format_small
from outpace.report.figures import panel
from outpace.report.section import CaptionedFigure, Section, Table
from outpace.report.words import LEVEL_TOLERANCE, format_value

Panel = Callable[[Any, Sequence[Point], float], None]

TITLE = "What the formulas say"
LEAD = (
    "The papers' curves over α, with a filled mark for each draft at its measured α and c, and at the g that "
    "is best by the formulas, up to 32. The formulas assume that a pass over g + 1 tokens costs as much as "
    "one over a single token, and that a draft always has a draft token. Hollow marks are what `outpace "
    "bench alpha` predicts from the times it measured, without these two assumptions."
)
PANELS: tuple[tuple[Panel, str], ...] = (
    (
        curves.tokens,
        "Expected tokens per pass, (1 − α^(g+1))/(1 − α), for several g (Leviathan et al. 2023, Figure 2).",
    ),
    (
        curves.lengths,
        "The g that is fastest, for several c, those measured among them (Figure 3).",
    ),
    (
        curves.speed,
        "Speed relative to decoding without speculation, at the c of {} (Theorem 3.8, Figure 4): above 1 it "
        "pays.",
    ),
    (
        curves.operations,
        "Operations relative to decoding without speculation, with c for ĉ, too (Theorem 3.11, Figure 4).",
    ),
)


@dataclass(frozen=True)
class DraftMark:
    """A draft in the formulas, and in a prediction from measured times.

    Attributes:
        point: The draft's α and c, and the best g by the formulas.
        best_g: The best g by the measured times.
        predicted: The predicted speed at ``best_g``.
    """

    point: Point
    best_g: int | None
    predicted: float | None


def section(drafts: Sequence[DraftMark], passes: Mapping[float, float]) -> Section:
    """Return the curves of Leviathan et al. 2023, figures 2 to 4.

    The curves have the c of the draft that is fastest by the formulas.

    Args:
        drafts: The measured drafts.
        passes: Milliseconds of a forward pass, by its number of tokens.
    """
    if not drafts:
        return Section(TITLE)
    points = [draft.point for draft in drafts]
    best = max(points, key=lambda point: float(theory.speedup(point.alpha, point.g, point.c)))
    positions = "; ".join(
        f"{point.name}: α = {point.alpha:.3f}, c = {format_small(point.c)}, best g = {point.g}"
        for point in points
    )
    hollow: dict[Panel, list[tuple[float, float | None]]] = {
        curves.lengths: [(draft.point.alpha, draft.best_g) for draft in drafts],
        curves.speed: [(draft.point.alpha, draft.predicted) for draft in drafts],
    }

    def figure(plot_curves: Panel, caption: str) -> CaptionedFigure:
        def plot(axis: Any) -> None:
            plot_curves(axis, points, best.c)
            curves.hollow(axis, hollow.get(plot_curves, []))

        return CaptionedFigure(panel(plot, f"{caption} Filled marks: {positions}."), caption)

    figures = [figure(plot_curves, caption.format(best.name)) for plot_curves, caption in PANELS]
    return Section(TITLE, LEAD, figures, [_table(drafts, passes)])


def _table(drafts: Sequence[DraftMark], passes: Mapping[float, float]) -> Table:
    """Return a table with the best g of each draft by the formulas and by the times, and why they differ."""
    heads = ("draft", "α", "c", "best g by the formulas", "thm 3.8", "best g", "predicted")
    rows = [
        (
            *(draft.point.name, f"{draft.point.alpha:.3f}", format_small(draft.point.c), str(draft.point.g)),
            f"{float(theory.speedup(draft.point.alpha, draft.point.g, draft.point.c)):.2f}",
            *(format_value(draft.best_g), format_value(draft.predicted, ".2f")),
        )
        for draft in drafts
    ]
    caption = (
        "Best g and speed by the formulas (thm 3.8), and by the times measured (best g, predicted). "
        f"{describe_cost(passes, 'B = 1')}"
    )
    if any(draft.best_g is not None and draft.best_g != draft.point.g for draft in drafts):
        caption += (
            " They differ because the formulas assume that every pass costs the same, and that a draft "
            "proposes every token."
        )
    return Table(caption.strip(), heads, rows)


def describe_cost(passes: Mapping[float, float], name: str) -> str:
    """Return a sentence on the cost of the longest forward pass relative to one over a single token."""
    longest = max(passes, default=1)
    if longest == 1 or 1 not in passes:
        return ""
    ratio, single = passes[longest] / passes[1], "one over a single token"
    if abs(ratio - 1) <= LEVEL_TOLERANCE:
        return (
            f"{name}: a pass over {longest:g} tokens costs as much as {single}, within {LEVEL_TOLERANCE:.0%}."
        )
    return f"{name}: a pass over {longest:g} tokens takes {ratio:.2f} times as long as {single}."

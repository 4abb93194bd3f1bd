"""The papers' curves, with a mark for each measured draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.bench import curves, theory
from outpace.bench.curves import Point
from outpace.checks.errors import small
from outpace.report.figures import panel
from outpace.report.section import Figure, Section, Table
from outpace.report.words import LEVEL, said

Panel = Callable[[Any, Sequence[Point], float], None]

TITLE = "What the formulas say"
LEAD = (
    "The papers' curves over α, with a filled mark for each draft at its measured α and c, and at the g that "
    "is best by the formulas, up to 32. The formulas assume that a pass over g + 1 tokens costs as much as "
    "one over a single token, and that a draft always has a draft token. Hollow marks are what `outpace "
    "measure` predicts from the times it measured, without these two assumptions."
)
PANELS: tuple[tuple[Panel, str], ...] = (
    (
        curves.tokens,
        "Tokens that a pass brings, (1 − α^(g+1))/(1 − α), for several g (Leviathan et al. 2023, Figure 2).",
    ),
    (
        curves.lengths,
        "The g that is fastest, for several c, those measured among them (Figure 3).",
    ),
    (
        curves.speed,
        "Speed over plain decoding, at the c of {} (Theorem 3.8, Figure 4): above 1 it pays.",
    ),
    (
        curves.operations,
        "Arithmetic over that of plain decoding, with c for ĉ, too (Theorem 3.11, Figure 4).",
    ),
)


@dataclass(frozen=True)
class Draft:
    """A draft in the formulas, and in a prediction from measured times.

    Attributes:
        point: The draft's α and c, and the best g by the formulas.
        best_g: The best g by the times measured.
        predicted: The speed at ``best_g``.
    """

    point: Point
    best_g: int | None
    predicted: float | None


def section(drafts: Sequence[Draft], passes: Mapping[float, float]) -> Section:
    """Return the curves of Leviathan et al. 2023, figures 2 to 4.

    The curves have the c of the draft that is fastest by the formulas.

    Args:
        drafts: The measured drafts.
        passes: Milliseconds of a forward pass, by its number of tokens.
    """
    if not drafts:
        return Section(TITLE)
    points = [one.point for one in drafts]
    best = max(points, key=lambda one: float(theory.speedup(one.alpha, one.g, one.c)))
    where = "; ".join(
        f"{one.name}: α = {one.alpha:.3f}, c = {small(one.c)}, best g = {one.g}" for one in points
    )
    hollow: dict[Panel, list[tuple[float, float | None]]] = {
        curves.lengths: [(one.point.alpha, one.best_g) for one in drafts],
        curves.speed: [(one.point.alpha, one.predicted) for one in drafts],
    }

    def drawn(draw: Panel, words: str) -> Figure:
        def both(axis: Any) -> None:
            draw(axis, points, best.c)
            curves.hollow(axis, hollow.get(draw, []))

        return Figure(panel(both, f"{words} Filled marks: {where}."), words)

    figures = [drawn(draw, words.format(best.name)) for draw, words in PANELS]
    return Section(TITLE, LEAD, figures, [_table(drafts, passes)])


def _table(drafts: Sequence[Draft], passes: Mapping[float, float]) -> Table:
    """Return a table with the best g of each draft by the formulas and by the times, and why they differ."""
    heads = ("draft", "α", "c", "best g by the formulas", "thm 3.8", "best g", "predicted")
    rows = [
        (
            *(one.point.name, f"{one.point.alpha:.3f}", small(one.point.c), str(one.point.g)),
            f"{float(theory.speedup(one.point.alpha, one.point.g, one.point.c)):.2f}",
            *(said(one.best_g), said(one.predicted, ".2f")),
        )
        for one in drafts
    ]
    words = (
        "Best g and speed by the formulas (thm 3.8), and by the times measured (best g, predicted). "
        f"{dearer(passes, 'B = 1')}"
    )
    if any(one.best_g is not None and one.best_g != one.point.g for one in drafts):
        words += (
            " They differ as the formulas take every pass to cost the same, and a draft to miss no token."
        )
    return Table(words.strip(), heads, rows)


def dearer(passes: Mapping[float, float], name: str) -> str:
    """Return a sentence on the cost of the longest forward pass relative to one over a single token."""
    longest = max(passes, default=1)
    if longest == 1 or 1 not in passes:
        return ""
    times, one = passes[longest] / passes[1], "one over a single token"
    if abs(times - 1) <= LEVEL:
        return f"{name}: a pass over {longest:g} tokens costs as much as {one}, within {LEVEL:.0%}."
    return f"{name}: a pass over {longest:g} tokens takes {times:.2f} times as long as {one}."

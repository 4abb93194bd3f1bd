"""The papers' curves, with a dot for each draft that was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outpace import theory
from outpace.bench import curves
from outpace.bench.curves import Point
from outpace.report.figures import panel
from outpace.report.section import Figure, Section

Panel = Callable[[Any, Sequence[Point], float], None]

TITLE = "What the formulas say"
LEAD = (
    "The papers' curves over α, with a dot for each draft at its own α, c and best g, up to 32. They take a "
    "pass over g + 1 tokens to cost as much as one over a single token, and a draft to always have a guess; "
    "the table above does neither."
)
PANELS: tuple[tuple[Panel, str], ...] = (
    (
        curves.tokens,
        "Tokens that a pass brings, (1 − α^(g+1))/(1 − α), for several g (Leviathan et al. 2023, Figure 2).",
    ),
    (
        curves.lengths,
        "The g that is fastest, for several c: it grows with α, and with how cheap a draft is (Figure 3).",
    ),
    (
        curves.speed,
        "How many times as fast as plain decoding, at the c of {} (Theorem 3.8, Figure 4): above 1 it pays.",
    ),
    (
        curves.operations,
        "How many times the arithmetic, with c for ĉ, too (Theorem 3.11, Figure 4): the price of speed.",
    ),
)


def section(points: Sequence[Point]) -> Section:
    """Leviathan et al. 2023, figures 2 to 4; curves have the c of the draft that is fastest by them."""
    if not points:
        return Section(TITLE)
    best = max(points, key=lambda one: float(theory.speedup(one.alpha, one.g, one.c)))
    where = "; ".join(f"{one.name}: α = {one.alpha:.3f}, c = {one.c:.3f}, best g = {one.g}" for one in points)

    def drawn(draw: Panel, words: str) -> Figure:
        return Figure(panel(lambda axis: draw(axis, points, best.c), f"{words} Dots: {where}."), words)

    figures = [drawn(draw, words.format(best.name)) for draw, words in PANELS]
    return Section(TITLE, LEAD, figures)

"""Plots of the figures of ``outpace bench engine``; needs ``pip install 'outpace[plot]'``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outpace.bench.curves import backend
from outpace.bench.engine import CONTEXTS, Throughput

ALPHA = 0.8

COLOURS = {
    "transformers": "#b8b8b8",
    "transformers static": "#8a8a8a",
    "transformers assisted": "#d9a27c",
    "outpace baseline": "#7ba6d0",
    "outpace": "#1f5fa8",
}


def save_plot(figures: Sequence[Throughput], path: Path) -> None:
    """Plot throughput at one acceptance rate by pair, over g and over B.

    Views without figures stay empty. The file's suffix determines the format.
    """
    pyplot = backend()
    found, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    first = figures[0].name
    some = [one for one in figures if one.context == CONTEXTS[0] and one.alpha in (0.0, ALPHA)]
    own = [one for one in some if one.name == first]
    _pairs(axes[0], [one for one in some if one.B == 1])
    _over(axes[1], [one for one in own if one.B == 1 and one.g], lambda one: one.g)
    for one in own:
        if one.B == 1 and not one.g:
            axes[1].axhline(one.tokens_per_second, color=COLOURS[one.method], ls="--", lw=1, label=one.method)
    axes[1].set(title=f"{first}, B = 1, α = {ALPHA}", xlabel="draft tokens per step, g", ylim=(0, None))
    _over(axes[2], own, lambda one: one.B)
    axes[2].set(xscale="log", yscale="log", title=f"{first}, α = {ALPHA}, best g", xlabel="sequences, B")
    axes[2].set_xticks(rows := sorted({one.B for one in own}), rows)
    axes[2].minorticks_off()
    for axis in axes:
        axis.set_ylabel("tokens per second")
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=7)
    found.savefig(path)
    pyplot.close(found)


def _pairs(axis: Any, figures: Sequence[Throughput]) -> None:
    """Plot the best of each method for every pair, as bars."""
    names = list(dict.fromkeys(one.name for one in figures))
    for i, (method, colour) in enumerate(COLOURS.items()):
        best = [
            max(
                (one.tokens_per_second for one in figures if (one.method, one.name) == (method, name)),
                default=0,
            )
            for name in names
        ]
        axis.bar([j + 0.16 * (i - 2) for j in range(len(names))], best, 0.15, label=method, color=colour)
    axis.set_xticks(range(len(names)), names, fontsize=6.5)
    axis.margins(y=0.35)  # for the legend
    axis.set_title(f"B = 1, α = {ALPHA}, best g")


def _over(axis: Any, figures: Sequence[Throughput], x: Callable[[Throughput], int]) -> None:
    """Plot the best of each method over x, and the prediction of theory."""
    for method, colour in COLOURS.items():
        mine = sorted((one for one in figures if one.method == method), key=lambda one: one.tokens_per_second)
        best = {x(one): one for one in mine}  # the fastest comes last and replaces the others
        at = sorted(best)
        if at:
            axis.plot(at, [best[i].tokens_per_second for i in at], "o-", ms=4, color=colour, label=method)
        predicted_at = [i for i in at if best[i].predicted is not None]
        if predicted_at:
            axis.plot(
                predicted_at,
                [best[i].predicted for i in predicted_at],
                "k:",
                lw=1,
                label="predicted, Theorem 3.8",
            )

"""A sweep on a screen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from outpace.bench.forecast import SPAN, Figure
from outpace.bench.loops import kind_of, name_of
from outpace.bench.runs import PLAIN
from outpace.cli.show import screen
from outpace.wording import counted

Said = Callable[[Figure], str]


def show(figures: Sequence[Figure]) -> None:
    """Two tables for each draft and sampling, on stdout: times, as in Chen et al. 2023, Figure 1, and speeds
    beside forecasts, as in Leviathan et al. 2023, Table 4."""
    from rich.table import Table

    console = screen(sys.stdout)
    for kind in dict.fromkeys(map(kind_of, figures)):
        mine, name = [one for one in figures if kind_of(one) == kind], name_of(kind)
        titles = (
            f"{name}: ms of {SPAN} tokens, {counted(mine[0].texts, 'text')}",
            f"{name}: speed over plain decoding",
        )
        for title, columns in zip(titles, (TIMES, SPEEDS), strict=True):
            table = Table(title=title)
            for heading in columns:
                table.add_column(heading, justify="right", no_wrap=True)
            for one in mine:
                table.add_row(*(said(one) for said in columns.values()))
            console.print(table)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _interval(one: Figure) -> str:
    return "–" if one.interval is None or one.length == PLAIN else "{:.2f}–{:.2f}".format(*one.interval)


def _error(one: Figure) -> str:
    if one.predicted is None:
        return "–"
    off = round(one.predicted / one.speedup - 1, 2) + 0.0  # no minus before a zero
    return f"{off:+.0%}"


TIMES: dict[str, Said] = {
    "g": lambda one: one.length,
    "mean": lambda one: _ms(one.mean_ms),
    "±": lambda one: _ms(one.deviation_ms),
    "P50": lambda one: _ms(one.p50_ms),
    "P90": lambda one: _ms(one.p90_ms),
    "P99": lambda one: _ms(one.p99_ms),
    "loop": lambda one: f"{one.loop_ms:.2f}",
    "a pass": lambda one: _two(one.tokens_per_call),
    "kept": lambda one: _two(one.acceptance),
}
SPEEDS: dict[str, Said] = {
    "g": lambda one: one.length,
    "α": lambda one: _two(one.alpha),
    "c": lambda one: "–" if one.predicted_simple is None or one.c is None else f"{one.c:.3f}",
    "measured": lambda one: _two(one.speedup),
    "95 %": _interval,
    "predicted": lambda one: _two(one.predicted),
    "error": _error,
    "thm 3.8": lambda one: _two(one.predicted_simple),
}

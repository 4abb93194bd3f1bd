"""Sections of a page for the results of ``outpace bench sweep``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from outpace.report.columns import SWEEP_SPEEDS, SWEEP_TIMES, Columns, value
from outpace.report.figures import Line, lines
from outpace.report.section import Content, Figure, Section, Speed, Table, Way
from outpace.report.source import source
from outpace.report.words import course, said, sampled, short

Row = dict[str, Any]
Value = Callable[[Row], float | None]
SAMPLING = ("temperature", "top_k", "top_p")

DRAFT: Columns = {"draft": value("draft")}
SPEEDS: Columns = {**DRAFT, **SWEEP_SPEEDS}
TIMES: Columns = {
    **DRAFT,
    **SWEEP_TIMES,
    "tokens/s": value("tokens_per_second", ".1f"),
    "texts": value("texts"),
    "tokens": value("tokens"),
}


def sections(content: Content) -> list[Section]:
    """Return a section for each sampling."""
    rows: Sequence[Row] = content.get("figures") or ()
    ways: dict[str, list[Row]] = {}
    for row in rows:
        ways.setdefault(way(row), []).append(row)
    return [_section(content, name, some) for name, some in ways.items()]


def way(row: Row) -> str:
    """Return the sampling of a row, in words."""
    return sampled({name: row.get(name) for name in SAMPLING})


def best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row with speculation; None if there is none."""
    there = [row for row in rows if row.get("length") != "0" and row.get("speedup") is not None]
    return max(there, key=lambda row: float(row["speedup"]), default=None)


def speeds(rows: Sequence[Row]) -> dict[Way, Speed]:
    """Return the measured speed of each draft and g."""
    return {
        (row["draft"], str(row["length"])): Speed("speedup", row["speedup"], row.get("interval"))
        for row in rows
        if row.get("length") != "0" and row.get("speedup") is not None
    }


def _section(content: Content, name: str, rows: Sequence[Row]) -> Section:
    fastest = best(rows)
    chosen = None if fastest is None else list(rows).index(fastest)
    tables = [
        Table(words, list(columns), [[cell(row) for cell in columns.values()] for row in rows], chosen=chosen)
        for columns, words in (
            (
                SPEEDS,
                "speedup is over plain decoding of the same prompts, with a 95\u00a0% interval. predicted "
                "follows from acceptance and the times of passes, draft steps and verification; error says "
                "by how much it is off. thm 3.8 follows from α and c alone. α counted is the share of draft "
                "tokens accepted, of those that were verified. c is the time of a draft step over that of a "
                "plain iteration. The fastest row is marked.",
            ),
            (
                TIMES,
                "mean, ± (standard deviation) and percentiles are milliseconds of 128 tokens, over texts. "
                "loop ms is the time of an iteration, tokens per pass what it brought, acceptance the share "
                "of draft tokens accepted, of all that were proposed.",
            ),
        )
    ]
    about = source(content, name)
    return Section(
        f"Speed by g, {name}", figures=_figures(rows), tables=tables, source=about, speeds=speeds(rows)
    )


def _figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the plots of Chen et al. 2023, Figure 1, and measured beside predicted speeds."""
    places = _places(rows)
    ticks = _ticks(places)

    def figure(title: str, caption: str, *shown: Line) -> list[Figure]:
        return [Figure(lines(title, "draft tokens an iteration, g", shown, ticks), caption)] if shown else []

    def of(value: Value, spread: Callable[[Row], Sequence[float]] | None = None) -> list[Line]:
        return _lines(rows, places, value, spread)

    times = of(lambda row: row.get("mean_ms"), lambda row: [row.get("deviation_ms") or 0.0] * 2)
    shares, loops = of(_efficiency), of(lambda row: row.get("loop_ms"))
    measured = of(lambda row: row.get("speedup"), _ends)
    return [
        *figure(
            "milliseconds of 128 tokens",
            "Time of 128 tokens, with standard deviations over texts (as in Chen et al. 2023, Figure 1). "
            + _extremes(times, places, min, "lowest"),
            *times,
        ),
        *figure(
            "tokens of a pass, of g + 1",
            "Tokens that a pass brought, divided by the g + 1 that it could bring. "
            + _courses(shares, places),
            *shares,
        ),
        *figure("milliseconds of an iteration", "Time of an iteration. " + _courses(loops, places), *loops),
        *figure(
            "speedup over plain decoding",
            "Speedup over plain decoding, with 95\u00a0% intervals. "
            + _extremes(measured, places, max, "highest")
            + " Dotted: as predicted from acceptance and the times of an iteration's parts.",
            *measured,
            *_lines(rows, places, lambda row: row.get("predicted"), None, predicted=True),
        ),
    ]


def _extremes(shown: Sequence[Line], places: dict[str, float], pick: Callable[..., float], word: str) -> str:
    """Return where each line is lowest, or highest."""
    names = {at: name for name, at in places.items()}
    found = []
    for one in shown:
        there = [(x, y) for x, y in zip(one.x, one.y, strict=True) if not math.isnan(y)]
        x, _ = next(point for point in there if point[1] == pick(y for _, y in there))
        found.append(f"{one.name} is {word} at g = {names[x]}")
    return "; ".join(found) + "."


def _courses(shown: Sequence[Line], places: dict[str, float]) -> str:
    """Return how each line goes over fixed g, from its first point to its last."""
    fixed = {at: name for name, at in places.items() if name.isdecimal()}
    found = []
    for one in shown:
        there = [(x, y) for x, y in zip(one.x, one.y, strict=True) if x in fixed and not math.isnan(y)]
        if len(there) > 1:
            (first, low), (last, high) = there[0], there[-1]
            found.append(
                f"{one.name} {course([y for _, y in there])}: {said(low)} at g = {fixed[first]}, "
                f"{said(high)} at g = {fixed[last]}"
            )
    return "; ".join(found) + "." * bool(found)


def _places(rows: Sequence[Row]) -> dict[str, float]:
    """Return the horizontal position of each g: numbers at their value, policies to the right of them."""
    names = list(dict.fromkeys(str(row.get("length")) for row in rows))
    numbers = {name: float(name) for name in names if name.isdecimal()}
    last = max(numbers.values(), default=0.0)
    others = [name for name in names if name not in numbers]
    return numbers | {name: last + max(1.0, 0.3 * last) * i for i, name in enumerate(others, 1)}


def _ticks(places: dict[str, float]) -> dict[float, str]:
    """Return the labels of the x axis, without those that would overlap."""
    apart = max(places.values(), default=0.0) / 14
    found: dict[float, str] = {}
    for at, name in sorted((at, name) for name, at in places.items()):
        if not found or at - max(found) >= apart:
            found[at] = name
    return found


def _lines(
    rows: Sequence[Row],
    places: dict[str, float],
    value: Value,
    spread: Callable[[Row], Sequence[float]] | None,
    predicted: bool = False,
) -> list[Line]:
    """Return a line for each draft over numbers, and a point for each policy."""
    found = []
    for i, draft in enumerate(dict.fromkeys(row.get("draft") for row in rows)):
        mine = [(places[str(row.get("length"))], row) for row in rows if row.get("draft") == draft]
        x, y, ends = list[float](), list[float](), list[Sequence[float]]()
        for at, row in sorted(mine, key=lambda one: one[0]):
            known = value(row)
            if known is None:
                continue
            if not str(row.get("length")).isdecimal():
                x, y, ends = [*x, at], [*y, math.nan], [*ends, (0.0, 0.0)]  # no line leads there
            x, y, ends = [*x, at], [*y, known], [*ends, spread(row) if spread else ()]
        if x:
            found.append(Line(short(draft), x, y, i, ends if spread else None, predicted))
    return found


def _efficiency(row: Row) -> float | None:
    g, brought = str(row.get("length")), row.get("tokens_per_pass")
    return brought / (int(g) + 1) if g.isdecimal() and brought is not None else None


def _ends(row: Row) -> Sequence[float]:
    low, high = row.get("interval") or [row["speedup"]] * 2
    return row["speedup"] - low, high - row["speedup"]

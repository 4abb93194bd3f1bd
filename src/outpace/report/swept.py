"""Sections of a page for the results of ``outpace bench sweep``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outpace.report.columns import SWEEP_SPEEDS, SWEEP_TIMES, Columns, ResultRow, value
from outpace.report.figures import Line, lines
from outpace.report.section import CaptionedFigure, Content, DraftConfig, Section, Speed, Table
from outpace.report.source import source
from outpace.report.words import describe_sampling, describe_trend, format_value, short_name

Value = Callable[[ResultRow], float | None]
ErrorBar = Callable[[ResultRow], Sequence[float]]  # lengths below and above the value
SAMPLING = ("temperature", "top_k", "top_p")

DRAFT: Columns = {"draft": value("draft")}
SPEEDS: Columns = {**DRAFT, **SWEEP_SPEEDS}
TIMES: Columns = {
    **DRAFT,
    **SWEEP_TIMES,
    "tokens/s": value("tokens_per_second", ".1f"),
    "texts": value("texts"),
    "tokens": value("new_tokens"),
}


def sections(content: Content) -> list[Section]:
    """Return a section for each combination of sampling parameters."""
    rows: Sequence[ResultRow] = content.get("figures") or ()
    by_sampling: dict[str, list[ResultRow]] = {}
    for row in rows:
        by_sampling.setdefault(row_sampling(row), []).append(row)
    return [_section(content, sampling, same_sampling) for sampling, same_sampling in by_sampling.items()]


def row_sampling(row: ResultRow) -> str:
    """Return the sampling parameters of a row, in words."""
    return describe_sampling({name: row.get(name) for name in SAMPLING})


def best(rows: Sequence[ResultRow]) -> ResultRow | None:
    """Return the fastest row with speculation; None if there is none."""
    speculative = [
        row for row in rows if row.get("num_draft_tokens") != "0" and row.get("speedup") is not None
    ]
    return max(speculative, key=lambda row: float(row["speedup"]), default=None)


def speeds(rows: Sequence[ResultRow]) -> dict[DraftConfig, Speed]:
    """Return the measured speed of each draft and g."""
    return {
        (row["draft"], str(row["num_draft_tokens"])): Speed("speedup", row["speedup"], row.get("interval"))
        for row in rows
        if row.get("num_draft_tokens") != "0" and row.get("speedup") is not None
    }


def _section(content: Content, sampling: str, rows: Sequence[ResultRow]) -> Section:
    fastest = best(rows)
    chosen = None if fastest is None else list(rows).index(fastest)
    tables = [
        Table(
            caption, list(columns), [[cell(row) for cell in columns.values()] for row in rows], chosen=chosen
        )
        for columns, caption in (
            (
                SPEEDS,
                "speedup is relative to decoding the same prompts without speculation, with a 95\u00a0% "
                "interval. predicted follows from acceptance and the times of passes, draft steps and "
                "verification. error is its relative error. thm 3.8 follows from α and c alone. α counted is "
                "the share of draft tokens accepted, of those that were verified. c is the time of a draft "
                "step relative to an iteration without speculation. The fastest row is marked.",
            ),
            (
                TIMES,
                "mean, ± (standard deviation) and percentiles are milliseconds of 128 tokens, over texts. "
                "loop ms is the time of an iteration. tokens per pass is its number of tokens. acceptance is "
                "the share of draft tokens accepted, of all that were proposed.",
            ),
        )
    ]
    return Section(
        f"Speed by g, {sampling}",
        figures=_figures(rows),
        tables=tables,
        source=source(content, sampling),
        speeds=speeds(rows),
    )


def _figures(rows: Sequence[ResultRow]) -> list[CaptionedFigure]:
    """Return the plots of Chen et al. 2023, Figure 1, and measured beside predicted speeds."""
    positions = _positions(rows)
    ticks = _ticks(positions)

    def figure(title: str, caption: str, *series: Line) -> list[CaptionedFigure]:
        if not series:
            return []
        return [CaptionedFigure(lines(title, "draft tokens per iteration, g", series, ticks), caption)]

    def series_of(value: Value, error_bar: ErrorBar | None = None) -> list[Line]:
        return _lines(rows, positions, value, error_bar)

    times = series_of(lambda row: row.get("mean_ms"), lambda row: [row.get("deviation_ms") or 0.0] * 2)
    efficiencies, loops = series_of(_efficiency), series_of(lambda row: row.get("loop_ms"))
    speedups = series_of(lambda row: row.get("speedup"), _speedup_error_bar)
    return [
        *figure(
            "milliseconds of 128 tokens",
            "Time of 128 tokens, with standard deviations over texts (as in Chen et al. 2023, Figure 1). "
            + _extremes(times, positions, min, "lowest"),
            *times,
        ),
        *figure(
            "tokens per pass, of g + 1",
            "Tokens per pass, divided by the largest possible number, g + 1. "
            + _trends(efficiencies, positions),
            *efficiencies,
        ),
        *figure("milliseconds of an iteration", "Time of an iteration. " + _trends(loops, positions), *loops),
        *figure(
            "speedup",
            "Speedup relative to decoding without speculation, with 95\u00a0% intervals. "
            + _extremes(speedups, positions, max, "highest")
            + " Dotted: as predicted from acceptance and the times of an iteration's parts.",
            *speedups,
            *_lines(rows, positions, lambda row: row.get("predicted"), None, predicted=True),
        ),
    ]


def _extremes(
    series: Sequence[Line], positions: dict[str, float], pick: Callable[..., float], word: str
) -> str:
    """Return where each line is lowest, or highest."""
    names = {position: name for name, position in positions.items()}
    clauses = []
    for line in series:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if not math.isnan(y)]
        x, _ = next(point for point in points if point[1] == pick(y for _, y in points))
        clauses.append(f"{line.name} is {word} at g = {names[x]}")
    return "; ".join(clauses) + "."


def _trends(series: Sequence[Line], positions: dict[str, float]) -> str:
    """Return how each line goes over fixed g, from its first point to its last."""
    fixed = {position: name for name, position in positions.items() if name.isdecimal()}
    clauses = []
    for line in series:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if x in fixed and not math.isnan(y)]
        if len(points) > 1:
            (first, first_value), (last, last_value) = points[0], points[-1]
            clauses.append(
                f"{line.name} {describe_trend([y for _, y in points])}: {format_value(first_value)} at g = "
                f"{fixed[first]}, {format_value(last_value)} at g = {fixed[last]}"
            )
    return "; ".join(clauses) + "." * bool(clauses)


def _positions(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Return the horizontal position of each g: numbers at their value, policies to the right of them."""
    names = list(dict.fromkeys(str(row.get("num_draft_tokens")) for row in rows))
    numbers = {name: float(name) for name in names if name.isdecimal()}
    last = max(numbers.values(), default=0.0)
    policies = [name for name in names if name not in numbers]
    return numbers | {name: last + max(1.0, 0.3 * last) * i for i, name in enumerate(policies, 1)}


def _ticks(positions: dict[str, float]) -> dict[float, str]:
    """Return the labels of the x axis, without those that would overlap."""
    min_distance = max(positions.values(), default=0.0) / 14
    ticks: dict[float, str] = {}
    for position, name in sorted((position, name) for name, position in positions.items()):
        if not ticks or position - max(ticks) >= min_distance:
            ticks[position] = name
    return ticks


def _lines(
    rows: Sequence[ResultRow],
    positions: dict[str, float],
    value: Value,
    error_bar: ErrorBar | None,
    predicted: bool = False,
) -> list[Line]:
    """Return a line for each draft over numbers, and a point for each policy."""
    series = []
    for i, draft in enumerate(dict.fromkeys(row.get("draft") for row in rows)):
        points = [
            (positions[str(row.get("num_draft_tokens"))], row) for row in rows if row.get("draft") == draft
        ]
        x, y, error_bars = list[float](), list[float](), list[Sequence[float]]()
        for position, row in sorted(points, key=lambda point: point[0]):
            known = value(row)
            if known is None:
                continue
            if not str(row.get("num_draft_tokens")).isdecimal():  # NaN: no line leads to a policy
                x, y, error_bars = [*x, position], [*y, math.nan], [*error_bars, (0.0, 0.0)]
            x, y = [*x, position], [*y, known]
            error_bars = [*error_bars, error_bar(row) if error_bar else ()]
        if x:
            series.append(Line(short_name(draft), x, y, i, error_bars if error_bar else None, predicted))
    return series


def _efficiency(row: ResultRow) -> float | None:
    g, tokens_per_pass = str(row.get("num_draft_tokens")), row.get("tokens_per_pass")
    return tokens_per_pass / (int(g) + 1) if g.isdecimal() and tokens_per_pass is not None else None


def _speedup_error_bar(row: ResultRow) -> Sequence[float]:
    low, high = row.get("interval") or [row["speedup"]] * 2
    return row["speedup"] - low, high - row["speedup"]

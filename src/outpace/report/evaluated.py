"""Sections of a page for the journal that ``outpace eval`` wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.bench.data import Item
from outpace.bench.estimate import estimate
from outpace.bench.spread import faster
from outpace.report.figures import Line, lines
from outpace.report.section import Content, Figure, Section, Speed, Table, Text, Way
from outpace.report.source import models, source
from outpace.report.words import with_interval
from outpace.tasks import table as tables
from outpace.tasks.kinds import no_measure, task_of
from outpace.tasks.score import pass_at

Interval = tuple[float, float]
PLAIN, EXACT, OVER = "plain", "exact", "over plain"
WER, LOG = "WER %", "log-probability"  # measures that are not shares of 100
SIDES = {
    "plain": "plain is the target without a draft",
    "baseline": "baseline is Transformers' assisted generation",
    "exact": "exact is speculative decoding that keeps the target's distribution",
    "sigmoid": "sigmoid is an approximation that does not",
}
SHOWN, LONGEST = 2, 500  # rows whose texts are shown, and characters of each


def sections(content: Content) -> list[Section]:
    """Return quality and speed of each runner, by category where the task has categories, and texts."""
    sides, records = content["sides"], content["records"]
    if not records:
        return []
    found = columns(content)
    cells = tables.table(found)
    beside, more = _beside(content)
    known = {name for name, _ in cells}
    cells = [line for line in beside if line[0] not in known] + cells
    measures = [name for name in intervals(found[0]) if name in known]
    rows = [[name, *_with_intervals(found, name, line)] for name, line in cells]
    if content["settings"].get("temperature") == 0 and PLAIN in sides:
        rows.append(["same text as plain", *(_same(found, one) for one in found)])
    words = (
        "Ways of decoding: " + "; ".join(SIDES[one] for one in sides if one in SIDES) + ". Quality and speed "
        "over plain have 95\u00a0% intervals over rows. Rows that failed in one way are left out in all."
    )
    by_category = (
        "By category, with the number of rows: tokens per pass, and speed over plain. As in Spec-Bench, the "
        "latter is of the mean of rows' speeds; above, it is of all tokens over all seconds."
    )
    further = [
        Table(by_category, ("category", *sides), [[name, *cells] for name, cells in one]) for one in more
    ]
    return [
        Section(
            f"Quality and speed: {content['task']}",
            _lead(content),
            [*_quality(found, measures), *_speed(found)],
            [Table(words, ("measure", *sides), rows), *further],
            _texts(content),
            source=source(content),
            speeds=speeds(content),
        )
    ]


def columns(content: Content) -> list[tables.Column]:
    """Return the results of each runner, for rows that all of them have reached.

    The journal has no references, so measures that need them are not computed.
    """
    task = task_of(content["task"])
    if content["task"] == "translate":
        task = replace(task, overall=no_measure)
    every = content["records"]
    rows = {row for _, row in every if all((side, row) in every for side in content["sides"])}
    records = {(side, row): record for (side, row), record in every.items() if row in rows}
    names = {row: str(record.get("id", row)) for (_, row), record in records.items()}
    items = [Item(names.get(row, "")) for row in range(1 + max(rows, default=-1))]
    return tables.columns(task, items, records, content["sides"])


def speeds(content: Content) -> dict[Way, Speed]:
    """Return the speed of exact speculative decoding."""
    found = columns(content)
    common = _common(found)
    exact = next((one for one in common if one.side == EXACT and one.records), None)
    over = None if exact is None else _over(exact, common)
    return {} if over is None else {(content["draft"], length(content)): Speed(OVER, *over)}


def length(content: Content) -> str:
    """Return g, or the name of the policy, from the decoder's own description."""
    said = next((line.split(maxsplit=1)[1] for line in models(content) if line.startswith("length ")), "")
    if fixed := re.fullmatch(r"Fixed\((\d+)\)", said):
        return fixed[1]
    return "heuristic" if said.startswith("Heuristic") else "auto"


def intervals(one: tables.Column) -> dict[str, Interval | None]:
    """Return the 95 % interval of each measure of quality over rows; None for a single row."""
    found: dict[str, Interval | None] = {}
    for name in one.quality if one.records else ():
        percent = 1.0 if name == LOG else 100.0
        rows = [_measure(name, record) for record in one.records]
        known = estimate([np.full(weight, value / percent) for value, weight in rows])
        found[name] = None
        if known is not None and known.half is not None:
            low, high = known.mean - known.half, known.mean + known.half
            if name == LOG:
                high = min(0.0, high)
            else:
                low, high = max(0.0, low), high if name == WER else min(1.0, high)
            found[name] = percent * low, percent * high
    return found


def _measure(name: str, record: dict[str, Any]) -> tuple[float, int]:
    """Return a row's value of a measure of quality, and its weight."""
    judged = record["judged"]
    if name == WER:
        words = int(sum(one["words"] for one in judged))
        return 100 * sum(one["errors"] for one in judged) / words, words
    if name == LOG:
        return record["log_probability"] / record["likely_tokens"], record["likely_tokens"]
    if at := re.fullmatch(r"pass@(\d+) %", name):
        return 100 * pass_at(int(at[1]), len(judged), sum(one["passed"] for one in judged)), 1
    return sum(one[name] for one in judged) / len(judged), 1


def _common(found: Sequence[tables.Column]) -> list[tables.Column]:
    """Return the columns without rows that failed with any runner, as the table has them."""
    failed = tables.lost(found)
    return [one.only(one.done.keys() - failed) for one in found]


def _over(one: tables.Column, common: Iterable[tables.Column]) -> tuple[float, Interval | None] | None:
    """Return the speed relative to decoding the same rows without speculation, and its interval."""
    plain = next((other for other in common if other.side == PLAIN), None)
    if plain is None or not one.records or one.side == PLAIN:
        return None

    def rates(column: tables.Column) -> list[tuple[float, float]]:
        return [(record["stats"]["new_tokens"], record["seconds"]) for record in column.records]

    return faster(rates(one), rates(plain))


def _with_intervals(found: Sequence[tables.Column], name: str, line: Sequence[str]) -> list[str]:
    """Return the cells of a line, with intervals if it is one of quality or speed."""
    common, cells = _common(found), []
    for one, cell in zip(common, line, strict=True):
        if name == OVER and (known := _over(one, common)):
            cell = with_interval(*known, ".2f")
        elif one.records and name in (between := intervals(one)):
            cell = with_interval(one.quality[name], between[name], ".2f")
        cells.append(cell)
    return cells


def _same(found: Sequence[tables.Column], one: tables.Column) -> str:
    """Return how many rows have the text that decoding without speculation wrote."""
    common = {other.side: other.records for other in _common(found)}
    if one.side == PLAIN or not common[one.side]:
        return "–"
    pairs = zip(common[one.side], common[PLAIN], strict=True)
    return f"{sum(mine['texts'] == plain['texts'] for mine, plain in pairs)} of {len(common[PLAIN])}"


def _lead(content: Content) -> str:
    settings = content["settings"]
    samples = settings.get("samples") or 1
    parts = [f"Draft: {content['draft']}, g = {length(content)}"]
    parts += [f"{samples} samples of each row"] if samples > 1 else []
    parts += [f"seed {settings['seed']}"] if settings.get("seed") is not None else []
    return ", ".join(parts) + "."


def _points(values: Sequence[tuple[float, Interval | None] | None]) -> Line:
    """Return points without a line between them."""
    x, y, ends = list[float](), list[float](), list[Sequence[float]]()
    for i, known in enumerate(values):
        if known is not None:
            low, high = known[1] or (known[0], known[0])
            x, y = [*x, i, i], [*y, known[0], math.nan]
            ends = [*ends, (known[0] - low, high - known[0]), (0.0, 0.0)]
    return Line("95 % interval over rows", x, y, 0, ends)


def _figure(title: str, words: str, sides: Sequence[str], line: Line) -> list[Figure]:
    if not line.x:
        return []
    ticks = {float(i): side for i, side in enumerate(sides)}
    return [Figure(lines(title, "way of decoding", [line], ticks), words)]


def _quality(found: Sequence[tables.Column], measures: Sequence[str]) -> list[Figure]:
    common, figures = _common(found), []
    for name in measures:
        known = [(one.quality[name], intervals(one)[name]) if one.records else None for one in common]
        better = "lower is better" if name == WER else "higher is better"
        words = f"{name} of each way of decoding: {better}."
        figures += _figure(name, words, [one.side for one in common], _points(known))
    return figures


def _speed(found: Sequence[tables.Column]) -> list[Figure]:
    common = _common(found)
    known = [(1.0, None) if one.side == PLAIN else _over(one, common) for one in common]
    words = "Tokens per second over those of plain decoding, on the same rows. plain is 1."
    some = any(one is not None and side.side != PLAIN for one, side in zip(known, common, strict=True))
    return _figure("speed over plain", words, [one.side for one in common], _points(known)) if some else []


def _texts(content: Content) -> list[Text]:
    """Return the first rows' texts; runners that wrote the same are named together."""
    found = []
    for row in sorted({row for _, row in content["records"]})[:SHOWN]:
        wrote: dict[str, list[str]] = {}
        name = str(row)
        for side in content["sides"]:
            record = content["records"].get((side, row), {})
            name = str(record.get("id", name))
            said = record["texts"][0] if record.get("texts") else record.get("error")
            if said is not None:
                wrote.setdefault(said, []).append(side)
        parts = [f"{', '.join(some)}:\n{_cut(text)}" for text, some in wrote.items()]
        if parts:
            found.append(Text(f"Row {name}, as each way of decoding wrote it.", "\n\n".join(parts)))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " …"


def _beside(content: Content) -> tuple[tables.Table, list[tables.Table]]:
    """Return the table that ``outpace eval`` saved beside a complete run, and its further tables.

    Measures that need the data are in that file alone.
    """
    path: Path = content["table"]
    if not content["complete"] or not path.is_file():
        return [], []
    found: list[tables.Table] = []
    for part in path.read_text(encoding="utf-8").split("\n\n"):
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in part.splitlines()]
        if len(rows) > 2 and rows[0][1:] == list(content["sides"]):
            found.append([(row[0], row[1:]) for row in rows[2:]])
    return (found[0], found[1:]) if found else ([], [])

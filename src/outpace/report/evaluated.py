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
from outpace.report.section import CaptionedFigure, Content, DraftConfig, Section, Speed, Table, Text
from outpace.report.source import models, source
from outpace.report.words import with_interval
from outpace.tasks import table as tables
from outpace.tasks.kinds import no_measure, task_of
from outpace.tasks.score import pass_at

Interval = tuple[float, float]
BASELINE, EXACT = "baseline", "exact"  # names of runners
OVER_BASELINE = "over baseline"  # name of the line of `outpace.tasks.table` with relative speeds
WER, LOG = "WER %", "log-probability"  # measures that are not percentages up to 100
RUNNERS = {
    "baseline": "baseline is the target without speculation",
    "assisted": "assisted is Transformers' assisted generation",
    "exact": "exact is speculative decoding that keeps the target's distribution",
    "sigmoid": "sigmoid is an approximation that changes the target's distribution",
}
SHOWN_ROWS = 2  # rows whose texts are shown
MAX_CHARS = 500  # characters of a text that are shown


def sections(content: Content) -> list[Section]:
    """Return quality and speed of each runner, by category where the task has categories, and texts."""
    runners, records = content["runners"], content["records"]
    if not records:
        return []
    results = columns(content)
    cells = tables.table(results)
    saved, saved_categories = _saved_tables(content)
    known = {name for name, _ in cells}
    cells = [line for line in saved if line[0] not in known] + cells
    measures = [name for name in intervals(results[0]) if name in known]
    rows = [[name, *_with_intervals(results, name, line)] for name, line in cells]
    if content["settings"].get("temperature") == 0 and BASELINE in runners:
        rows.append(["same text as baseline", *(_same_texts(results, column) for column in results)])
    caption = (
        "Decoding methods: "
        + "; ".join(RUNNERS[runner] for runner in runners if runner in RUNNERS)
        + ". Quality and speed over baseline have 95\u00a0% intervals over rows. Rows that failed with one "
        "method are left out for all."
    )
    category_caption = (
        "By category, with the number of rows: tokens per pass, and speed over baseline. As in Spec-Bench, "
        "the speed of a category is the mean over its rows. Above, all tokens are divided by all seconds."
    )
    by_category = [
        Table(category_caption, ("category", *runners), [[name, *line] for name, line in table])
        for table in saved_categories
    ]
    return [
        Section(
            f"Quality and speed: {content['task']}",
            _lead(content),
            [*_quality(results, measures), *_speed(results)],
            [Table(caption, ("measure", *runners), rows), *by_category],
            _texts(content),
            source=source(content),
            speeds=speeds(content),
        )
    ]


def columns(content: Content) -> list[tables.RunnerColumn]:
    """Return the results of each runner, for rows that all of them have reached.

    The journal has no references, so measures that need them are not computed.
    """
    task = task_of(content["task"])
    if content["task"] == "translate":
        task = replace(task, overall=no_measure)
    recorded = content["records"]
    rows = {row for _, row in recorded if all((runner, row) in recorded for runner in content["runners"])}
    records = {(runner, row): record for (runner, row), record in recorded.items() if row in rows}
    names = {row: str(record.get("id", row)) for (_, row), record in records.items()}
    items = [Item(names.get(row, "")) for row in range(1 + max(rows, default=-1))]
    return tables.columns(task, items, records, content["runners"])


def speeds(content: Content) -> dict[DraftConfig, Speed]:
    """Return the speed of exact speculative decoding."""
    common = _common(columns(content))
    exact = next((column for column in common if column.runner == EXACT and column.records), None)
    speed = None if exact is None else _speed_over_baseline(exact, common)
    return (
        {} if speed is None else {(content["draft"], num_draft_tokens(content)): Speed(OVER_BASELINE, *speed)}
    )


def num_draft_tokens(content: Content) -> str:
    """Return g, or the name of the policy, from the decoder's own description."""
    names = "num_draft_tokens ", "length "  # the second one is in older files
    described = (line.split(maxsplit=1)[1] for line in models(content) if line.startswith(names))
    policy = next(described, "")
    if fixed := re.fullmatch(r"Fixed\((\d+)\)", policy):
        return fixed[1]
    return "heuristic" if policy.startswith("Heuristic") else "auto"


def intervals(column: tables.RunnerColumn) -> dict[str, Interval | None]:
    """Return the 95 % interval of each measure of quality over rows; None for a single row."""
    found: dict[str, Interval | None] = {}
    for name in column.quality if column.records else ():
        scale = 1.0 if name == LOG else 100.0
        rows = [_row_measure(name, record) for record in column.records]
        mean = estimate([np.full(weight, value / scale) for value, weight in rows])
        found[name] = None
        if mean is not None and mean.half is not None:
            low, high = mean.mean - mean.half, mean.mean + mean.half
            if name == LOG:
                high = min(0.0, high)
            else:
                low, high = max(0.0, low), high if name == WER else min(1.0, high)
            found[name] = scale * low, scale * high
    return found


def _row_measure(name: str, record: dict[str, Any]) -> tuple[float, int]:
    """Return a row's value of a measure of quality, and its weight."""
    judged = record["judged"]
    if name == WER:
        words = int(sum(sample["words"] for sample in judged))
        return 100 * sum(sample["errors"] for sample in judged) / words, words
    if name == LOG:
        return record["log_probability"] / record["likely_tokens"], record["likely_tokens"]
    if pass_k := re.fullmatch(r"pass@(\d+) %", name):
        passed = sum(sample["passed"] for sample in judged)
        return 100 * pass_at(int(pass_k[1]), len(judged), passed), 1
    return sum(sample[name] for sample in judged) / len(judged), 1


def _common(results: Sequence[tables.RunnerColumn]) -> list[tables.RunnerColumn]:
    """Return the columns without rows that failed with any runner, as in the table."""
    failed = tables.unfinished_rows(results)
    return [column.only(column.done.keys() - failed) for column in results]


def _speed_over_baseline(
    column: tables.RunnerColumn, common: Iterable[tables.RunnerColumn]
) -> tuple[float, Interval | None] | None:
    """Return the speed relative to decoding the same rows without speculation, and its interval."""
    baseline = next((other for other in common if other.runner == BASELINE), None)
    if baseline is None or not column.records or column.runner == BASELINE:
        return None

    def tokens_and_seconds(column: tables.RunnerColumn) -> list[tuple[float, float]]:
        return [(record["stats"]["new_tokens"], record["seconds"]) for record in column.records]

    return faster(tokens_and_seconds(column), tokens_and_seconds(baseline))


def _with_intervals(results: Sequence[tables.RunnerColumn], name: str, line: Sequence[str]) -> list[str]:
    """Return the cells of a line, with intervals if it is one of quality or speed."""
    common, cells = _common(results), []
    for column, cell in zip(common, line, strict=True):
        if name == OVER_BASELINE and (speed := _speed_over_baseline(column, common)):
            cell = with_interval(*speed, ".2f")
        elif column.records and name in (quality := intervals(column)):
            cell = with_interval(column.quality[name], quality[name], ".2f")
        cells.append(cell)
    return cells


def _same_texts(results: Sequence[tables.RunnerColumn], column: tables.RunnerColumn) -> str:
    """Return the number of rows with the same text as decoding without speculation."""
    records = {other.runner: other.records for other in _common(results)}
    if column.runner == BASELINE or not records[column.runner]:
        return "–"
    pairs = list(zip(records[column.runner], records[BASELINE], strict=True))
    return f"{sum(record['texts'] == baseline['texts'] for record, baseline in pairs)} of {len(pairs)}"


def _lead(content: Content) -> str:
    settings = content["settings"]
    samples = settings.get("samples") or 1
    parts = [f"Draft: {content['draft']}, g = {num_draft_tokens(content)}"]
    parts += [f"{samples} samples of each row"] if samples > 1 else []
    parts += [f"seed {settings['seed']}"] if settings.get("seed") is not None else []
    return ", ".join(parts) + "."


def _points(values: Sequence[tuple[float, Interval | None] | None]) -> Line:
    """Return points without a line between them."""
    x, y, error_bars = list[float](), list[float](), list[Sequence[float]]()
    for i, known in enumerate(values):
        if known is not None:
            value, interval = known
            low, high = interval or (value, value)
            x, y = [*x, i, i], [*y, value, math.nan]
            error_bars = [*error_bars, (value - low, high - value), (0.0, 0.0)]
    return Line("95 % interval over rows", x, y, 0, error_bars)


def _figure(title: str, caption: str, runners: Sequence[str], line: Line) -> list[CaptionedFigure]:
    if not line.x:
        return []
    ticks = {float(i): runner for i, runner in enumerate(runners)}
    return [CaptionedFigure(lines(title, "decoding method", [line], ticks), caption)]


def _quality(results: Sequence[tables.RunnerColumn], measures: Sequence[str]) -> list[CaptionedFigure]:
    common, figures = _common(results), []
    for name in measures:
        values = [
            (column.quality[name], intervals(column)[name]) if column.records else None for column in common
        ]
        better = "lower is better" if name == WER else "higher is better"
        caption = f"{name} of each decoding method: {better}."
        figures += _figure(name, caption, [column.runner for column in common], _points(values))
    return figures


def _speed(results: Sequence[tables.RunnerColumn]) -> list[CaptionedFigure]:
    common = _common(results)
    values = [
        (1.0, None) if column.runner == BASELINE else _speed_over_baseline(column, common)
        for column in common
    ]
    if not any(
        value is not None and column.runner != BASELINE for value, column in zip(values, common, strict=True)
    ):
        return []
    caption = "Throughput relative to decoding the same rows without speculation. baseline is 1."
    return _figure("speed over baseline", caption, [column.runner for column in common], _points(values))


def _texts(content: Content) -> list[Text]:
    """Return the first rows' texts; runners that wrote the same are named together."""
    found = []
    for row in sorted({row for _, row in content["records"]})[:SHOWN_ROWS]:
        runners_by_text: dict[str, list[str]] = {}
        name = str(row)
        for runner in content["runners"]:
            record = content["records"].get((runner, row), {})
            name = str(record.get("id", name))
            text = record["texts"][0] if record.get("texts") else record.get("error")
            if text is not None:
                runners_by_text.setdefault(text, []).append(runner)
        parts = [f"{', '.join(runners)}:\n{_cut(text)}" for text, runners in runners_by_text.items()]
        if parts:
            found.append(Text(f"Row {name}, as each decoding method wrote it.", "\n\n".join(parts)))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …"


def _saved_tables(content: Content) -> tuple[tables.Table, list[tables.Table]]:
    """Return the table that ``outpace eval`` saved beside a complete run, and its further tables.

    Measures that need the data are in that file alone.
    """
    path: Path = content["table"]
    if not content["complete"] or not path.is_file():
        return [], []
    found: list[tables.Table] = []
    for part in path.read_text(encoding="utf-8").split("\n\n"):
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in part.splitlines()]
        if len(rows) > 2 and rows[0][1:] == list(content["runners"]):
            found.append([(row[0], row[1:]) for row in rows[2:]])
    return (found[0], found[1:]) if found else ([], [])

"""The result of a run as a table: a line for each measure, a column for each runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from outpace.bench.data import Item, category
from outpace.engine.stats import Stats
from outpace.tasks.journal import Key
from outpace.tasks.kinds import EvalTask
from outpace.tasks.score import percentile

Record = dict[str, Any]
Table = list[tuple[str, list[str]]]
NONE = "–"


@dataclass(frozen=True)
class RunnerColumn:
    """The results of one runner.

    Attributes:
        task: The task.
        runner: Name of the runner.
        done: Item and record of each row that worked, by row.
        failed: Reason of each row that failed, by row.
    """

    task: EvalTask
    runner: str
    done: dict[int, tuple[Item, Record]]
    failed: dict[int, str]

    @cached_property
    def items(self) -> list[Item]:
        """The items of the rows that worked."""
        return [item for item, _ in self.done.values()]

    @cached_property
    def records(self) -> list[Record]:
        """The records of the rows that worked."""
        return [record for _, record in self.done.values()]

    @cached_property
    def stats(self) -> Stats:
        """The statistics of all rows together."""
        return sum((Stats(**one["stats"]) for one in self.records), Stats())

    @property
    def seconds(self) -> float:
        """The seconds of all rows together."""
        return float(sum(one["seconds"] for one in self.records))

    def only(self, rows: Iterable[int]) -> RunnerColumn:
        """Return the same column with only some rows."""
        selected = set(rows)
        return replace(self, done={row: result for row, result in self.done.items() if row in selected})

    @property
    def quality(self) -> dict[str, float]:
        """The measures of quality, by name."""
        if not self.records:
            return {}
        found = self.task.overall(
            self.items, [one["texts"] for one in self.records], [one["judged"] for one in self.records]
        )
        num_tokens = sum(one.get("likely_tokens", 0) for one in self.records)
        if num_tokens:
            found["log-probability"] = sum(one["log_probability"] for one in self.records) / num_tokens
        return found

    @property
    def sampling_step(self) -> float | None:
        """Milliseconds of a sampling step, from the profiled rows if there are any, else from all rows."""
        passes = sum(one.get("sampling_passes", 0) for one in self.records)
        if passes:
            seconds = sum(one.get("sampling_seconds", 0.0) for one in self.records)
            return float(1e3 * seconds / passes)
        passes, seconds = self.stats.target_passes, self.stats.verify_seconds
        return 1e3 * seconds / passes if passes and seconds else None

    @property
    def distance(self) -> float | None:
        """Mean total variation from the target's distribution per token; None if unknown."""
        positions = sum(one.get("positions", 0) for one in self.records)
        return sum(one.get("distance", 0.0) for one in self.records) / positions if positions else None

    @property
    def stopped(self) -> list[tuple[str, str]]:
        """Programs that were stopped: the name of the row, and why."""
        return [
            (item.name, judged["reason"])
            for item, one in zip(self.items, self.records, strict=True)
            for judged in one["judged"]
            if judged.get("stopped")
        ]

    def seconds_percentile(self, share: float) -> float | None:
        """Return a percentile of the seconds of a row; None without rows."""
        return percentile([one["seconds"] for one in self.records], share) if self.records else None


def columns(
    task: EvalTask, items: Sequence[Item], records: dict[Key, Record], runners: Sequence[str]
) -> list[RunnerColumn]:
    """Return a column for each runner, from the records of a run."""
    found = []
    for runner in runners:
        by_row = {row: record for (name, row), record in sorted(records.items()) if name == runner}
        failed = {row: record["error"] for row, record in by_row.items() if "error" in record}
        done = {row: (items[row], record) for row, record in by_row.items() if row not in failed}
        found.append(RunnerColumn(task, runner, done, failed))
    return found


def table(found: Sequence[RunnerColumn]) -> Table:
    """Return the lines of the table: quality first, then cost.

    Rows that failed with any runner are left out for all. A runner that failed at all rows is not compared.
    """
    failed = unfinished_rows(found)
    common = [one.only(one.done.keys() - failed) for one in found]
    baseline = next((one for one in common if one.runner == "baseline"), None)
    each = [cells(one, baseline) for one in common]
    names = dict.fromkeys(name for some in sorted(each, key=len, reverse=True) for name in some)
    lines = [(name, [some.get(name, NONE) for some in each]) for name in names]
    lines = [(name, line) for name, line in lines if any(cell != NONE for cell in line)]
    lines.append(("rows", [str(len(one.records)) for one in common]))
    if any(one.stopped for one in found):
        lines.append(("stopped programs", [str(len(one.stopped)) for one in found]))
    lines.append(("failed", [str(len(one.failed)) for one in found]))
    return lines


def unfinished_rows(found: Sequence[RunnerColumn]) -> set[int]:
    """Return the rows that some runner did not finish; runners that finished none do not count."""
    rows = {row for one in found for row in (*one.done, *one.failed)}
    return {row for one in found if one.done for row in rows - one.done.keys()}


def cells(one: RunnerColumn, baseline: RunnerColumn | None) -> dict[str, str]:
    """Return the cells of a runner's column, by measure."""
    if not one.records:
        return {}
    stats = one.stats
    values: dict[str, tuple[float | None, str]] = {
        **{name: (value, ".2f") for name, value in one.quality.items()},
        "acceptance": (stats.acceptance_rate if stats.draft_tokens else None, ".3f"),
        "distance from the target": (one.distance, ".4f"),
        "tokens per pass": (stats.tokens_per_pass or None, ".2f"),
        "sampling step, ms a pass": (one.sampling_step, ".3f"),
        "sampling step, s": (stats.verify_seconds or None, ".2f"),
        "wall clock, s": (one.seconds, ".1f"),
        "tokens/s": (speed(one), ".1f"),
        "over baseline": (None if baseline is None else ratio(one, baseline), ".2f"),
        **{f"P{at} of a row, s": (one.seconds_percentile(at / 100), ".2f") for at in (50, 90, 99)},
    }
    return {name: NONE if value is None else f"{value:{form}}" for name, (value, form) in values.items()}


def by_category(found: Sequence[RunnerColumn]) -> Table:
    """Return tokens per pass and throughput relative to no speculation, for each category.

    This is how Spec-Bench reports.
    """
    failed = unfinished_rows(found)
    kinds: dict[str, set[int]] = {}
    for one in found:
        for row, (item, _) in one.done.items():
            if row not in failed:
                kinds.setdefault(category(item), set()).add(row)
    lines = []
    for kind, rows in kinds.items():
        some = [one.only(rows) for one in found]
        baseline = next((mean_speed(one) for one in some if one.runner == "baseline" and one.done), 0.0)
        cells = []
        for one in some:
            over = f", {mean_speed(one) / baseline:.2f}x" if baseline and one.done else ""
            cells.append(f"{one.stats.tokens_per_pass:.2f}{over}" if one.done else NONE)
        lines.append((f"{kind} ({len(rows)})", cells))
    return lines


def speed(one: RunnerColumn) -> float | None:
    """Return tokens per second over all rows; None if no time was measured."""
    return one.stats.new_tokens / one.seconds if one.seconds else None


def ratio(one: RunnerColumn, baseline: RunnerColumn) -> float | None:
    """Return throughput relative to decoding without speculation; None where it is unknown."""
    throughput, reference = speed(one), speed(baseline)
    return throughput / reference if throughput and reference else None


def mean_speed(one: RunnerColumn) -> float:
    """Return the mean over rows of tokens per second, as Spec-Bench has it."""
    return fmean(record["stats"]["new_tokens"] / record["seconds"] for record in one.records)


def failures(found: Sequence[RunnerColumn], items: Sequence[Item]) -> list[str]:
    """Return a line for each row that failed: its name, the runners, and why.

    A reason that all runners share is named once.
    """
    lines = []
    for row in sorted({row for one in found for row in one.failed}):
        reasons: dict[str, list[str]] = {}
        for one in found:
            if row in one.failed:
                reasons.setdefault(one.failed[row], []).append(one.runner)
        for reason, runners in reasons.items():
            where = "" if len(runners) == len(found) else f" ({', '.join(runners)})"
            lines.append(f"{items[row].name}{where}: {reason}")
    return lines


def stopped(found: Sequence[RunnerColumn]) -> list[str]:
    """Return a line for each program that was stopped; such programs count as failed."""
    return [f"{name} ({one.runner}): the program {reason}" for one in found for name, reason in one.stopped]


def markdown(title: str, runners: Sequence[str], lines: Table) -> str:
    """Return a table as Markdown."""
    rows = [(title, list(runners)), ("---", ["---:"] * len(runners)), *lines]
    return "".join(f"| {name} | {' | '.join(cells)} |\n" for name, cells in rows)

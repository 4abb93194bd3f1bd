"""The run behind ``outpace eval``: the rows that remain, the journal and the table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.bench.data import Data, Item
    from outpace.tasks.evaluate import Evaluation
    from outpace.tasks.journal import Journal
    from outpace.tasks.kinds import EvalTask


def table_file(path: Path) -> Path:
    """Return the file of the table, beside the journal."""
    return Path(f"{path}.md")


def evaluate(
    path: Path,
    fresh: bool,
    header: dict[str, Any],
    flags: dict[str, Any],
    rows: Data,
    task: EvalTask,
    runners: Sequence[str],
    load: Callable[[], Evaluation],
) -> None:
    """Load models and run the remaining rows, if there are any; print and save the table.

    Args:
        path: File of the journal.
        fresh: Whether to start anew if the file exists.
        header: Settings that must be the same for a run to be resumed, as far as they are known without
            models.
        flags: Further flags that models are loaded by.
        rows: The data.
        task: The task.
        runners: Names of the runners.
        load: Function that loads the models.
    """
    from outpace.bench.machine import machine
    from outpace.cli.bench import command
    from outpace.tasks.journal import Journal

    with Journal(path, fresh) as journal:
        journal.check(header, flags)
        if journal.truncated:
            note(f"{path}: its last line is incomplete; that row is run again")
        done = completed_runners(journal, flags, runners, len(rows.items))
        if done is not None:
            note(f"{path} has all rows; --fresh runs them again")
        else:
            evaluation = load()
            decoder, done = evaluation.decoder, list(evaluation.runners)
            header["settings"] = {"models": decoder.describe().splitlines(), **header["settings"]}
            header["machine"] = machine(decoder.scorer.device)
            date = datetime.now(UTC).isoformat(timespec="seconds")
            metadata = {"command": command(), "date": date, "flags": flags, "left_out": evaluation.missing}
            journal.start(header, metadata)
            if journal.records:
                note(f"{path} has {len(journal.records)} of {len(rows.items) * len(done)} results; resuming")
            try:
                run(evaluation, rows.items, journal)
            except KeyboardInterrupt:
                note(f"{path} has {len(journal.records)} results; the same command resumes the run")
                raise
        failed = report(path, task, rows, journal, done)
    if failed:
        raise typer.Exit(1)


def completed_runners(
    journal: Journal, flags: dict[str, Any], runners: Sequence[str], rows: int
) -> list[str] | None:
    """Return the runners of a complete run with the same flags; None if the file holds no such run."""
    header = journal.stored_header
    if header is None or header.get("flags") != flags:
        return None
    found = [runner for runner in runners if runner not in header.get("left_out", {})]
    complete = all(journal.has(runner, row) for runner in found for row in range(rows))
    return found if found and complete else None


def report(path: Path, task: EvalTask, rows: Data, journal: Journal, runners: Sequence[str]) -> bool:
    """Print and save the table; return whether rows failed."""
    from outpace.checks.files import write_atomic
    from outpace.tasks import table as tables

    found = tables.columns(task, rows.items, journal.records, runners)
    failed, stopped = tables.failures(found, rows.items), tables.stopped(found)
    parts = [(task.name, tables.table(found))]
    if task.name == "specbench":
        parts.append(("tokens per pass, speed over baseline", tables.by_category(found)))
    saved = "\n".join(tables.markdown(title, runners, some) for title, some in parts)
    for title, some in (("Failed", failed), ("Stopped", stopped)):
        if some:
            saved += f"\n{title}:\n\n" + "".join(f"- {one}\n" for one in some)
    write_atomic(table_file(path), saved)
    for title, lines in parts:
        show(title, runners, lines)
    for one in failed:
        note(f"failed: {one}")
    for one in stopped:
        note(f"stopped: {one}")
    note(f"rows in {path}, table in {table_file(path)}")
    return bool(failed)


def run(evaluation: Evaluation, items: list[Item], journal: Journal) -> None:
    """Run the remaining rows, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = len(items) * len(evaluation.runners)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        line = bar.add_task("", total=total, completed=len(journal.records))

        def step(runner: str, row: int) -> None:
            bar.update(line, description=f"{items[row].name}: {runner}", completed=len(journal.records))

        evaluation.run(items, journal, step)


def show(title: str, runners: Sequence[str], lines: Any) -> None:
    """Print a table on stdout."""
    from rich.table import Table

    from outpace.cli.show import screen

    table = Table(title, *runners)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cells in lines:
        table.add_row(name, *cells)
    screen(sys.stdout).print(table)

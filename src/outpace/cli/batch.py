"""``outpace generate --input``: the requests of a file, generated together as slots become free."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import typer

from outpace.checks.errors import counted
from outpace.checks.files import check_distinct, check_input, check_output, temporary_path
from outpace.cli.models import ModelFlags, open_decoder
from outpace.cli.show import note, stats_line

if TYPE_CHECKING:
    from outpace.cli.batch_request import Defaults, Id, LineError, Request
    from outpace.decoder import Decoder
    from outpace.engine.scheduler import Scheduler
    from outpace.engine.sequence import SequenceState, Step

BATCH_SIZE = 64  # sequences at a time, by default
RESULT = b'{"id": '  # every line of results starts with this
KEYS = "text", "response", "error"  # every result has one of them


def check_flags(
    input: Path | None, output: Path | None, batch_size: int | None, unused: Mapping[str, bool]
) -> tuple[Path, Path] | None:
    """Check the files, and the flags that make no sense with --input.

    Args:
        input: Value of --input.
        output: Value of --output.
        batch_size: Value of --batch-size.
        unused: Flags that make no sense with --input, and whether each is set.

    Returns:
        The input and the output file. None: there is no batch.

    Raises:
        ValueError: A file cannot be used, or flags exclude each other.
    """
    if input is None and output is None and batch_size is None:
        return None
    if input is None:
        flag = "--output" if output is not None else "--batch-size"
        raise ValueError(f"{flag}: needs --input, a file of requests")
    for flag, is_set in unused.items():
        if is_set:
            raise ValueError(f"{flag}: not with --input; leave it out")
    if output is None:
        raise ValueError("--input: needs --output, a file for the results")
    check_input("--input", input)
    check_output("--output", output)
    check_distinct(("--input", input), ("--output", output))
    return input, output


def generate_batch(
    models: ModelFlags, input: Path, output: Path, batch_size: int, defaults: Defaults
) -> None:
    """Generate the requests of a file that have no result yet, and write their results.

    Args:
        models: Flags of the models.
        input: The file of requests.
        output: The file of results.
        batch_size: Most sequences at a time.
        defaults: Values of flags, for requests that do not set their own.
    """
    with Results(output) as results:
        requests = remaining(input, results.done)
        first = next(requests, None)
        if first is None:
            if not results.done:
                raise ValueError(f"--input: {input} has no requests")
            note(f"{output} has all {counted(len(results.done), 'result')}")
            return
        decoder = open_decoder(models)
        results.start()
        batch = Batch(decoder, results, defaults, batch_size)
        try:
            with Progress(input, len(results.done)) as progress:
                batch.run(itertools.chain([first], requests), progress)
        except KeyboardInterrupt:
            note(f"{output} has {counted(results.count, 'result')}; the same command continues")
            raise
    note(batch.summary())
    if batch.failed:
        note(f"{batch.failed} of {counted(batch.finished, 'request')} failed; the first one: {batch.first}")
        raise typer.Exit(1)


def remaining(input: Path, done: set[Id]) -> Iterator[Request | LineError]:
    """Yield the requests of a file that have no result yet, and the errors of lines that are none."""
    from outpace.cli.batch_request import LineError, read

    lines: dict[Id, int] = {}
    with input.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = read(line, number)
            except LineError as error:
                yield error
                continue
            if request.id in lines:
                where, is_openai = lines[request.id], request.form.is_openai
                name = "custom_id" if is_openai else "id"
                reason = (
                    f"{name}: got {request.id!r}, the id of line {where}, too; each request needs its own"
                )
                yield LineError(reason, f"line-{number}", is_openai)
                continue
            lines[request.id] = number
            if request.id not in done:
                yield request


class Batch:
    """Requests that are generated together, and their results.

    Args:
        decoder: The decoder.
        results: The results.
        defaults: Values of flags, for requests that do not set their own.
        batch_size: Most sequences at a time.

    Attributes:
        finished: Requests that have a result.
        failed: Those of them that failed.
        first: Id and error of the first one that failed.
    """

    def __init__(self, decoder: Decoder, results: Results, defaults: Defaults, batch_size: int) -> None:
        from outpace.engine.stats import Stats

        self._decoder, self._results, self._defaults = decoder, results, defaults
        self._batch_size = batch_size
        self._running: dict[int, tuple[Request, SequenceState]] = {}  # by id of the scheduler
        self._stats, self._started_at = Stats(), time.perf_counter()
        self.finished = self.failed = 0
        self.first = ""

    def run(self, requests: Iterator[Request | LineError], progress: Progress) -> None:
        """Generate all requests. A bounded number of them waits for slots."""
        with self._decoder.scheduler(self._batch_size) as scheduler:
            while True:
                self._feed(scheduler, requests)
                progress.show(self.finished, self._stats.new_tokens)
                if not scheduler.unfinished:
                    return
                for step in scheduler.step():
                    self._take(step)

    def _feed(self, scheduler: Scheduler, requests: Iterator[Request | LineError]) -> None:
        """Add requests until as many wait as there are slots."""
        missing = 2 * self._batch_size - scheduler.unfinished
        new: list[tuple[Request, SequenceState]] = []
        while len(new) < missing and (one := next(requests, None)) is not None:
            if isinstance(one, Exception):
                self._fail(one.id, one.is_openai, one)
                continue
            try:
                new.append((one, one.sequence(self._decoder, self._defaults)))
            except Exception as error:  # a tokenizer may raise anything
                self._fail(one.id, one.form.is_openai, error)
        if new:
            scheduler.prepare([sequence for _, sequence in new])
        for request, sequence in new:
            self._running[scheduler.add(sequence)] = request, sequence

    def _take(self, step: Step) -> None:
        """Count a step, and write the result of its request if it is the last one."""
        from outpace.cli.batch_result import result

        if step.output is None:
            return
        request, sequence = self._running.pop(step.index)
        self._stats += step.output.stats
        if step.output.error is not None:
            self._fail(request.id, request.form.is_openai, step.output.error)
        else:
            self._write(result(request, sequence, step.output, self._decoder))

    def _fail(self, id: Id, is_openai: bool, error: Exception) -> None:
        from outpace.cli.batch_result import failure

        self.failed += 1
        self.first = self.first or f"{id}: {error}"
        self._write(failure(id, is_openai, error))

    def _write(self, result: dict[str, Any]) -> None:
        self.finished += 1
        self._results.add(result)

    def summary(self) -> str:
        """Return the statistics line."""
        self._stats.other_seconds += time.perf_counter() - self._started_at - self._stats.seconds
        return f"{counted(self.finished, 'request')} | {stats_line(self._stats)}"


class Results:
    """The file of results: those of earlier runs, and new ones.

    Args:
        path: The file.

    Attributes:
        done: Ids of the requests that have a result.
        count: Number of results, failed requests included.

    Raises:
        ValueError: The file has lines that are no results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[Id] = set()
        self._failed, self._truncated, self._is_clean = 0, False, True
        self._file: IO[bytes] | None = None
        for _, record in self._stored() if path.exists() else ():
            if record.get("error"):
                self._failed += 1
            else:
                self.done.add(record.get("custom_id", record["id"]))
        self.count = len(self.done)

    def _stored(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield the lines of the file with their results, without an incomplete last line."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                is_last = not line.endswith(b"\n")
                self._is_clean = not is_last
                record = result_of(line)
                if record is None and is_last and line[: len(RESULT)] == RESULT[: len(line)]:
                    self._truncated = True
                elif record is None:
                    where = f"{self.path}: line {number}"
                    raise ValueError(f"--output: {where} is no result of this command; name another file")
                else:
                    yield line, record

    def start(self) -> None:
        """Drop failed requests and an incomplete line, which run again, and open the file for new results."""
        if self._truncated:
            note(f"{self.path}: its last line is incomplete; that request runs again")
        if self._failed or not self._is_clean:
            self._rewrite()
        if self.done or self._failed:
            again = (
                f"{counted(self._failed, 'failed request')} {'runs' if self._failed == 1 else 'run'} again"
            )
            note(
                f"{self.path} has {counted(len(self.done), 'result')}; resuming"
                + (f" ({again})" if self._failed else "")
            )
        self._file = self.path.open("ab")

    def _rewrite(self) -> None:
        """Replace the file by its results of requests that did not fail."""
        temporary = temporary_path(self.path)
        try:
            with temporary.open("wb") as file:
                for line, record in self._stored():
                    if not record.get("error"):
                        file.write(line.rstrip(b"\n") + b"\n")
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def add(self, result: Mapping[str, Any]) -> None:
        """Append a result to the file."""
        assert self._file is not None
        line = json.dumps(result, ensure_ascii=False)
        try:
            self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self.path}: it cannot be written ({error.strerror})") from error
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # `add` has reported it
                self._file.close()


def result_of(line: bytes) -> dict[str, Any] | None:
    """Return the result of a line; None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not any(key in record for key in KEYS):
        return None
    return record if type(record.get("custom_id", record.get("id"))) in (str, int) else None


class Progress:
    """A progress bar on a terminal's stderr; nothing elsewhere.

    Args:
        input: The file of requests.
        done: Number of requests that had a result before.
    """

    def __init__(self, input: Path, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        is_shown = sys.stderr.isatty()
        self._bar = Bar(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
            transient=True,
            disable=not is_shown,
        )
        total = number_of_requests(input) if is_shown and input.is_file() else None
        self._done, self._task = done, self._bar.add_task("", total=total, completed=done, speed="")

    def __enter__(self) -> Self:
        self._started_at = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, finished: int, tokens: int) -> None:
        """Show how many requests are finished, and the throughput."""
        speed = f"{tokens / (time.perf_counter() - self._started_at):.1f} tokens/s"
        self._bar.update(self._task, completed=self._done + finished, speed=speed)


def number_of_requests(input: Path) -> int:
    """Return the number of lines that are not blank."""
    with input.open("rb") as file:
        return sum(bool(line.strip()) for line in file)

"""A file of JSON lines that a run writes as it goes, so that it can be resumed after any interruption."""

from __future__ import annotations

import json
import math
import os
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from outpace.engine.stats import Stats
from outpace.tasks.kinds import RUNNERS

Key = tuple[str, int]  # name of a runner and number of a row
REQUIRED = {"texts", "judged", "seconds", "stats"}  # keys that a record without an error must have
COUNTS = vars(Stats())  # the fields of a record's "stats"
PATH_FLAGS = ("target", "draft")  # flags with a digest of a model's path
UNCHECKED_FLAGS = ("outpace", "trust_remote_code")  # flags that may differ in a resumed run


class Journal:
    """A run on disk: the first line holds its settings, each other line one runner's record of one row.

    No other run can open the file until this is closed. Nothing is written before ``start``.

    Args:
        path: The file.
        fresh: Whether to ignore what the file holds.

    Attributes:
        stored_header: The first line of the file; None if a run has to start anew.
        records: The other lines, by runner and row.
        truncated: Whether the last line is incomplete. Its row is not in ``records``.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path.resolve()  # one lock, whichever path leads to the file
        self.stored_header: dict[str, Any] | None = None
        self.records: dict[Key, dict[str, Any]] = {}
        self.truncated = False
        self._size = 0  # bytes of complete lines
        self._file: BufferedRandom | None = None
        self._lock = FileLock(f"{self.path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"out: another run is writing to {path}; wait for it, or name another file"
            ) from None
        try:
            if not fresh and self.path.exists():
                self._read(self.path.read_bytes())
        except BaseException:
            self._unlock()
            raise

    def _read(self, content: bytes) -> None:
        lines = content.split(b"\n")
        last = lines.pop()  # the part after the last newline
        foreign = ValueError(f"out: {self.path} is not a file of `outpace eval`; name another file")
        if not lines:
            # The first line is incomplete, unless the file is of another kind.
            self.truncated = bool(last)
            if last and (_parse(last) is not None or not last.startswith(b'{"task": ')):
                raise foreign
            return
        self.stored_header = _parse(lines[0])
        if self.stored_header is None or "task" not in self.stored_header:
            raise foreign
        self._size = len(lines[0]) + 1
        self.truncated = bool(last)
        data = self.stored_header.get("data")
        rows = data.get("rows") if isinstance(data, dict) else None
        for number, line in enumerate(lines[1:], 2):
            record = _record(line, rows if isinstance(rows, int) else None)
            if record is not None:
                self.records[record["runner"], record["row"]] = record
                self._size += len(line) + 1
            elif number == len(lines) and not last:
                self.truncated = True
            else:
                raise ValueError(
                    f"out: {self.path}: line {number} is damaged; delete it to run its row again, or --fresh"
                )

    def check(self, header: dict[str, Any], flags: dict[str, Any] | None = None) -> None:
        """Refuse a file whose run had other settings than these; only settings named here are compared.

        Args:
            header: Settings that change the texts.
            flags: The flags that models are loaded by; a file without flags has none to compare.

        Raises:
            ValueError: A setting or flag differs.
        """
        if self.stored_header is None:
            return
        found = differences(self.stored_header, json.loads(json.dumps(header)))
        stored_flags = self.stored_header.get("flags")
        if isinstance(stored_flags, dict):
            named = [line.partition(":")[0] for line in found]
            found += [
                f"{name}: another model of this name"
                if name in PATH_FLAGS
                else f"{name}: {_format_flag(stored_flags.get(name))} there, {_format_flag(here)} here"
                for name, here in (flags or {}).items()
                if name not in (*named, *UNCHECKED_FLAGS) and stored_flags.get(name) != here
            ]
        if found:
            raise ValueError(
                f"out: {self.path} is of another run ({'; '.join(found)}); name another file, or --fresh"
            )

    def start(self, header: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Open the file behind its last complete line, or write the first line.

        Args:
            header: Settings that must be the same for a run to be resumed.
            metadata: Further entries of the first line, which are not compared.
        """
        self.check(header)
        self._file = self.path.open("r+b" if self._size else "w+b")
        self._file.seek(self._size)
        self._file.truncate()  # drops an incomplete line
        if self.stored_header is None:
            self._append({**header, **metadata})

    def has(self, runner: str, row: int) -> bool:
        """Return whether a runner has finished a row, or failed at it for good."""
        record = self.records.get((runner, row))
        return record is not None and not record.get("again")

    def add(self, record: dict[str, Any]) -> None:
        """Append a record to the file."""
        self._append(record)
        self.records[record["runner"], record["row"]] = record

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _unlock(self) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._unlock()


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _record(line: bytes, rows: int | None) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is damaged.

    Args:
        line: The line, without its newline.
        rows: The number of rows in the data; None if it is unknown.
    """
    record = _parse(line)
    if record is None or record.get("runner") not in RUNNERS or type(record.get("row")) is not int:
        return None
    if record["row"] < 0 or (rows is not None and record["row"] >= rows):
        return None
    if "error" in record:
        return record if isinstance(record["error"], str) and record["error"] else None
    return record if _is_complete(record) else None


def _is_complete(record: dict[str, Any]) -> bool:
    """Return whether a record has all values that the table needs."""
    if not record.keys() >= REQUIRED:
        return False
    texts, judged, stats = record["texts"], record["judged"], record["stats"]
    return (
        _is_list_of(str, texts)
        and _is_list_of(dict, judged)
        and len(texts) == len(judged) > 0
        and _is_number(record["seconds"])
        and isinstance(stats, dict)
        and stats.keys() <= COUNTS.keys()
        and all(
            isinstance(one, list) and all(map(_is_number, one))
            if isinstance(COUNTS[name], list)
            else _is_number(one)
            for name, one in stats.items()
        )
    )


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _format_flag(value: Any) -> Any:
    return "default" if value is None else value


def differences(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a line for each setting that differs: "temperature: 0 there, 1 here"."""
    found = []
    for name, here in current.items():
        there = stored.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += differences(there, here)
        elif there != here:
            found.append(f"{name}: {there} there, {here} here")
    return found

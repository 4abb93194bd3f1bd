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
from outpace.tasks.kinds import SIDES

Key = tuple[str, int]  # a runner, and the number of a row
WHOLE = {"texts", "judged", "seconds", "stats"}  # keys that a record without an error must have
COUNTS = vars(Stats())  # the fields of a record's "stats"
LOCATED = ("target", "draft")  # flags that hold a digest of a model's path
HARMLESS = ("outpace", "trust_remote_code")  # flags that may change within a run


class Journal:
    """A run on disk: the first line holds its settings, each other line one runner's record of one row.

    No other run can open the file until this is closed. ``begin`` is the first to write to it.

    Args:
        path: The file.
        fresh: Whether to ignore what the file holds.

    Attributes:
        before: The first line of the file; None if a run has to start anew.
        records: The other lines, by runner and row.
        cut: Whether the last line was cut off. Its row is not in ``records``.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path.resolve()  # one lock, whichever path leads to the file
        self.before: dict[str, Any] | None = None
        self.records: dict[Key, dict[str, Any]] = {}
        self.cut = False
        self._size = 0  # bytes of whole lines
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
        foreign = ValueError(f"out: {self.path} is not of this kind; name another file")
        if not lines:
            # A first line that was cut off, unless the file is of another kind.
            self.cut = bool(last)
            if last and (_parsed(last) is not None or not last.startswith(b'{"task": ')):
                raise foreign
            return
        self.before = _parsed(lines[0])
        if self.before is None or "task" not in self.before:
            raise foreign
        self._size = len(lines[0]) + 1
        self.cut = bool(last)
        data = self.before.get("data")
        rows = data.get("rows") if isinstance(data, dict) else None
        for number, line in enumerate(lines[1:], 2):
            record = _record(line, rows if isinstance(rows, int) else None)
            if record is not None:
                self.records[record["side"], record["row"]] = record
                self._size += len(line) + 1
            elif number == len(lines) and not last:
                self.cut = True
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
        if self.before is None:
            return
        found = different(self.before, json.loads(json.dumps(header)))
        before = self.before.get("flags")
        if isinstance(before, dict):
            named = [one.partition(":")[0] for one in found]
            found += [
                f"{name}: another model of this name"
                if name in LOCATED
                else f"{name}: {_said(before.get(name))} there, {_said(here)} here"
                for name, here in (flags or {}).items()
                if name not in (*named, *HARMLESS) and before.get(name) != here
            ]
        what = "; ".join(found)
        if what:
            raise ValueError(f"out: {self.path} is of another run ({what}); name another file, or --fresh")

    def begin(self, header: dict[str, Any], told: dict[str, Any]) -> None:
        """Open the file behind its last whole line, or write the first line.

        Args:
            header: Settings that must be the same for a run to be resumed.
            told: Facts that are written beside it in the first line.
        """
        self.check(header)
        self._file = self.path.open("r+b" if self._size else "w+b")
        self._file.seek(self._size)
        self._file.truncate()  # drops a line that was cut off
        if self.before is None:
            self._append({**header, **told})

    def has(self, side: str, row: int) -> bool:
        """Return whether nothing is left to do for a row: it is done, or it cannot be done."""
        record = self.records.get((side, row))
        return record is not None and not record.get("again")

    def add(self, record: dict[str, Any]) -> None:
        """Append a record to the file."""
        self._append(record)
        self.records[record["side"], record["row"]] = record

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


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _record(line: bytes, rows: int | None) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is damaged.

    Args:
        line: The line, without its newline.
        rows: The number of rows in the data; None if it is unknown.
    """
    found = _parsed(line)
    if found is None or found.get("side") not in SIDES or type(found.get("row")) is not int:
        return None
    if found["row"] < 0 or (rows is not None and found["row"] >= rows):
        return None
    if "error" in found:
        return found if isinstance(found["error"], str) and found["error"] else None
    return found if _is_whole(found) else None


def _is_whole(record: dict[str, Any]) -> bool:
    """Return whether a record has all values that the table is made of."""
    if not record.keys() >= WHOLE:
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


def _said(value: Any) -> Any:
    return "default" if value is None else value


def different(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the settings that differ, in words: "temperature: 0 there, 1 here"."""
    found = []
    for name, here in now.items():
        there = before.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += different(there, here)
        elif there != here:
            found.append(f"{name}: {there} there, {here} here")
    return found

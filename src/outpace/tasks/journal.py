"""A file of JSON lines that a run writes as it goes, and goes on with after it was stopped anywhere."""

from __future__ import annotations

import json
import os
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

Key = tuple[str, int]  # a side, and the number of a row
WHOLE = {"texts", "judged", "seconds", "stats"}  # what a record has, unless it has an error


class Journal:
    """The first line says what was run, each other what a side made of a row.

    No other run can open the file until this is closed. `begin` is the first to write to it.

    Attributes:
        before: The first line of the file; None if a run has to start anew.
        records: The other lines, by side and row.
        cut: Whether the last line was not written to its end. Its row is not in `records`.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path.resolve()  # one lock, whatever name the file is called by
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
        last = lines.pop()  # what stands after the last newline
        foreign = ValueError(f"out: {self.path} is not of this kind; name another file")
        if not lines:
            # A first line that was cut off, unless it is a file of somebody else.
            self.cut = bool(last)
            if last and (_parsed(last) is not None or not last.startswith(b'{"task": ')):
                raise foreign
            return
        self.before = _parsed(lines[0])
        if self.before is None or "task" not in self.before:
            raise foreign
        self._size = len(lines[0]) + 1
        self.cut = bool(last)
        for number, line in enumerate(lines[1:], 2):
            record = _record(line)
            if record is not None:
                self.records[record["side"], record["row"]] = record
                self._size += len(line) + 1
            elif number == len(lines) and not last:
                self.cut = True
            else:
                raise ValueError(
                    f"out: {self.path}: line {number} is damaged; delete it to run its row again, or --fresh"
                )

    def check(self, header: dict[str, Any]) -> None:
        """Refuse a file whose run had other settings than these, as far as they are given."""
        if self.before is None:
            return
        wanted = json.loads(json.dumps(header))
        what = "; ".join(different(self.before, wanted))
        if what:
            raise ValueError(f"out: {self.path} is of another run ({what}); name another file, or --fresh")

    def begin(self, header: dict[str, Any], told: dict[str, Any]) -> None:
        """Go on after what is there, or write the first line.

        Args:
            header: What must be the same for a run to go on.
            told: What is written beside it in the first line.
        """
        self.check(header)
        self._file = self.path.open("r+b" if self._size else "w+b")
        self._file.seek(self._size)
        self._file.truncate()  # a line that was not written to its end
        if self.before is None:
            self._append({**header, **told})

    def has(self, side: str, row: int) -> bool:
        """Tell whether nothing is left to do for a row: it is done, or cannot be done."""
        record = self.records.get((side, row))
        return record is not None and not record.get("again")

    def add(self, record: dict[str, Any]) -> None:
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
    """Return the object of a line; None if it holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is damaged."""
    found = _parsed(line)
    if found is None or not ("error" in found or found.keys() >= WHOLE):
        return None
    return found if isinstance(found.get("side"), str) and isinstance(found.get("row"), int) else None


def different(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Name the settings that are others: "temperature: 0 there, 1 here"."""
    found = []
    for name, here in now.items():
        there = before.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += different(there, here)
        elif there != here:
            found.append(f"{name}: {there} there, {here} here")
    return found

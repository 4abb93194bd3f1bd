"""A file of JSON lines that a run writes as it goes, and goes on with after it was stopped anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

Key = tuple[str, int]  # a side, and the number of a row


class Journal:
    """The first line says what was run, each other what a side made of a row.

    header    what must be the same for a run to go on; `told` is only written down
    """

    def __init__(self, path: Path, header: dict[str, Any], told: dict[str, Any], fresh: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"out: another run is writing to {path}") from None
        try:
            self.records: dict[Key, dict[str, Any]] = {}
            kept = 0 if fresh else self._read(header)
            self._file = path.open("r+b" if kept else "wb")
            self._file.seek(kept)
            self._file.truncate()  # a line that was not written to its end
            if not kept:
                self._append({**header, **told})
        except BaseException:
            self._lock.release()
            raise

    def _read(self, header: dict[str, Any]) -> int:
        """What is there, and how many bytes of it are whole lines."""
        if not self.path.exists():
            return 0
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if not whole:
            if content and not content.startswith(b"{"):
                raise ValueError(f"out: {self.path} is not of this kind; name another file")
            return 0
        try:
            rows = [json.loads(line) for line in content[:whole].splitlines()]
            before = {name: rows[0][name] for name in header}
            self.records = {(row["side"], row["row"]): row for row in rows[1:]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"out: {self.path} is not of this kind; name another file") from None
        if before != json.loads(json.dumps(header)):
            what = "; ".join(different(before, json.loads(json.dumps(header))))
            raise ValueError(f"out: {self.path} is of another run ({what}); name another file, or --fresh")
        return whole

    def add(self, record: dict[str, Any]) -> None:
        self._append(record)
        self.records[record["side"], record["row"]] = record

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        Path(f"{self.path}.lock").unlink(missing_ok=True)
        self._lock.release()


def different(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Which settings are others: "temperature: 0 there, 1 here"."""
    found = []
    for name in now:
        there, here = before[name], now[name]
        if isinstance(there, dict) and isinstance(here, dict):
            found += different({key: there.get(key) for key in here}, here)
        elif there != here:
            found.append(f"{name}: {there} there, {here} here")
    return found

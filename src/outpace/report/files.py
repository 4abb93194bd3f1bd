"""Files that ``outpace report`` takes: results of measuring commands, and journals of ``outpace eval``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.models.hub import DEFAULT
from outpace.report.section import Content

KINDS = ("alpha", "sweep", "tune")  # one JSON object each
WRITTEN = "`outpace bench alpha`, `bench sweep`, `tune` or `eval`"
ENDINGS = (".json", ".jsonl")
HEADER = ("task", "settings", "data")  # keys of an eval journal's first line


def read(path: Path) -> Content:
    """Return the content of a file; an eval journal gives its settings, and its other lines as "records".

    Raises:
        ValueError: The file cannot be read, or is of another kind.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file; it must be one that {WRITTEN} wrote") from None
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read ({error.strerror})") from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; it must be one that {WRITTEN} wrote")
    content = _parsed(text)
    if isinstance(content, dict) and content.get("kind") in KINDS:
        return content
    header = _parsed(text.partition("\n")[0])
    if isinstance(header, dict) and all(key in header for key in HEADER):
        return _journal(path, header, text)
    what = "not a JSON file" if content is None and header is None else "a file of something else"
    raise ValueError(f"{path}: {what}; it must be one that {WRITTEN} wrote")


def within(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a folder that ``read`` takes, and the others that end in .json or .jsonl.

    Raises:
        ValueError: There is no file that ``read`` takes.
    """
    taken, others = list[Path](), list[Path]()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in ENDINGS:
            try:
                read(path)
                taken.append(path)
            except ValueError:
                others.append(path)
    if not taken:
        raise ValueError(f"{folder}: no file in this folder was written by {WRITTEN}")
    return taken, others


def named(paths: Sequence[Path]) -> list[str]:
    """Return names for files: the file name, or the whole path where two have the same name."""
    names = [path.name for path in paths]
    return [path.name if names.count(path.name) == 1 else str(path) for path in paths]


def _journal(path: Path, header: dict[str, Any], text: str) -> Content:
    """Return the content of an eval journal.

    The second record of a row replaces the first. A last line that was cut off is ignored.
    """
    data = header["data"]
    if not isinstance(data, dict) or not isinstance(data.get("rows"), int):
        raise ValueError(f"{path}: line 1 is not as `outpace eval` writes it")
    lines = text.split("\n")
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for number, line in enumerate(lines[1:-1], 2):
        row = _parsed(line)
        if not isinstance(row, dict) or not {"side", "row"} <= row.keys():
            raise ValueError(f"{path}: line {number} is not as `outpace eval` writes it")
        records[row["side"], row["row"]] = row
    sides = list(dict.fromkeys(side for side, _ in records))
    wanted = {(side, row) for side in sides for row in range(data["rows"])}
    again = any(record.get("again") for record in records.values())
    return {
        **header,
        "kind": "eval",
        "target": header.get("target") or DEFAULT,
        "records": records,
        "sides": sides,
        "complete": bool(records) and wanted <= records.keys() and not again,
        "table": Path(f"{path}.md"),
    }


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None

"""Files that ``outpace report`` reads: results of measuring commands, and journals of ``outpace eval``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.models.default import DEFAULT
from outpace.report.section import Content

KINDS = ("alpha", "sweep", "tune")  # files that are one JSON object
COMMANDS = "`outpace bench alpha`, `bench sweep`, `tune` or `eval`"
SUFFIXES = (".json", ".jsonl")
HEADER = ("task", "settings", "data")  # keys of an eval journal's first line


def read(path: Path) -> Content:
    """Return the content of a result file.

    An eval journal gives its settings, and its other lines as "records".

    Raises:
        ValueError: The file cannot be read, or is of another kind.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file; it must be one that {COMMANDS} wrote") from None
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read ({error.strerror})") from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; it must be one that {COMMANDS} wrote")
    content = _parse(text)
    if isinstance(content, dict) and content.get("kind") in KINDS:
        return content
    header = _parse(text.partition("\n")[0])
    if isinstance(header, dict) and all(key in header for key in HEADER):
        return _journal(path, header, text)
    problem = "not a JSON file" if content is None and header is None else "not a result file"
    raise ValueError(f"{path}: {problem}; it must be one that {COMMANDS} wrote")


def result_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the result files of a folder, and its other files that end in .json or .jsonl.

    Raises:
        ValueError: The folder has no result file.
    """
    results, others = list[Path](), list[Path]()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in SUFFIXES:
            try:
                read(path)
                results.append(path)
            except ValueError:
                others.append(path)
    if not results:
        raise ValueError(f"{folder}: no file in this folder was written by {COMMANDS}")
    return results, others


def display_names(paths: Sequence[Path]) -> list[str]:
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
        record = _parse(line)
        if not isinstance(record, dict) or not {"runner", "row"} <= record.keys():
            raise ValueError(f"{path}: line {number} is not as `outpace eval` writes it")
        records[record["runner"], record["row"]] = record
    runners = list(dict.fromkeys(runner for runner, _ in records))
    expected = {(runner, row) for runner in runners for row in range(data["rows"])}
    retry_pending = any(record.get("again") for record in records.values())
    return {
        **header,
        "kind": "eval",
        "target": header.get("target") or DEFAULT,
        "records": records,
        "runners": runners,
        "complete": bool(records) and expected <= records.keys() and not retry_pending,
        "table": Path(f"{path}.md"),
    }


def _parse(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None

"""A file of measurements: the command, the machine, and the results so far."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outpace.checks.files import write_atomic


class Results:
    """One JSON object that is written anew, as a whole, whenever it has grown.

    So an interruption loses no measurements. The field ``complete`` says whether they are all.

    Args:
        path: File to write; None writes nothing.
        kind: ``"alpha"``, ``"sweep"`` or ``"tune"``.
        about: Command, machine, target and settings. The date is added.

    Attributes:
        saved: Whether the file holds all results so far.
    """

    def __init__(self, path: Path | None, kind: str, about: Mapping[str, Any]) -> None:
        self.path, self.saved = path, False
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.content: dict[str, Any] = {"kind": kind, "date": date, **about, "complete": False}

    def put(self, **found: Any) -> None:
        """Add results by the name of their part; an existing part is replaced."""
        self.content.update(found)
        self._write()

    def done(self) -> None:
        """Mark the results as complete."""
        self.content["complete"] = True
        self._write()

    def _write(self) -> None:
        self.saved = False
        if self.path is None:
            return
        write_atomic(self.path, json.dumps(finite(self.content), indent=1, allow_nan=False) + "\n")
        self.saved = True


def finite(value: Any) -> Any:
    """Return a value with numbers that are not finite as strings, since JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def load(path: Path, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the content of a file of measurements.

    Args:
        path: The file.
        kinds: Kinds that are accepted; any if empty.

    Raises:
        ValueError: The file cannot be read, or is of another kind.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path}: not a JSON file") from None
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind is None or (kinds and kind not in kinds):
        expected = " or ".join(f"`outpace {one}`" for one in kinds) or "a measuring command"
        raise ValueError(f"{path}: it was not written by {expected}")
    return dict(content)

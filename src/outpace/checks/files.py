"""Checks and writes of files that users name."""

from __future__ import annotations

import os
from pathlib import Path


def check_out(flag: str, path: Path) -> None:
    """Raise unless a file can be written at this path, before work is done for it."""
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a folder")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{flag}: {folder}: no such folder")
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise ValueError(f"{flag}: {path}: it may not be written")
    beside = _beside(path)
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise ValueError(f"{flag}: {path}: it cannot be written ({error.strerror})") from None


def check_apart(*outputs: tuple[str, Path | None]) -> None:
    """Raise if two output flags name the same file, since one would replace the other.

    Args:
        outputs: Each flag with its path, or None for a flag that is not set.
    """
    seen: dict[Path, str] = {}
    for flag, path in outputs:
        if path is None:
            continue
        first = seen.setdefault(path.resolve(), flag)
        if first != flag:
            raise ValueError(f"{flag}: {path} is the file of {first}, too; name another file")


def check_folder(flag: str, path: Path) -> None:
    """Raise unless files can be written to a folder, before work is done for it; it may be missing."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag}: {path} is not a folder")
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(f"{flag}: {path}: it cannot be written")


def write_whole(path: Path, text: str) -> None:
    """Write all of the text or nothing: an interruption leaves the old file."""
    beside = _beside(path)
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise OSError(f"{path}: it cannot be written ({error.strerror})") from error
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")

"""Checks and writes of files that users name."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(flag: str, path: Path) -> None:
    """Raise unless a file can be written at this path. Commands call it before they start work."""
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a folder")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{flag}: {folder}: no such folder")
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise ValueError(f"{flag}: {path}: it may not be written")
    temporary = temporary_path(path)
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise ValueError(f"{flag}: {path}: it cannot be written ({error.strerror})") from None


def check_input(flag: str, path: Path) -> None:
    """Raise unless a file can be read. Commands call it before they start work."""
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a folder")
    if not path.exists():
        raise ValueError(f"{flag}: {path}: no such file")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{flag}: {path}: it may not be read")


def check_distinct(*outputs: tuple[str, Path | None]) -> None:
    """Raise if two output flags name the same file, because one would replace the other.

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
    """Raise unless files can be written to a folder; the folder itself may be missing."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag}: {path} is not a folder")
    nearest = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise ValueError(f"{flag}: {path}: it cannot be written")


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step, so that an interruption leaves the old file."""
    temporary = temporary_path(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"{path}: it cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Return the path of a file that is written beside another one and then replaces it."""
    return path.with_name(f".{path.name}.{os.getpid()}")

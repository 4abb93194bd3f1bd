"""Files that people name."""

from __future__ import annotations

import os
from pathlib import Path


def check_out(flag: str, path: Path) -> None:
    """Whether a file can be written there, before anything is done for it."""
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a folder")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{flag}: {folder}: no such folder")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"{flag}: {path}: it may not be written")


def write_whole(path: Path, text: str) -> None:
    """All of it, or nothing: an interruption leaves what was there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

"""The model cache on disk: its folder, complete models in it, locks, and errors that say what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMPLETE = "complete.json"  # written last: the sizes of all files of a converted model

Say = Callable[[str], None]


def say(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def cache_folder() -> Path:
    """Return the folder of the model cache: ``$OUTPACE_CACHE``, or ``outpace`` in the user's cache folder."""
    if named := os.environ.get("OUTPACE_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outpace"


def bytes_in(folder: Path) -> int:
    """Return the size of all files in a folder, also while another process adds and removes some."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_size
    return size


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds every file of a converted model, each with its recorded size."""
    try:
        sizes = json.loads((folder / COMPLETE).read_text())
        names = dict(sizes)
        return bool(names) and all((folder / one).stat().st_size == size for one, size in names.items())
    except (OSError, ValueError, TypeError):
        return False


def install(made: Path, folder: Path) -> None:
    """Move a converted model as a whole to its folder, from elsewhere on the same disk."""
    for file in made.iterdir():
        file.chmod(0o644)  # others may share the cache; safetensors writes for its owner alone
    sizes = {file.name: file.stat().st_size for file in made.iterdir()}
    (made / COMPLETE).write_text(json.dumps(sizes))
    if folder.exists():
        shutil.rmtree(folder)
    made.replace(folder)


@contextmanager
def locked(path: Path, waiting: str, tell: Say) -> Iterator[None]:
    """Hold the lock at this path; call ``tell`` once with ``waiting`` if another process holds it."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(waiting)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(cache: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                f"no space left in {cache} ({error.strerror}); free some, or name another folder in "
                "OUTPACE_CACHE"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise OSError(
                f"cannot write to {cache} ({error.strerror}); name another folder in OUTPACE_CACHE"
            ) from error
        raise

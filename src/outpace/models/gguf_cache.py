"""Cache of GGUF files converted to safetensors, by content and dtype.

Its size is limited, and the least recently used models are removed first. A converted model is a folder that
Transformers maps into memory. The modification time of its file ``used`` is the time of the last use. A
process that uses the model holds a shared lock on that file.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from outpace.checks.files import write_atomic
from outpace.models import gguf
from outpace.models.auto import quiet
from outpace.models.store import COMPLETE, Say, cache_folder, install, is_complete, locked

try:
    import fcntl
except ImportError:  # Windows, where a file that is mapped into memory cannot be deleted anyway
    fcntl = None  # type: ignore[assignment]

LIMIT_GIB = 20.0  # all converted files together
LIMIT_VARIABLE = "OUTPACE_GGUF_CACHE_GIB"
RESERVE = 1 << 30  # bytes of the disk left free
OVERHEAD = 64 << 20  # bytes of a converted model besides its weights: tokenizer and configs
SETTLED = 2.0  # seconds; a file that changed more recently may change again without a new time stamp
FORMAT = 1  # version of the format of converted folders

USED, ABOUT, DIGESTS = "used", "about.json", "digests.json"


# Converted models


class Hold:
    """A hold on a converted model, which is not removed from the cache before ``close``.

    Attributes:
        folder: Folder of the model.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self._descriptor = folder, descriptor

    def close(self) -> None:
        """Release the model."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def hold(folder: Path) -> Hold | None:
    """Return a hold on a converted model; None if it is missing or incomplete."""
    try:
        held = Hold(folder, os.open(folder / USED, os.O_RDONLY))
    except OSError:
        return None
    with suppress(OSError):  # some network file systems have no locks
        if fcntl is not None:
            fcntl.flock(held._descriptor, fcntl.LOCK_SH)
    if not is_complete(folder):  # it may have been removed a moment ago
        held.close()
        return None
    with suppress(OSError):  # a cache of another user may be read-only
        os.utime(folder / USED)
    return held


@dataclass(frozen=True)
class Converted:
    """A converted GGUF file in the cache.

    Attributes:
        folder: Folder of the converted model.
        name: Name of the GGUF file.
        dtype: Dtype of its weights.
        bytes: Size on disk.
        used: Time of the last use, in seconds since 1970.
        in_use: Whether a process uses it now.
    """

    folder: Path
    name: str
    dtype: str
    bytes: int
    used: float
    in_use: bool


def converted() -> list[Converted]:
    """Return the converted models in the cache, the most recently used first."""
    found = []
    for folder in _folders():
        if not is_complete(folder):
            continue
        with suppress(OSError, ValueError, KeyError):
            about = json.loads((folder / ABOUT).read_text())
            size = sum(file.stat().st_size for file in folder.iterdir())
            used = (folder / USED).stat().st_mtime
            found.append(Converted(folder, about["name"], about["dtype"], size, used, not _removable(folder)))
    return sorted(found, key=lambda one: -one.used)


def clear(names: Iterable[str] = ()) -> tuple[list[Converted], list[Converted]]:
    """Remove all converted models, or those of the named GGUF files.

    Args:
        names: Names of GGUF files; all if empty.

    Returns:
        The models that were removed, and those that were not, because they are in use.

    Raises:
        ValueError: No converted file has one of the names.
    """
    requested = set(names)
    models = converted()
    if missing := requested - {one.name for one in models}:
        known = ", ".join(dict.fromkeys(one.name for one in models)) or "nothing"
        raise ValueError(f"{min(missing)}: no converted GGUF file has this name; there is {known}")
    chosen = [one for one in models if not requested or one.name in requested]
    removed = [one for one in chosen if discard(one.folder)]
    if not requested:
        _sweep()
    return removed, [one for one in chosen if one not in removed]


def convert_once(path: Path, precision: Any, tell: Say) -> Hold | None:
    """Convert a GGUF file if needed, and return a hold on the converted copy.

    Args:
        path: The GGUF file.
        precision: Dtype of the copy.
        tell: Called with each progress message.

    Returns:
        The hold, or None if the copy cannot be cached.

    Raises:
        OSError: The file cannot be loaded.
        ValueError: Some weights overflow float16.
    """
    from safetensors import SafetensorError

    dtype = str(precision).removeprefix("torch.")
    before = gguf.stamp_of(path)
    folder = _folder_of(path, dtype)
    if found := hold(folder):
        return found
    needed = gguf.count_weights(path) * precision.itemsize + OVERHEAD

    def report_not_cached(error: Exception) -> None:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        tell(f"{path}: converted at every start, as it cannot be kept in {folder.parent} ({why})")

    with ExitStack() as stack:
        try:
            waiting = f"Another process is converting {path.name}; waiting for it."
            stack.enter_context(locked(_lock(folder), waiting, tell))
            if found := hold(folder):  # another process may have been faster
                return found
            _free_space(folder, needed)
            beside = stack.enter_context(_temporary(folder))
        except OSError as error:
            report_not_cached(error)
            return None
        tell(f"{path}: converting it once to safetensors, {needed / 1e9:.1f} GB in {dtype}")
        made = beside / "model"
        model, tokenizer = gguf.read(path, precision)
        if gguf.stamp_of(path) != before:
            report_not_cached(OSError("the file changed during the conversion"))
            return None
        try:
            with quiet():
                model.save_pretrained(made)
                tokenizer.save_pretrained(made)
            (made / ABOUT).write_text(json.dumps({"name": path.name, "dtype": dtype}))
            (made / USED).touch()
            install(made, folder)
        except (OSError, SafetensorError) as error:  # a full disk may raise either
            report_not_cached(error)
            return None
        finally:
            del model
            gc.collect()  # the CLI turns automatic collection off; the weights are loaded again next
        return hold(folder)


def _folder_of(path: Path, dtype: str) -> Path:
    """Return the folder for this content and dtype.

    It also depends on the version of Transformers, because a later one may convert the file differently.
    """
    made_of = f"{_digest(path)} {dtype} {metadata.version('transformers')} {FORMAT}"
    return _root() / hashlib.sha256(made_of.encode()).hexdigest()[:24]


def _root() -> Path:
    return cache_folder() / "gguf"


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _folders() -> list[Path]:
    root = _root()
    return [one for one in root.iterdir() if one.is_dir() and "." not in one.name] if root.is_dir() else []


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside this one; the caller holds the lock."""
    for left in folder.parent.glob(f"{folder.name}.tmp*"):  # of a process that was killed
        shutil.rmtree(left)
    prefix = f"{folder.name}.tmp"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


# Content


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, cached for as long as the file stays the same."""
    index, name, stamp = _root() / DIGESTS, str(path.resolve()), gguf.stamp_of(path)
    digests = _digests(index)
    if name in digests and digests[name][:-1] == stamp:
        return str(digests[name][-1])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if gguf.stamp_of(path) == stamp and time.time() - max(stamp[1:3]) / 1e9 > SETTLED:
        present = {one: entry for one, entry in digests.items() if Path(one).exists()}
        with suppress(OSError):  # a cache that cannot be written only costs the time to read the file again
            index.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(index, json.dumps({**present, name: [*stamp, digest]}))
    return digest


def _digests(index: Path) -> dict[str, list[Any]]:
    try:
        return {str(name): list(noted) for name, noted in json.loads(index.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


# Disk space


def limit() -> int:
    """Return the maximum size in bytes of all converted files together.

    Raises:
        ValueError: The environment variable ``OUTPACE_GGUF_CACHE_GIB`` is no number of GiB.
    """
    value = os.environ.get(LIMIT_VARIABLE)
    try:
        number = LIMIT_GIB if value is None else float(value)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise ValueError(f"{LIMIT_VARIABLE}: got {value!r}; it must be a number of GiB (0 keeps nothing)")
    return int(number * 2**30)


def _free_space(folder: Path, needed: int) -> None:
    """Remove the least recently used models until this many bytes fit.

    Raises:
        OSError: The bytes cannot fit. Nothing is removed then.
    """
    max_bytes = limit()
    _sweep(but=folder)
    models = converted()
    total, free = sum(one.bytes for one in models), shutil.disk_usage(folder.parent).free
    removable: list[Converted] = []
    for one in reversed(models):
        if total + needed <= max_bytes and free >= needed + RESERVE:
            break
        if not one.in_use:
            removable.append(one)
            total, free = total - one.bytes, free + one.bytes
    if total + needed > max_bytes:
        raise OSError(
            f"{LIMIT_VARIABLE} allows {max_bytes / 2**30:g} GiB for all copies; this one needs "
            f"{needed / 2**30:.1f} GiB"
        )
    if free < needed + RESERVE:
        raise OSError(
            f"the disk has {free / 2**30:.1f} GiB free; the copy needs {needed / 2**30:.1f} GiB, and "
            f"{RESERVE >> 30} GiB must stay free"
        )
    for one in removable:
        discard(one.folder)


@contextmanager
def _exclusively(folder: Path) -> Iterator[bool]:
    """Lock a converted model, and yield whether no process uses it."""
    try:
        descriptor = os.open(folder / USED, os.O_RDONLY)
    except OSError:
        yield False
        return
    alone = True
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        alone = False
    except OSError:  # some network file systems have no locks
        pass
    try:
        yield alone
    finally:
        os.close(descriptor)


def _removable(folder: Path) -> bool:
    with _exclusively(folder) as alone:
        return alone


def discard(folder: Path) -> bool:
    """Remove a model that no process uses; return whether it was removed."""
    with _exclusively(folder) as alone:
        if alone:
            with suppress(OSError):
                (folder / COMPLETE).unlink()  # from here on it counts as incomplete
                shutil.rmtree(folder)
        return alone and not folder.exists()


def _sweep(but: Path | None = None) -> None:
    """Remove leftovers of killed processes, and incomplete models."""
    from filelock import FileLock, Timeout

    root = _root()
    left = [one for one in root.glob("*.tmp*") if one.is_dir()] if root.is_dir() else []
    for one in [*left, *(folder for folder in _folders() if not is_complete(folder))]:
        key = one.name.split(".")[0]
        if but is not None and key == but.name:
            continue
        with suppress(Timeout, OSError), FileLock(root / f"{key}.lock", timeout=0):
            if one in left or not is_complete(one):
                shutil.rmtree(one)

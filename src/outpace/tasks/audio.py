"""Sound from files, as models hear it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.tasks.extra import needed


def packages() -> tuple[Any, Any]:
    """soundfile and soxr."""
    return needed("soundfile", "tasks"), needed("soxr", "tasks")


def duration(path: str | os.PathLike[str]) -> float:
    """Seconds of sound in a file, by what it says of itself; 0 if it cannot be read."""
    soundfile, _ = packages()
    try:
        return float(soundfile.info(path).duration)
    except (RuntimeError, OSError, TypeError):
        return 0.0


def read(file: str | os.PathLike[str] | bytes, rate: int) -> Tensor:
    """Samples `[n]` of a file, or of its bytes, in any format that soundfile reads, all channels mixed, at so
    many a second."""
    soundfile, soxr = packages()
    path = "sound" if isinstance(file, bytes) else file
    if not isinstance(file, bytes) and not Path(file).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        opened = io.BytesIO(file) if isinstance(file, bytes) else file
        sound, own = soundfile.read(opened, dtype="float32", always_2d=True)
    except (RuntimeError, OSError, TypeError) as error:  # soundfile's own are of the first kind
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: cannot be read as sound ({said})") from error
    if not len(sound):
        raise ValueError(f"{path}: holds no sound")
    mixed = sound.mean(axis=1)
    found = torch.from_numpy(mixed if own == rate else soxr.resample(mixed, own, rate)).float()
    if not bool(found.isfinite().all()):
        raise ValueError(f"{path}: holds samples that are not numbers")
    if not bool(found.any()):
        raise ValueError(f"{path}: holds nothing but silence")
    return found

"""Audio files as samples for models."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.checks.errors import import_extra


def packages() -> tuple[Any, Any]:
    """Return the modules soundfile and soxr.

    Raises:
        ImportError: One of them is not installed.
    """
    return import_extra("soundfile", "tasks"), import_extra("soxr", "tasks")


def duration(path: str | os.PathLike[str]) -> float:
    """Return the seconds of sound in a file according to its header; 0 if it cannot be read."""
    soundfile, _ = packages()
    try:
        return float(soundfile.info(path).duration)
    except (RuntimeError, OSError, TypeError):
        return 0.0


def read(file: str | os.PathLike[str] | bytes, rate: int) -> Tensor:
    """Return the samples of a file, with all channels mixed.

    Args:
        file: Path of a file in any format that soundfile reads, or its bytes.
        rate: Sampling rate of the result, in samples per second.

    Returns:
        Samples as float32, ``[n]``.

    Raises:
        ValueError: The file is missing, cannot be read, or holds no usable sound.
    """
    soundfile, soxr = packages()
    path = "sound" if isinstance(file, bytes) else file
    if not isinstance(file, bytes) and not Path(file).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        source = io.BytesIO(file) if isinstance(file, bytes) else file
        sound, file_rate = soundfile.read(source, dtype="float32", always_2d=True)
    except (RuntimeError, OSError, TypeError) as error:  # soundfile's own errors are RuntimeErrors
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: cannot be read as sound ({message})") from error
    if not len(sound):
        raise ValueError(f"{path}: holds no sound")
    mixed = sound.mean(axis=1)
    resampled = mixed if file_rate == rate else soxr.resample(mixed, file_rate, rate)
    samples = torch.from_numpy(resampled).float()
    if not bool(samples.isfinite().all()):
        raise ValueError(f"{path}: holds samples that are not numbers")
    if not bool(samples.any()):
        raise ValueError(f"{path}: holds nothing but silence")
    return samples

"""Plain arguments: checks, whose errors name the argument, what was given and what fits, and the way to a
device."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def number(name: str, value: Any, fits: str, ok: Callable[[Any], bool]) -> None:
    """`value` is a real number that is not NaN and passes `ok`."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: got {kind(value)}; it must be {fits}")
    if math.isnan(value) or not ok(value):
        raise ValueError(f"{name}: got {value!r}; it must be {fits}")


def integer(name: str, value: Any, fits: str, ok: Callable[[Any], bool]) -> None:
    """`value` is an int that passes `ok`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: got {kind(value)}; it must be {fits}")
    number(name, value, fits, ok)


def integers(name: str, value: Any, fits: str) -> None:
    """`value` is a tensor of integers."""
    if (
        not isinstance(value, Tensor)
        or value.is_floating_point()
        or value.is_complex()
        or value.dtype.itemsize < 4
    ):
        raise TypeError(f"{name}: got {kind(value)}; it must be {fits}")


def kind(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values as a tensor `[n]`, without making the host wait for the device."""
    if len(values) == 1:
        return torch.full((1,), values[0], dtype=dtype, device=device)
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)

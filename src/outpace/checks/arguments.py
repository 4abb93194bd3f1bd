"""Checks of scalar and tensor arguments, and transfers to a device.

Each error names the argument, the value it got and the values that fit.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from outpace.checks.errors import suggestion

P = ParamSpec("P")
R = TypeVar("R")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def number(name: str, value: Any, fits: str, ok: Callable[[Any], bool]) -> None:
    """Raise unless ``value`` is a real number that is not NaN and passes ``ok``."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: got {kind(value)}; it must be {fits}")
    if math.isnan(value) or not ok(value):
        raise ValueError(f"{name}: got {value!r}; it must be {fits}")


def integer(name: str, value: Any, fits: str, ok: Callable[[Any], bool]) -> None:
    """Raise unless ``value`` is an int that passes ``ok``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: got {kind(value)}; it must be {fits}")
    number(name, value, fits, ok)


def boolean(name: str, value: Any) -> None:
    """Raise unless ``value`` is True or False, of Python or of NumPy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: got {kind(value)[:80]}; it must be True or False")


def unknown(name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that does not exist; it names the most similar argument."""
    return TypeError(f"{name}: no such argument{suggestion(name, known)}")


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that an unknown argument raises an error that names a similar argument."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise unknown(name, known)
        return function(*args, **kwargs)

    return checked


def integers(name: str, value: Any, fits: str) -> None:
    """Raise unless ``value`` is an int64 or int32 tensor."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: got {kind(value)}; it must be {fits}")


def floats(name: str, value: Any) -> None:
    """Raise unless ``value`` is a tensor of a float dtype that logits may have."""
    if not isinstance(value, Tensor) or value.dtype not in FLOATS:
        raise TypeError(
            f"{name}: got {kind(value)}; it must be a float16, bfloat16, float32 or float64 tensor"
        )


def kind(value: Any) -> str:
    """Describe a value for an error message."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values as a tensor ``[n]``, without a synchronization of host and device."""
    if len(values) == 1:
        return torch.full((1,), values[0], dtype=dtype, device=device)
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


def overwrite(tensor: Tensor, values: Sequence[Any]) -> None:
    """Copy values from the host into a tensor, without a synchronization of host and device.

    Args:
        tensor: The tensor to overwrite.
        values: As many values, nested as the tensor's dimensions.
    """
    pinned = torch.tensor(values, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    tensor.copy_(pinned, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device, without a synchronization of host and device."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def row_integers(
    name: str, value: int | Sequence[int] | Tensor, rows: int, device: torch.device, least: int, most: int
) -> Tensor:
    """Return an argument of one int, or one per row, as int64 ``[rows]``.

    Each value must lie in ``least..most``. Values on a device other than the CPU are not checked.
    """
    if device.type != "cpu" and _is_int64_per_row(value, rows, device):
        return value
    fits = f"an int in {least}..{most}, or one per row"
    if isinstance(value, Tensor):
        integers(name, value, f"{fits}, or an int64 tensor")
        if value.shape not in ((), (rows,)):
            raise ValueError(
                f"{name}: got shape {tuple(value.shape)}; with {rows} rows it must be () or ({rows},)"
            )
        if value.device.type == "cpu" and value.numel():
            low, high = torch.aminmax(value)
            integer(name, int(low), fits, lambda low: low >= least)
            integer(name, int(high), fits, lambda high: high <= most)
        return to_device(value.to(torch.int64), device).expand(rows)
    if not isinstance(value, Sequence):
        integer(name, value, fits, lambda i: least <= i <= most)
        return torch.full((rows,), signed(value), dtype=torch.int64, device=device)
    if len(value) != rows:
        raise ValueError(f"{name}: got {len(value)} values for {rows} rows; give one int or one per row")
    for one in value:
        integer(name, one, fits, lambda i: least <= i <= most)
    return on_device([signed(one) for one in value], torch.int64, device)


def _is_int64_per_row(value: object, rows: int, device: torch.device) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value.device != device:
        return False
    return value.dtype is torch.int64 and value.shape == (rows,)


def int_or_row_integers(
    name: str, value: int | Sequence[int] | Tensor, rows: int, device: torch.device, least: int, most: int
) -> Tensor | int:
    """Return an argument as ``row_integers`` does, but a single int as an int."""
    if type(value) is int and least <= value <= most:  # the usual case
        return signed(value)
    if isinstance(value, Tensor | Sequence):
        return row_integers(name, value, rows, device, least, most)
    integer(name, value, f"an int in {least}..{most}, or one per row", lambda i: least <= i <= most)
    return signed(value)


def signed(value: int) -> int:
    """Return the same 64 bits as a signed integer."""
    return value - 2**64 if value >= 2**63 else value

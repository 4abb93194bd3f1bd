"""Buffers that each thread reuses.

On a CPU, page faults of newly allocated memory can cost far more than the arithmetic in it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_workspace = threading.local()


def reusable_buffer(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return this thread's CPU buffer ``name`` as a tensor of this shape and dtype.

    All calls with one name share memory, so the next call invalidates the result of this one.
    """
    buffer: Tensor | None = getattr(_workspace, name, None)
    size = math.prod(shape)
    if buffer is None or buffer.numel() < size or buffer.dtype is not dtype:
        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside it
            buffer = torch.empty(size, dtype=dtype)
        setattr(_workspace, name, buffer)
    return buffer[:size].view(shape)


def softmax(logits: Tensor, name: str) -> Tensor:
    """Return the softmax over the last axis, at least in float32.

    On the CPU, the result for float32 or float64 logits is in the reusable buffer ``name``.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if logits.device.type != "cpu" or dtype is not logits.dtype:
        return logits.softmax(-1, dtype=dtype)
    return torch.softmax(logits, -1, out=reusable_buffer(name, logits.shape, dtype))

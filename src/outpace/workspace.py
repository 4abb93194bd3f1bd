"""Buffers that a thread keeps: on a CPU, the page faults of fresh memory can dwarf the sums done in it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_workspace = threading.local()


def kept(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A view of this thread's buffer of that name, on the CPU: what the last call wrote there is gone."""
    buffer: Tensor | None = getattr(_workspace, name, None)
    size = math.prod(shape)
    if buffer is None or buffer.numel() < size or buffer.dtype is not dtype:
        with torch.inference_mode(False):  # a buffer made in that mode could not be written to outside it
            buffer = torch.empty(size, dtype=dtype)
        setattr(_workspace, name, buffer)
    return buffer[:size].view(shape)


def softmax(logits: Tensor, name: str) -> Tensor:
    """Softmax over the last axis, in float32 at least. On the CPU it lies in the buffer of that name."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if logits.device.type != "cpu" or dtype is not logits.dtype:
        return logits.softmax(-1, dtype=dtype)
    return torch.softmax(logits, -1, out=kept(name, logits.shape, dtype))

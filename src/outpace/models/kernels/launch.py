"""Properties of the device that kernels are launched on.

On some devices, a kernel can begin before the previous one has ended. It then fetches what does not depend on
other kernels, and waits for the end of the previous kernel (``gdc_wait``). Only then does it let the next
kernel begin. So every kernel before the previous one has ended.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import driver

HOPPER = 9, 0
KIBIBYTE = 1024
ALIGNED = 16  # bytes; alignment of what is prefetched


@dataclass(frozen=True)
class Device:
    """Properties of a device that the shapes of blocks depend on."""

    overlaps: bool  # whether kernels can begin before the previous one has ended
    processors: int
    shared: int  # bytes of shared memory that a block may have

    @property
    def options(self) -> dict[str, Any]:
        """Options of a kernel launch."""
        return {"launch_pdl": True} if self.overlaps else {}


@functools.lru_cache
def device(at: torch.device) -> Device:
    """Return the properties of a GPU.

    Without a GPU, they are those of an H200 whose kernels wait for each other.
    """
    if at.type != "cuda":
        return Device(False, 132, 227 * KIBIBYTE)
    index = torch.cuda.current_device() if at.index is None else at.index
    seen = driver.active.utils.get_device_properties(index)
    return Device(
        torch.cuda.get_device_capability(at) >= HOPPER, seen["multiprocessor_count"], seen["max_shared_mem"]
    )

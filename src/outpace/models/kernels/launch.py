"""What the device can do that kernels are launched on.

On some, a kernel can begin before the one before it has ended. It then fetches what does not depend on
others, waits for the end of the one before it (`gdc_wait`), and only then lets the next one begin: so that
whatever is two kernels back has ended.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import driver

HOPPER = 9, 0
KIBIBYTE = 1024
ALIGNED = 16  # bytes, of what is fetched ahead


@dataclass(frozen=True)
class Device:
    """What shapes of blocks depend on."""

    overlaps: bool  # whether kernels can begin before the one before them has ended
    processors: int
    shared: int  # bytes of shared memory that a block may have

    @property
    def options(self) -> dict[str, Any]:
        """Of a launch."""
        return {"launch_pdl": True} if self.overlaps else {}


@functools.lru_cache
def device(at: torch.device) -> Device:
    """Of the GPU there; where there is none, of an H200 whose kernels wait for each other."""
    if at.type != "cuda":
        return Device(False, 132, 227 * KIBIBYTE)
    index = torch.cuda.current_device() if at.index is None else at.index
    seen = driver.active.utils.get_device_properties(index)
    return Device(
        torch.cuda.get_device_capability(at) >= HOPPER, seen["multiprocessor_count"], seen["max_shared_mem"]
    )

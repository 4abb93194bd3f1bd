"""Kernels that begin before the one before them has ended, where the device can do that.

Such a kernel fetches what does not depend on others, then waits for the end of the one before it
(`gdc_wait`), and only then lets the next one begin: so that whatever is two kernels back has ended.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

HOPPER = 9


@functools.lru_cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options of such a kernel; none where kernels wait for each other's end."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER:
        return {"launch_pdl": True}
    return {}

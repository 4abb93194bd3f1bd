"""Launches of Triton kernels, and compilation of many kernels at once ahead of their first launch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
from torch import Tensor

_ahead: ContextVar[bool] = ContextVar("kernels are compiled and not launched", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> Any:
    """Launch a kernel; inside ``compiling_ahead``, only compile it.

    Returns:
        The compiled kernel, or None if there is none to launch again.
    """
    if not _ahead.get():
        return kernel[grid](*args, **settings)
    # Triton compiles for dtypes as for tensors whose addresses are multiples of 16.
    kernel.warmup(*(arg.dtype if isinstance(arg, Tensor) else arg for arg in args), grid=grid, **settings)
    return None


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the kernels that are launched in a ``with`` block, all at the same time, without running them.

    The results of launchers are then undefined, and so must not be used as indices.
    """
    token = _ahead.set(True)
    try:
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        _ahead.reset(token)

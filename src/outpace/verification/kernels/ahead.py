"""Launches of Triton kernels, and compilation of many kernels at once ahead of their first launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

Compile = Callable[[], Any]

_ahead: ContextVar[list[Compile] | None] = ContextVar("kernels compiled and not launched", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> Any:
    """Launch a kernel; inside ``compiling_ahead``, only compile it.

    Returns:
        The compiled kernel, or None if there is none to launch again.
    """
    kernels = _ahead.get()
    if kernels is None:
        return kernel[grid](*args, **settings)
    # Triton compiles for dtypes as for tensors whose addresses are multiples of 16.
    types = [arg.dtype if isinstance(arg, Tensor) else arg for arg in args]
    compile_once = functools.partial(kernel.warmup, *types, grid=grid, **settings)
    compile_once()
    kernels.append(compile_once)
    return None


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Compile and load the kernels that are launched in a ``with`` block, without running them.

    All of them are compiled at the same time, then all are loaded. The results of launchers are undefined,
    and so must not be used as indices.

    Args:
        device: The device that the kernels are loaded for.
    """
    kernels = list[Compile]()
    token = _ahead.set(kernels)
    choose = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    try:
        with ThreadPoolExecutor(initializer=choose) as threads:
            with triton.AsyncCompileMode(threads):
                yield
            # Loading is worth threads: some versions of Triton then compile a C function for each kernel.
            compiled = {id(kernel): kernel for kernel in (compile_once() for compile_once in kernels)}
            # Triton's interpreter compiles nothing, and returns None.
            list(threads.map(lambda kernel: kernel.run, filter(None, compiled.values())))
    finally:
        _ahead.reset(token)

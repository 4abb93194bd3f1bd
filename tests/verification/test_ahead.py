"""Kernels are compiled and loaded before their first launch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from outpace.verification import start_kernels

ahead = pytest.importorskip("outpace.verification.kernels.ahead", reason="needs triton", exc_type=ImportError)

CPU = torch.device("cpu")


class Kernel:
    """A kernel as Triton has it: compiled by ``warmup``, loaded by the first use of ``run``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.loads, self.launches = error, 0, 0
        self.types: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **settings: Any) -> str:
            self.launches += 1
            return "launched"

        return launch

    def warmup(self, *types: Any, grid: tuple[int, ...], **settings: Any) -> Kernel:
        self.types = types
        return self

    @property
    def run(self) -> None:
        if self.error is not None:
            raise self.error
        self.loads += 1


def test_kernels_are_compiled_for_dtypes_and_loaded_once_without_a_launch() -> None:
    first, second = Kernel(), Kernel()
    with ahead.compiling_ahead(CPU):
        for kernel in (first, second, first):
            assert ahead.launch(kernel, (1,), torch.zeros(2, dtype=torch.float16), 3, num_warps=4) is None
        assert first.loads == 0
    assert (first.loads, second.loads, first.launches) == (1, 1, 0)
    assert first.types == (torch.float16, 3)


def test_a_kernel_is_launched_outside_the_block() -> None:
    kernel = Kernel()
    with ahead.compiling_ahead(CPU):
        pass
    assert ahead.launch(kernel, (1,), torch.zeros(2)) == "launched"


def test_an_error_of_a_kernel_is_raised_and_later_launches_work() -> None:
    with pytest.raises(RuntimeError, match="out of resources"), ahead.compiling_ahead(CPU):
        ahead.launch(Kernel(RuntimeError("out of resources")), (1,))
    assert ahead.launch(Kernel(), (1,)) == "launched"


def test_the_kernels_are_loaded_once_in_a_thread() -> None:
    thread = start_kernels()
    thread.join()
    assert "outpace.verification.triton" in sys.modules
    assert start_kernels() is thread

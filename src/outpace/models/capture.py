"""CUDA graphs: GPU work that is captured once and then replayed without the host."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from outpace.models.store import say

QUIET_SECONDS = 1.0  # after which a slow first call says what it does
MAX_GRAPHS = 64  # then the least recently used graph is dropped

log = logging.getLogger("outpace")

Result = TypeVar("Result")

Captured = tuple[torch.cuda.CUDAGraph, Any]
"""A graph, and its result, whose tensors every replay overwrites."""


class CaptureError(Exception):
    """An error for work that could not be captured."""


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say on the terminal what a call waits for, if it takes longer than ``QUIET_SECONDS``."""
    timer = threading.Timer(QUIET_SECONDS, lambda: say(f"outpace: {what}; later calls do not wait for this"))
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Graphs:
    """Graphs of work that is repeated with the same tensors, captured when first needed.

    The graphs share memory: the result of one is valid until the next one runs.

    Args:
        device: Device of the work. There are graphs on CUDA only.

    Attributes:
        enabled: Whether there are graphs.
        failures: Why work could not be captured, by key.
        version: Number that changes when the set of graphs changes.
        capture_seconds: Seconds of all captures so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = device.type == "cuda"
        self._captured: dict[Hashable, Captured | None] = {}
        self.failures: dict[Hashable, str] = {}
        self.version, self.capture_seconds = 0, 0.0
        self._pool: Any = None

    def run(
        self, key: Hashable, work: Callable[[], Result], name: str, mutated: Sequence[Tensor] = ()
    ) -> tuple[Result, float]:
        """Run ``work`` as a graph where there can be one, and directly elsewhere.

        Args:
            key: Identifies the graph. Equal keys must mean equal work.
            work: The work. Its result has the same tensors after every replay.
            name: A name of the work for warnings and logs.
            mutated: Tensors that the work both reads and changes. Their values are restored after the
                capture.

        Returns:
            The result of ``work``, and the seconds that the capture took; 0 if there was none.
        """
        if not self.enabled:
            return work(), 0.0
        capture_seconds = 0.0
        if key in self._captured:
            self._captured[key] = self._captured.pop(key)  # now the most recently used
        else:
            capture_seconds = self._add(key, work, name, mutated)
            self.capture_seconds += capture_seconds
        captured = self._captured[key]
        if captured is None:
            return work(), capture_seconds
        graph, result = captured
        graph.replay()
        return result, capture_seconds

    def clear(self) -> None:
        """Discard all graphs."""
        self.version += len(self._captured) > 0
        self._captured.clear()
        self.failures.clear()
        self._pool = None

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys of all work that needs no further capture."""
        return iter(self._captured)

    def _add(self, key: Hashable, work: Callable[[], Any], name: str, mutated: Sequence[Tensor]) -> float:
        """Capture new work; return the seconds that it took."""
        self.version += 1
        if len(self._captured) >= MAX_GRAPHS:
            del self._captured[next(iter(self._captured))]
        started_at = time.perf_counter()
        saved = [tensor.clone() for tensor in mutated]
        try:
            with announced(f"capturing {name}"):
                self._captured[key] = self.capture(work)
        except CaptureError as error:
            self._captured[key], self.failures[key] = None, str(error)
            warnings.warn(
                f"{name} could not be captured as a graph ({error}): its kernels are launched one by one, "
                "which is slower",
                stacklevel=5,
            )
        else:
            log.info("%s was captured in %.1f s", name, time.perf_counter() - started_at)
        finally:
            for tensor, old in zip(mutated, saved, strict=True):
                tensor.copy_(old)
        return time.perf_counter() - started_at

    def capture(self, work: Callable[[], Any]) -> Captured:
        """Warm up, capture ``work`` and return the graph with its result.

        Raises:
            CaptureError: The work cannot be captured, or memory is short.
        """
        work()  # warm-up: compiles kernels and fills tables
        torch.cuda.synchronize()
        graph, current_stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=capture_stream):
                result = work()
        except Exception as error:  # out of memory, or work that cannot be captured
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise CaptureError(str(error).strip().split("\n")[0]) from error
        finally:  # torch does not restore the stream if the capture cannot be ended
            torch.cuda.set_stream(current_stream)
        self._pool = self._pool or graph.pool()
        return graph, result

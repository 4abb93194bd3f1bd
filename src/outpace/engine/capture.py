"""CUDA graphs: GPU work that is captured once and then replayed without the host."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 64  # graphs; then the least recently used one is dropped

log = logging.getLogger("outpace")

Captured = tuple[torch.cuda.CUDAGraph, Tensor]
"""A graph, and the tensor that holds its result."""


class CaptureError(Exception):
    """An error for work that could not be captured."""


class Graphs:
    """Graphs of work that is repeated with the same tensors, captured when first needed.

    The graphs share memory: the result of one is valid until the next one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self._made: dict[Hashable, Captured | None] = {}
        self.changes = 0  # of the set of graphs
        self._pool: Any = None

    def run(
        self, key: Hashable, work: Callable[[], Tensor], name: str, changes: Sequence[Tensor] = ()
    ) -> tuple[Tensor, float]:
        """Run ``work`` as a graph where there can be one, and directly elsewhere.

        Args:
            key: Identifies the graph. Equal keys must mean equal work.
            work: The work, which returns one tensor.
            name: A name of the work for warnings and logs.
            changes: Tensors that the work both reads and changes. Their values are restored after the
                capture.

        Returns:
            The result of ``work``, and the seconds that the capture took; 0 if there was none.
        """
        if not self.on:
            return work(), 0.0
        begun, new = time.perf_counter(), key not in self._made
        captured = self._get(key, work, name, changes)
        making = time.perf_counter() - begun if new else 0.0
        if captured is None:
            return work(), making
        graph, result = captured
        graph.replay()
        return result, making

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys of all work that needs no capture any more."""
        return iter(self._made)

    def _get(
        self, key: Hashable, work: Callable[[], Tensor], name: str, changes: Sequence[Tensor]
    ) -> Captured | None:
        if key in self._made:
            self._made[key] = self._made.pop(key)  # now the most recently used
            return self._made[key]
        self.changes += 1
        if len(self._made) >= MOST:
            del self._made[next(iter(self._made))]
        begun = time.perf_counter()
        before = [one.clone() for one in changes]
        try:
            self._made[key] = self.capture(work)
        except CaptureError as failed:
            self._made[key] = None
            warnings.warn(
                f"{name} could not be captured as a graph ({failed}): its kernels are launched one by one, "
                "which is slower",
                stacklevel=5,
            )
        finally:
            for one, old in zip(changes, before, strict=True):
                one.copy_(old)
        log.info("%s was made ready in %.1f s", name, time.perf_counter() - begun)
        return self._made[key]

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Warm up, capture ``work`` and return the graph with its result.

        Raises:
            CaptureError: The work cannot be captured, or memory is short.
        """
        work()  # warm-up: compiles kernels and fills tables
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=side):
                result = work()
        except Exception as error:  # out of memory, or work that cannot be captured
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise CaptureError(str(error).strip().split("\n")[0]) from error
        finally:  # torch does not restore it if the capture cannot be ended
            torch.cuda.set_stream(stream)
        self._pool = self._pool or graph.pool()
        return graph, result

"""Work on a GPU that is launched once and replayed from then on, without the host."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 64  # that are kept

log = logging.getLogger("outpace")

Captured = tuple[torch.cuda.CUDAGraph, Tensor]
"""A graph, and the tensor that holds what it returns."""


class CaptureError(Exception):
    """Work could not be captured."""


class Graphs:
    """Graphs of what is done again and again with the same tensors, made when first wanted. They share
    memory: what one returns is good until the next one runs."""

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self._made: dict[Hashable, Captured | None] = {}
        self.changes = 0  # of what is ready
        self._pool: Any = None

    def run(
        self, key: Hashable, work: Callable[[], Tensor], name: str, changes: Sequence[Tensor] = ()
    ) -> tuple[Tensor, float]:
        """Do what `work` does, which is always the same for a key, by a graph where there can be one. Returns
        what it returns, and the seconds in which the graph was made; 0 if it was there.

        changes  tensors that it changes, and reads: what trying it makes of them is put back
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
        """The keys of all that is ready."""
        return iter(self._made)

    def _get(
        self, key: Hashable, work: Callable[[], Tensor], name: str, changes: Sequence[Tensor]
    ) -> Captured | None:
        if key in self._made:
            self._made[key] = self._made.pop(key)  # the last one to be dropped
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
        work()  # kernels are compiled, and tables made
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=side):
                result = work()
        except Exception as error:  # out of memory, or what cannot be captured
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise CaptureError(str(error).strip().split("\n")[0]) from error
        finally:  # which is not done for us if the capture cannot be ended
            torch.cuda.set_stream(stream)
        self._pool = self._pool or graph.pool()
        return graph, result

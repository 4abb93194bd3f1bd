"""An iteration that was started, and what comes of it: the host reads it while the next one runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What an iteration brought to each row, as lists."""

    drafts: list[list[int]]
    accepted: list[int]
    next_token: list[int]
    bad: list[bool]

    def won(self, row: int) -> list[int]:
        """The tokens that a row gained."""
        return [*self.drafts[row][: self.accepted[row]], self.next_token[row]]


class Moment:
    """When the device comes to a point in what it was given to do."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event("cuda", enable_timing=True) if device.type == "cuda" else None
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Seconds, once both are over."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Pending:
    """An iteration that was started."""

    def __init__(self, result: Tensor, begun: Moment, making: float) -> None:
        """result: `[rows, 4 + g]` of accepted, next token, bad, how many were drafted, and drafts."""
        self._result, self._begun = result, begun
        self.making = making  # seconds in which it was made ready first; 0 if it was
        if result.is_cuda:
            # Into memory of its own: the next iteration writes over the result.
            self._result = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._result.copy_(result, non_blocking=True)
        self._arrived = Moment(result.device)

    @property
    def ready(self) -> bool:
        """Whether nothing had to be made for it first, which takes the host a while."""
        return not self.making

    @property
    def seconds(self) -> float | None:
        """What it took the device, after `read`; None if something was made ready meanwhile."""
        return self._arrived.since(self._begun) if self.ready else None

    def read(self) -> Outcome:
        """Wait for it."""
        self._arrived.wait()
        rows = self._result.tolist()
        return Outcome(
            [row[4 : 4 + row[3]] for row in rows],
            [row[0] for row in rows],
            [row[1] for row in rows],
            [bool(row[2]) for row in rows],
        )

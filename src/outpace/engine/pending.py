"""A started step and its outcome, which the host reads while the next step runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step for each slot, as lists.

    Attributes:
        drafts: The draft tokens.
        accepted: How many of them were accepted.
        next_token: The token that follows the accepted ones.
        bad: Whether logits were unusable.
    """

    drafts: list[list[int]]
    accepted: list[int]
    next_token: list[int]
    bad: list[bool]

    def won(self, row: int) -> list[int]:
        """Return the tokens that a slot's sequence gained."""
        return [*self.drafts[row][: self.accepted[row]], self.next_token[row]]


class Moment:
    """A point in the device's queue of work, and the time when the device reaches it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event("cuda", enable_timing=True) if device.type == "cuda" else None
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device reaches this point."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment, once the device has reached both."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Pending:
    """A step that was started."""

    def __init__(self, result: Tensor, begun: Moment, making: float) -> None:
        """Copy the result of a step to the host without waiting for it.

        Args:
            result: ``[rows, 4 + g]``: accepted, next token, bad, number of draft tokens, and the draft
                tokens.
            begun: The moment when the step started.
            making: Seconds that a capture took before it; 0 without one.
        """
        self._result, self._begun = result, begun
        self.making = making  # seconds that a capture took before it
        if result.is_cuda:
            # A copy, since the next step overwrites the result.
            self._result = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._result.copy_(result, non_blocking=True)
        self._arrived = Moment(result.device)

    @property
    def ready(self) -> bool:
        """True if no capture was needed first, which takes the host a while."""
        return not self.making

    @property
    def seconds(self) -> float | None:
        """Seconds that the device took, after ``read``; None if there was a capture meanwhile."""
        return self._arrived.since(self._begun) if self.ready else None

    def read(self) -> Outcome:
        """Wait for the step and return its outcome."""
        self._arrived.wait()
        rows = self._result.tolist()
        return Outcome(
            [row[4 : 4 + row[3]] for row in rows],
            [row[0] for row in rows],
            [row[1] for row in rows],
            [bool(row[2]) for row in rows],
        )

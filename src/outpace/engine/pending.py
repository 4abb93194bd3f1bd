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

    def new_tokens(self, slot: int) -> list[int]:
        """Return the new tokens of a slot's sequence."""
        return [*self.drafts[slot][: self.accepted[slot]], self.next_token[slot]]


class DeviceEvent:
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

    def since(self, earlier: DeviceEvent) -> float:
        """Return the seconds since an earlier event, once the device has reached both."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Pending:
    """A started step, whose outcome the host has not read yet."""

    def __init__(self, result: Tensor, started: DeviceEvent, capture_seconds: float) -> None:
        """Copy the result of a step to the host without waiting for it.

        Args:
            result: ``[rows, 4 + g]``: accepted, next token, bad, number of draft tokens, and the draft
                tokens.
            started: The event at the start of the step.
            capture_seconds: Seconds of a capture before the step; 0 without one.
        """
        self._result, self._started = result, started
        self.capture_seconds = capture_seconds
        if result.is_cuda:
            # Copy the result, because the next step overwrites it.
            self._result = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._result.copy_(result, non_blocking=True)
        self._ended = DeviceEvent(result.device)

    @property
    def needed_no_capture(self) -> bool:
        """True if no graph was captured for this step."""
        return not self.capture_seconds

    @property
    def seconds(self) -> float | None:
        """Seconds of the step on the device, once ``read`` has returned; None if there was a capture."""
        return self._ended.since(self._started) if self.needed_no_capture else None

    def read(self) -> Outcome:
        """Wait for the step and return its outcome."""
        self._ended.wait()
        rows = self._result.tolist()
        return Outcome(
            [row[4 : 4 + row[3]] for row in rows],
            [row[0] for row in rows],
            [row[1] for row in rows],
            [bool(row[2]) for row in rows],
        )

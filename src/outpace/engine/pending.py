"""A step that the device runs, and its outcome, which the host reads while the next step runs."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from outpace.engine.executor import Outcome, Pending


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


class GraphPending(Pending):
    """A step that the device runs.

    Args:
        result: ``[slots, 4 + g]``: accepted, next token, bad, number of draft tokens, and the draft tokens.
        capture_seconds: Seconds of a capture before the step; 0 without one.
        begun: The event before the catch-up.
        started: The event after the catch-up, at the start of the step.
        catch_up_capture_seconds: Seconds of a capture before the catch-up.
    """

    def __init__(
        self,
        result: Tensor,
        capture_seconds: float,
        begun: DeviceEvent,
        started: DeviceEvent,
        catch_up_capture_seconds: float = 0.0,
    ) -> None:
        self._result, self._begun, self._started = result, begun, started
        self.capture_seconds, self.catch_up_capture_seconds = capture_seconds, catch_up_capture_seconds
        if result.is_cuda:
            # Copy the result, because the next step overwrites it.
            self._result = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._result.copy_(result, non_blocking=True)
        self._ended = DeviceEvent(result.device)

    @property
    def seconds(self) -> float | None:
        """See ``Pending.seconds``; None if there was a capture."""
        return None if self.capture_seconds else self._ended.since(self._started)

    @property
    def catch_up_seconds(self) -> float:
        """See ``Pending.catch_up_seconds``; 0 if there was a capture."""
        return 0.0 if self.catch_up_capture_seconds else self._started.since(self._begun)

    def read(self) -> Outcome:
        """See ``Pending.read``."""
        self._ended.wait()
        rows = dict(enumerate(self._result.tolist()))
        return Outcome(
            {slot: row[4 : 4 + row[3]] for slot, row in rows.items()},
            {slot: row[0] for slot, row in rows.items()},
            {slot: row[1] for slot, row in rows.items()},
            {slot: bool(row[2]) for slot, row in rows.items()},
        )

"""A step that the device runs, and its outcome, which the host reads while the next step runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.engine.executor import Outcome, Pending
from outpace.engine.logprobs import Logprobs, Values
from outpace.engine.sequence import SequenceState
from outpace.sampling import Errors


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


@dataclass
class StepResult:
    """Result of a step on the device.

    Attributes:
        counts: Accepted, next token, bad, number of draft tokens, and the draft tokens, ``[slots, 4 + g]``.
        values: What sequences requested, by slot.
    """

    counts: Tensor
    values: Values


class GraphPending(Pending):
    """A step that the device runs.

    Args:
        result: The result, which the next step overwrites.
        sequences: The sequences of the step, by slot.
        capture_seconds: Seconds of a capture before the step; 0 without one.
        begun: The event before the catch-up.
        started: The event after the catch-up, at the start of the step.
        catch_up_capture_seconds: Seconds of a capture before the catch-up.
        errors: Errors of processors, by slot.
        cut: Gets the slots whose drafts ended early. Unless bias or allowed tokens left no token, the KV
            cache of the draft model then has NaN.
        limits: As in ``Executor.start``.
    """

    def __init__(
        self,
        result: StepResult,
        sequences: Mapping[int, SequenceState],
        capture_seconds: float,
        begun: DeviceEvent,
        started: DeviceEvent,
        catch_up_capture_seconds: float = 0.0,
        errors: Errors | None = None,
        cut: set[int] | None = None,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        self._limits = limits or {}
        self._cut = set[int]() if cut is None else cut
        self._sequences, self._begun, self._started = sequences, begun, started
        self.capture_seconds, self.catch_up_capture_seconds = capture_seconds, catch_up_capture_seconds
        self._errors = errors or {}
        values, self._counts = result.values, to_host(result.counts)
        logprobs = None if values.logprobs is None else Logprobs(*map(to_host, values.logprobs))
        kept = (None if one is None else one.clone() for one in (values.scores, values.logits))
        self._values = Values(logprobs, *kept)
        self._ended = DeviceEvent(result.counts.device)
        self._outcome: Outcome | None = None

    @property
    def seconds(self) -> float | None:
        """See ``Pending.seconds``; None if there was a capture."""
        return None if self.capture_seconds else self._ended.since(self._started)

    @property
    def catch_up_seconds(self) -> float:
        """See ``Pending.catch_up_seconds``; 0 if there was a capture."""
        return 0.0 if self.catch_up_capture_seconds else self._started.since(self._begun)

    def read(self) -> Outcome:
        """See ``Pending.read``; log-probabilities, scores and logits are stored in the sequences."""
        if self._outcome is None:
            self._ended.wait()
            rows = dict(enumerate(self._counts.tolist()))
            self._outcome = Outcome(
                {slot: row[4 : 4 + row[3]] for slot, row in rows.items()},
                {slot: row[0] for slot, row in rows.items()},
                {slot: row[1] for slot, row in rows.items()},
                {slot: bool(row[2]) for slot, row in rows.items()},
            ).with_errors(self._errors)
            for slot, sequence in self._sequences.items():
                if sequence.finish_reason is None:  # else it has ended after this step started
                    if rows[slot][3] < self._limits.get(slot, self._counts.shape[1] - 4):
                        self._cut.add(slot)
                    self._values.store(sequence, self._outcome.num_new_tokens(slot), slot)
        return self._outcome


def to_host(result: Tensor) -> Tensor:
    """Begin to copy a result to memory of the host, because the next step overwrites it."""
    if not result.is_cuda:
        return result
    copied = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    return copied.copy_(result, non_blocking=True)

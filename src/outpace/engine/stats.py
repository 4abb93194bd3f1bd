"""Statistics of a generation: draft tokens, acceptance and seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class Stats:
    """Counts and seconds of one sequence's generation.

    ``sum(stats, Stats())`` adds up sequences. In a batch, each sequence gets an equal share of the seconds of
    a step, so that the sum is the elapsed time. The host measures the seconds. On CUDA, work of the device
    counts in the phase in which the host waits for it.

    The graph executor measures a step as a whole. Its ``target_seconds`` include prefill, verification and
    drafting in the graph, and its ``verify_seconds`` are 0.

    Attributes:
        new_tokens: Generated tokens.
        target_passes: Steps that this sequence took part in. The eager executor counts the prefill as a step.
            The graph executor does not.
        draft_tokens: Draft tokens that the target scored.
        accepted_tokens: Draft tokens that the rule accepted.
        draft_tokens_by_position: Number of first, second, ... draft tokens.
        accepted_by_position: Number of first, second, ... draft tokens that were accepted.
        steps_by_num_draft_tokens: Number of decode steps with 0, 1, ... draft tokens.
        seconds_by_num_draft_tokens: Seconds of those steps. Each sequence of a batch counts the whole step.
        exploration_seconds: Seconds that were lost in steps that the draft-length policy chose to learn. They
            are part of the other seconds.
        encode_seconds: Seconds of the target's encoder; 0 without an encoder. The seconds of the draft
            model's encoder are part of those of drafting.
        draft_seconds: Seconds of drafting.
        target_seconds: Seconds of the target's forward passes.
        verify_seconds: Seconds of verification.
        other_seconds: The rest of the seconds.
    """

    new_tokens: int = 0
    target_passes: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_tokens_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    steps_by_num_draft_tokens: list[int] = field(default_factory=list)
    seconds_by_num_draft_tokens: list[float] = field(default_factory=list)
    exploration_seconds: float = 0.0
    encode_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """The accepted fraction of the draft tokens; 0 if there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per step, as counted by ``target_passes``."""
        return self.new_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def speculative_share(self) -> float:
        """The fraction of decode steps with draft tokens; 0 if there were no steps."""
        steps = sum(self.steps_by_num_draft_tokens)
        return sum(self.steps_by_num_draft_tokens[1:]) / steps if steps else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        phases = self.draft_seconds, self.target_seconds, self.verify_seconds, self.other_seconds
        return self.encode_seconds + sum(phases)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second; 0 if no time was measured."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def count(self, drafted: int, accepted: int) -> None:
        """Count the draft tokens of one step."""
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for counts, n in ((self.draft_tokens_by_position, drafted), (self.accepted_by_position, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(n):
                counts[i] += 1

    def time_step(self, drafted: int, seconds: float) -> None:
        """Record the seconds of one decode step."""
        missing = drafted + 1 - len(self.steps_by_num_draft_tokens)
        self.steps_by_num_draft_tokens.extend([0] * missing)
        self.seconds_by_num_draft_tokens.extend([0.0] * missing)
        self.steps_by_num_draft_tokens[drafted] += 1
        self.seconds_by_num_draft_tokens[drafted] += seconds

    def __add__(self, other: Stats) -> Stats:
        summed: dict[str, Any] = {}
        for name, value in vars(self).items():
            other_value = getattr(other, name)
            if isinstance(value, list):
                summed[name] = [sum(pair) for pair in zip_longest(value, other_value, fillvalue=0)]
            else:
                summed[name] = value + other_value
        return Stats(**summed)


class Clock:
    """Seconds of a step by phase."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Add the seconds since the last lap to a phase."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def share(self, sequences: Sequence[Stats]) -> dict[str, float]:
        """Record the remaining seconds as "other", and add an equal share of all phases to each sequence.

        Returns:
            The seconds of the step by phase.
        """
        self.lap("other")
        for stats in sequences:
            for phase, seconds in self._seconds.items():
                name = f"{phase}_seconds"
                setattr(stats, name, getattr(stats, name) + seconds / len(sequences))
        return self._seconds

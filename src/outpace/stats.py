"""What happened: how much was drafted and kept, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class Stats:
    """Counts and seconds of one row's generation; they add up over rows: `sum(stats, Stats())`.

    new_tokens            tokens that came out
    target_calls          passes of the target that this row took part in, the prompt's included
    drafted, accepted     tokens guessed, and kept by the rule
    drafted_by_position   how often a first, second, ... token was guessed
    accepted_by_position  how often it was kept
    encode_seconds        of taking in what encoders read, the draft's included, where there are any
    draft_seconds, target_seconds, verify_seconds, other_seconds
                          in a batch each row gets its even share, so that the sum is what the clock showed.
                          On CUDA the host measures: work that it did not wait for counts where it waits next
    """

    new_tokens: int = 0
    target_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    encode_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def acceptance(self) -> float:
        """Share of guesses kept; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_call(self) -> float:
        """New tokens per pass of the target."""
        return self.new_tokens / self.target_calls if self.target_calls else 0.0

    @property
    def seconds(self) -> float:
        each = self.draft_seconds, self.target_seconds, self.verify_seconds, self.other_seconds
        return self.encode_seconds + sum(each)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def count(self, drafted: int, accepted: int) -> None:
        """One iteration's guesses."""
        self.drafted += drafted
        self.accepted += accepted
        for counts, n in ((self.drafted_by_position, drafted), (self.accepted_by_position, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(n):
                counts[i] += 1

    def __add__(self, other: Stats) -> Stats:
        summed: dict[str, Any] = {}
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            if isinstance(mine, list):
                summed[name] = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
            else:
                summed[name] = mine + theirs
        return Stats(**summed)


class Clock:
    """Seconds of an iteration by what they were spent on."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spent: dict[str, float] = {}

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self._spent[what] = now - self._last
        self._last = now

    def took(self, what: str, seconds: float) -> None:
        """Seconds since the last lap, that something else has timed."""
        self._spent[what] = seconds
        self._last += seconds

    def share(self, rows: Sequence[Stats]) -> dict[str, float]:
        """The rest is "other"; each row gets its share of what all is."""
        self.lap("other")
        for stats in rows:
            for what, seconds in self._spent.items():
                name = f"{what}_seconds"
                setattr(stats, name, getattr(stats, name) + seconds / len(rows))
        return self._spent

"""Time that may be spent, and how much of it is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Budget:
    """So many seconds from now, by this clock.

    Stages end at a share of the whole: what one leaves, the next has.
    """

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"budget: got {seconds:g}; it must be a number of seconds > 0")
        self.seconds, self._clock = seconds, clock
        self._begun = clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._begun

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of all of them is spent; below 0 after that."""
        return share * self.seconds - self.spent

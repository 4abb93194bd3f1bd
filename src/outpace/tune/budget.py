"""A time budget, and how much of it is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Budget:
    """A number of seconds that starts to run now.

    A stage ends at a share of the whole budget. Time that a stage does not use goes to the next one.

    Args:
        seconds: The whole budget.
        clock: Function that returns the time in seconds.

    Raises:
        ValueError: The number of seconds is not positive and finite.
    """

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"budget: got {seconds:g}; it must be a number of seconds > 0")
        self.seconds, self._clock = seconds, clock
        self._started_at = clock()

    @property
    def spent(self) -> float:
        """Seconds spent so far."""
        return self._clock() - self._started_at

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the budget is spent; below 0 after that."""
        return share * self.seconds - self.spent

"""What may be lost, so that what is not known can be tried."""

from __future__ import annotations

import math

FIRST = 8.0  # to begin with
INCOME = 0.0075  # of each iteration
MOST = 24.0  # that is remembered as won
LEAST = -4.0  # and as lost: a machine may have slept
ACCIDENT = -3.0  # no more than which is booked for one iteration
SHARE = 0.02  # of the time, that tries take while there is something to spend
DEAR = 4.0  # more is not spent on any


class Account:
    """In plain passes: what was won and lost against plain decoding, and what may be.

    balance  what there is to spend
    """

    def __init__(self) -> None:
        self.balance = FIRST

    def book(self, gain: float) -> None:
        """Of an iteration."""
        self.balance = min(MOST, max(LEAST, self.balance + max(gain, ACCIDENT) + INCOME))

    @property
    def overdrawn(self) -> float:
        return max(0.0, -self.balance)

    def wait(self, loss: float, since: int) -> float:
        """Iterations until a try is due that is expected to lose so much, so many after the last."""
        if loss > DEAR:
            return math.inf
        return max(loss / SHARE - since, (loss - self.balance) / INCOME)

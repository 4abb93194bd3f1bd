"""What may be lost, so that what is not known can be tried."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 8.0  # to begin with
INCOME = 0.0075  # of each iteration
SAVED = 12.0  # that there is of that, at most: a long rest is no reason to lose much more
MOST = 24.0  # that is remembered as won
LEAST = -4.0  # and as lost: a machine may have slept
ACCIDENT = 3.0  # no more than which is booked for one iteration beyond what was expected
SHARE = 0.02  # of the time, that tries take while there is something to spend
READING = 0.06  # with what a draft reads for them
DEAR = 4.0  # more is spent on none,
SELDOM = 512  # unless the last is so many iterations ago


@dataclass(frozen=True)
class Price:
    """What a try is expected to lose, in plain passes.

    loss     in the iteration itself
    reading  as a draft has to read what was written without it
    once     as something has to be made ready
    """

    loss: float
    reading: float = 0.0
    once: float = 0.0

    @property
    def each_time(self) -> float:
        return self.loss + self.reading


class Account:
    """In plain passes: what was won and lost against plain decoding, and what may be.

    balance  what there is to spend
    """

    def __init__(self) -> None:
        self.balance = FIRST

    def book(self, gain: float, expected: float = 0.0, once: float = 0.0) -> None:
        """Of an iteration, which was expected to lose so much; once: what making something ready took."""
        balance = min(MOST, max(LEAST, self.balance + max(gain, -ACCIDENT - expected)))
        balance -= min(once, max(0.0, balance))  # for which guesses are not to blame
        self.balance = max(balance, min(SAVED, balance + INCOME))

    @property
    def overdrawn(self) -> float:
        return max(0.0, -self.balance)

    def wait(self, price: Price, since: float) -> float:
        """Iterations until a try at this price is due, so many after the last."""
        due = max(price.loss / SHARE, price.each_time / READING) if price.each_time <= DEAR else SELDOM
        enough = price.each_time + price.once
        waits = [min(SELDOM, due) - since, (min(enough, SAVED) - self.balance) / INCOME]
        lacking = enough - max(SAVED, self.balance)
        if lacking > 0:  # there may never be as much: as if it had been saved since
            waits.append(lacking / INCOME - since)
        return max(waits)

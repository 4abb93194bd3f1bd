"""Exploration budget: the time that probes may lose.

The unit is one baseline step.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 8.0  # initial balance
INCOME = 0.0075  # per step
SAVED = 12.0  # balance up to which there is income: a long rest is no reason to lose much more
MOST = 24.0  # largest balance
LEAST = -4.0  # smallest balance: a machine may have slept
ACCIDENT = 3.0  # largest loss booked for one step beyond the expected one
SHARE = 0.02  # of the time, that probes may lose
READING = 0.06  # of the time, that probes may lose with catching up
DEAR = 4.0  # loss above which a probe is expensive
SELDOM = 512  # steps between expensive probes


@dataclass(frozen=True)
class Price:
    """Expected loss of a probe, in baseline steps.

    Attributes:
        loss: Loss in the step itself.
        reading: Cost of catching up, if the draft model must read tokens generated without it.
        once: Cost of a capture.
    """

    loss: float
    reading: float = 0.0
    once: float = 0.0

    @property
    def each_time(self) -> float:
        """Loss without the capture."""
        return self.loss + self.reading


class ExplorationBudget:
    """Exploration budget: gains and losses against decoding without speculation, in baseline steps.

    Attributes:
        balance: Baseline steps that probes may spend.
    """

    def __init__(self) -> None:
        self.balance = FIRST

    def book(self, gain: float, expected: float = 0.0, once: float = 0.0) -> None:
        """Book the gain of one step, or its loss.

        Args:
            gain: Gain against a baseline step. A loss is negative.
            expected: Loss that was expected of the step.
            once: Cost of captures.
        """
        balance = min(MOST, max(LEAST, self.balance + max(gain, -ACCIDENT - expected)))
        balance -= min(once, max(0.0, balance))  # draft tokens are not to blame for a capture
        self.balance = max(balance, min(SAVED, balance + INCOME))

    @property
    def overdrawn(self) -> float:
        """Debt: the amount by which the balance is below 0."""
        return max(0.0, -self.balance)

    def wait(self, price: Price, since: float) -> float:
        """Return the number of steps until a probe is due.

        Args:
            price: Expected loss of the probe.
            since: Steps since the last draft.
        """
        due = max(price.loss / SHARE, price.each_time / READING) if price.each_time <= DEAR else SELDOM
        enough = price.each_time + price.once
        waits = [min(SELDOM, due) - since, (min(enough, SAVED) - self.balance) / INCOME]
        lacking = enough - max(SAVED, self.balance)
        if lacking > 0:  # income stops before: pretend that it went on since the last draft
            waits.append(lacking / INCOME - since)
        return max(waits)

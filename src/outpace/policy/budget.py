"""Exploration budget: the time that probes may lose.

The unit is one baseline step.
"""

from __future__ import annotations

from dataclasses import dataclass

INITIAL_BALANCE = 8.0  # baseline steps
INCOME = 0.0075  # baseline steps per step
INCOME_LIMIT = 12.0  # baseline steps; at this balance income stops, so that long pauses add no more
MAX_BALANCE = 24.0  # baseline steps
MIN_BALANCE = -4.0  # baseline steps; limits the debt, so that one long stall does not end all probes
MAX_UNEXPECTED_LOSS = 3.0  # baseline steps booked for one step beyond its expected loss
LOSS_FRACTION = 0.02  # fraction of the time that probes may lose, without their catch-up
CATCH_UP_LOSS_FRACTION = 0.06  # fraction of the time that probes may lose, with their catch-up
EXPENSIVE_LOSS = 4.0  # baseline steps; above this, a probe is expensive
EXPENSIVE_INTERVAL = 512  # steps between expensive probes


@dataclass(frozen=True)
class Price:
    """Expected loss of a probe, in baseline steps.

    Attributes:
        loss: Loss in the step itself.
        catch_up: Cost of the catch-up, in which the draft model processes tokens generated without it.
        capture: Cost of a capture.
    """

    loss: float
    catch_up: float = 0.0
    capture: float = 0.0

    @property
    def recurring(self) -> float:
        """Loss without the capture, which happens once."""
        return self.loss + self.catch_up


class ExplorationBudget:
    """Balance of gains and losses against decoding without speculation, in baseline steps.

    Attributes:
        balance: Baseline steps that probes may spend.
    """

    def __init__(self) -> None:
        self.balance = INITIAL_BALANCE

    def book(self, gain: float, expected_loss: float = 0.0, capture: float = 0.0) -> None:
        """Book the gain of one step, or its loss.

        Args:
            gain: Gain against a baseline step. A loss is negative.
            expected_loss: Loss that was expected of the step.
            capture: Cost of captures.
        """
        balance = min(
            MAX_BALANCE, max(MIN_BALANCE, self.balance + max(gain, -MAX_UNEXPECTED_LOSS - expected_loss))
        )
        balance -= min(capture, max(0.0, balance))  # captures cause no debt: they happen once for each g
        self.balance = max(balance, min(INCOME_LIMIT, balance + INCOME))

    @property
    def debt(self) -> float:
        """Amount by which the balance is below 0."""
        return max(0.0, -self.balance)

    def steps_until_due(self, price: Price, steps_since_draft: float) -> float:
        """Return the number of steps until a probe is due.

        Args:
            price: Expected loss of the probe.
            steps_since_draft: Steps since the last draft.
        """
        interval = (
            max(price.loss / LOSS_FRACTION, price.recurring / CATCH_UP_LOSS_FRACTION)
            if price.recurring <= EXPENSIVE_LOSS
            else EXPENSIVE_INTERVAL
        )
        total = price.recurring + price.capture
        waits = [
            min(EXPENSIVE_INTERVAL, interval) - steps_since_draft,
            (min(total, INCOME_LIMIT) - self.balance) / INCOME,
        ]
        lacking = total - max(INCOME_LIMIT, self.balance)
        if lacking > 0:  # income stops below this price: wait as long as the missing income would take
            waits.append(lacking / INCOME - steps_since_draft)
        return max(waits)

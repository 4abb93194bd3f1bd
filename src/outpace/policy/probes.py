"""Schedule of probes: drafts that are not expected to pay, or that nothing is known about."""

from __future__ import annotations

import math

from outpace.policy.budget import SELDOM, ExplorationBudget, Price

AGAIN = 8  # steps without news after which any draft is a probe, whatever the estimate
PATIENCE = 40  # steps until the policy decides again, at most
LATE = 4  # steps after which a probe without an outcome has failed
MADE = 12.0  # baseline steps that a probe is charged for a capture, at most: it happens once


def booked(seconds: float, plain: float) -> float:
    """Return the cost of a capture, in baseline steps, that a probe is charged."""
    return min(seconds / plain, MADE)


class Probes:
    """Schedule of probes, one at a time: the next one waits for the outcome of the last.

    Attributes:
        account: Exploration budget that pays for the probes.
        went_well: True if the last draft was a successful probe, or followed one. The next probe may then
            come at once.
        untried: True if no outcome of any draft is known yet.
    """

    def __init__(self, account: ExplorationBudget) -> None:
        self.budget = account
        self.went_well = False
        self.untried = True
        self._time = 0  # steps so far
        self._blind = 0  # steps since anything was learned about draft tokens
        self._rested = 0  # steps since the last draft
        self._wait = 0  # steps until the policy decides again
        self._open: tuple[Price, int] | None = None  # the probe without an outcome yet, and its step

    @property
    def blind(self) -> bool:
        """True if too little was learned lately for any estimate."""
        return self._blind >= AGAIN

    def rest(self) -> bool:
        """Return whether this step is too early to decide again, and count it."""
        resting = self._wait > 0
        self._wait -= resting
        return resting

    def make(self, price: Price) -> None:
        """Open a probe at this price."""
        self._open = price, self._time

    def withdraw(self) -> None:
        """Cancel the probe that was opened last."""
        self._open = None

    def make_if_due(self, price: Price, hopeless: bool, thinking: float) -> bool:
        """Open a probe at this price, if one is due.

        Args:
            price: Expected loss of the probe.
            hopeless: True if the costs speak against any g. They may have changed since.
            thinking: Least number of steps until the policy decides again, because a decision takes time.

        Returns:
            True if the probe was opened.
        """
        wait = self.budget.wait(price, math.inf if self.went_well else self._rested)
        if hopeless:
            wait = max(wait, SELDOM - self._rested)
        if self._open is not None:  # its outcome decides
            return False
        if wait > 0:
            # If this step brought news without a draft, more may come at any time.
            self._wait = round(min(PATIENCE, max(wait if self._blind else 0, thinking)))
            return False
        self.make(price)
        return True

    def over(self, proposed: bool) -> Price | None:
        """Count one step.

        Args:
            proposed: True if the step had draft tokens.

        Returns:
            Price of the probe that ended with this step, or None.
        """
        self._time += 1
        self._blind += 1
        self._rested += 1
        if proposed:
            self._rested = self._wait = 0
        if self._open is None or not (proposed or self._time > self._open[1] + LATE):
            return None
        price, _ = self._open
        self._open = None
        return price

    def heard(self, went_well: bool) -> None:
        """Record that this step brought news about draft tokens.

        Args:
            went_well: True if the news speaks for another probe at once.
        """
        self.went_well, self.untried, self._blind = went_well, False, 0

    def another_text(self) -> None:
        """Forget the last success, because the next sequence may differ."""
        self.went_well, self._wait = False, 0

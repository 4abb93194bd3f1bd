"""Limit on how often a free drafter proposes.

A proposal takes time, too: beside a small model on a CPU, a few hundredths of a forward pass.
"""

from __future__ import annotations

SHARE = 0.01  # of the time, that proposals may take while they do not pay
SELDOM = 7  # steps without a proposal, at most
GRACE = 1.0  # baseline steps that proposals may cost before they gain anything
WON = 4.0  # baseline steps of earlier gains that proposals may cost later, at most


class QueryBudget:
    """Balance of the gains and costs of a free drafter's proposals, in baseline steps.

    Attributes:
        rest: Remaining steps without a proposal.
    """

    def __init__(self) -> None:
        self.rest = 0
        self._won = GRACE

    def book(self, taken: float, gain: float, right: bool) -> None:
        """Book a step with a proposal.

        Args:
            taken: Cost of the proposal, in baseline steps.
            gain: Gain from its draft tokens, in baseline steps.
            right: True if an unscored draft token would have been accepted. Then the next one may be, too.
        """
        self._won = min(WON, max(0.0, self._won) + gain - taken)
        if self._won < 0 and not right:
            self.rest = min(SELDOM, int(taken / SHARE))

    def over(self) -> None:
        """Count one step."""
        self.rest = max(0, self.rest - 1)

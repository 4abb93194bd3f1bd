"""Limit on how often a free drafter proposes.

A proposal takes time, too. For a small target on a CPU, it takes a few hundredths of a forward pass.
"""

from __future__ import annotations

MAX_TIME_FRACTION = 0.01  # fraction of the time that proposals may take while they do not pay
MAX_PAUSE = 7  # steps without a proposal
INITIAL_BALANCE = 1.0  # baseline steps that proposals may cost before they gain anything
MAX_BALANCE = 4.0  # baseline steps of earlier gains that proposals may cost later


class ProposalBudget:
    """Balance of the gains and costs of a free drafter's proposals, in baseline steps.

    Attributes:
        pause: Remaining steps without a proposal.
    """

    def __init__(self) -> None:
        self.pause = 0
        self._balance = INITIAL_BALANCE

    def book(self, cost: float, gain: float, correct: bool) -> None:
        """Book a step with a proposal.

        Args:
            cost: Cost of the proposal, in baseline steps.
            gain: Gain from its draft tokens, in baseline steps.
            correct: True if a proposed token that was not scored was correct. Then there is no pause.
        """
        self._balance = min(MAX_BALANCE, max(0.0, self._balance) + gain - cost)
        if self._balance < 0 and not correct:
            self.pause = min(MAX_PAUSE, int(cost / MAX_TIME_FRACTION))

    def end_step(self) -> None:
        """Count one step."""
        self.pause = max(0, self.pause - 1)

"""Schedule of probes: speculative steps that are taken to learn.

A number of draft tokens pays if its throughput is higher than that of decoding without speculation. A probe
is run although it is not expected to pay, or although nothing is known about it.
"""

from __future__ import annotations

import math

from outpace.policy.budget import EXPENSIVE_INTERVAL, ExplorationBudget, Price

STALE_AFTER = 8  # steps without an outcome of a draft; then any draft is a probe, whatever the estimate
MAX_DECISION_INTERVAL = 40  # steps until the policy decides again
PROBE_TIMEOUT = 4  # steps after which a probe without an outcome has failed
MAX_CAPTURE_PRICE = 12.0  # baseline steps that a probe is charged for a capture, which happens once


def capture_price(seconds: float, baseline_seconds: float) -> float:
    """Return the cost that a probe is charged for a capture, in baseline steps."""
    return min(seconds / baseline_seconds, MAX_CAPTURE_PRICE)


class Probes:
    """Schedule of probes, one at a time: the next one waits for the outcome of the last.

    Attributes:
        budget: Exploration budget that pays for the probes.
        succeeded: True if the last draft was a successful probe, or followed one. Then the next probe may
            start at once.
        no_outcome_yet: True if no outcome of any draft is known yet.
    """

    def __init__(self, budget: ExplorationBudget) -> None:
        self.budget = budget
        self.succeeded = False
        self.no_outcome_yet = True
        self._step = 0  # steps so far
        self._steps_since_outcome = 0  # steps since anything was learned about draft tokens
        self._steps_since_draft = 0
        self._steps_to_decision = 0  # steps until the policy decides again
        self._pending: tuple[Price, int] | None = None  # the probe without an outcome yet, and its step

    @property
    def stale(self) -> bool:
        """True if there was no outcome for ``STALE_AFTER`` steps, so that estimates may no longer hold."""
        return self._steps_since_outcome >= STALE_AFTER

    def skip_decision(self) -> bool:
        """Return whether this step is too early to decide again, and count it."""
        skip = self._steps_to_decision > 0
        self._steps_to_decision -= skip
        return skip

    def start(self, price: Price) -> None:
        """Start a probe at this price."""
        self._pending = price, self._step

    def withdraw(self) -> None:
        """Cancel the probe that was started last."""
        self._pending = None

    def start_if_due(self, price: Price, hopeless: bool, min_wait: float) -> bool:
        """Start a probe at this price, if one is due.

        Args:
            price: Expected loss of the probe.
            hopeless: True if no g would pay at the measured costs, even with a high acceptance rate. Costs
                may change, so probes still run, but rarely.
            min_wait: Least number of steps until the policy decides again, because a decision takes time.

        Returns:
            True if the probe was started.
        """
        wait = self.budget.steps_until_due(price, math.inf if self.succeeded else self._steps_since_draft)
        if hopeless:
            wait = max(wait, EXPENSIVE_INTERVAL - self._steps_since_draft)
        if self._pending is not None:  # wait for its outcome
            return False
        if wait > 0:
            # If this step had an outcome, the next one may have one too, so the policy decides again soon.
            self._steps_to_decision = round(
                min(MAX_DECISION_INTERVAL, max(wait if self._steps_since_outcome else 0, min_wait))
            )
            return False
        self.start(price)
        return True

    def end_step(self, drafted: bool) -> Price | None:
        """Count one step.

        Args:
            drafted: True if the step had draft tokens.

        Returns:
            Price of the probe that ended with this step, or None.
        """
        self._step += 1
        self._steps_since_outcome += 1
        self._steps_since_draft += 1
        if drafted:
            self._steps_since_draft = self._steps_to_decision = 0
        if self._pending is None or not (drafted or self._step > self._pending[1] + PROBE_TIMEOUT):
            return None
        price, _ = self._pending
        self._pending = None
        return price

    def record_outcome(self, succeeded: bool) -> None:
        """Record that this step showed whether draft tokens are accepted.

        Args:
            succeeded: True if the outcome justifies another probe at once.
        """
        self.succeeded, self.no_outcome_yet, self._steps_since_outcome = succeeded, False, 0

    def new_sequence(self) -> None:
        """Forget the last success, because the next sequence may differ."""
        self.succeeded, self._steps_to_decision = False, 0

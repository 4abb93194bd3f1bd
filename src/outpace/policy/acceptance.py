"""Acceptance estimate: how many draft tokens of a sequence will be accepted.

Each sequence has an acceptance rate α that may jump at any step. The estimate is the exact Bayesian filter of
this hidden Markov model over a few values of α. A run of k accepted draft tokens has likelihood α^k. If a
rejected one follows, the likelihood is multiplied by 1 − α. This is the filter of piecewise constant rates
(Adams and MacKay 2007) in discrete form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outpace.policy.config import GoodputConfig

ALPHAS = 1 / (1 + np.exp(-np.linspace(-6, 6, 25)))  # 0.0025 to 0.9975, evenly spaced in log-odds


class AcceptanceEstimate:
    """Probability of each α, for each slot.

    Args:
        max_draft_tokens: Largest number of draft tokens G.
        config: Settings of the policy.
    """

    def __init__(self, max_draft_tokens: int, config: GoodputConfig) -> None:
        self._config, self._most = config, max_draft_tokens
        powers = ALPHAS[:, None] ** np.arange(max_draft_tokens + 1)  # [25, G + 1]
        self._tokens = powers.cumsum(1)  # [25, G + 1]: expected tokens of a step, by α and g
        # [2·(G + 1), 25]: likelihood of 0, 1, ... accepted draft tokens, then with a rejection after them
        self._likelihood = np.concatenate((powers.T, powers.T * (1 - ALPHAS)))
        # Estimate for a new sequence, which also holds after a jump
        self._new = np.full(len(ALPHAS), 1 / len(ALPHAS))
        self._estimate = np.zeros((0, len(ALPHAS)))  # by slot

    def expected_tokens(self, slots: Sequence[int], limits: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the expected tokens of a step per sequence, by number of draft tokens: ``[G + 1]``.

        Args:
            slots: Slots of the sequences.
            limits: Largest useful number of draft tokens of each sequence.
        """
        self._grow(slots)
        tokens: npt.NDArray[np.float64] = self._estimate.take(slots, 0) @ self._tokens  # [R, G + 1]
        if min(limits) < self._most:  # draft tokens beyond the limit add nothing
            np.minimum(tokens, tokens[np.arange(len(slots)), limits][:, None], out=tokens)
        mean: npt.NDArray[np.float64] = np.add.reduce(tokens) / len(slots)
        return mean

    def learn(self, slots: Sequence[int], tested: Sequence[int], correct: Sequence[int]) -> None:
        """Update the estimate with the outcome of a step.

        Args:
            slots: Slots of the sequences.
            tested: Number of draft tokens of each slot that are known to be correct or wrong.
            correct: Number of those before the first wrong one.
        """
        self._grow(slots)
        self._estimate += (self._new - self._estimate) * self._config.jump_probability
        if not any(tested):
            return
        most, wrong = self._most, self._most + 1
        outcomes = [
            min(k, most) if k >= min(n, most) else wrong + k for n, k in zip(tested, correct, strict=True)
        ]
        estimate = self._estimate.take(slots, 0) * self._likelihood.take(outcomes, 0)  # [R, 25]
        estimate /= np.add.reduce(estimate, 1)[:, None]
        self._estimate[slots] = estimate
        if not all(tested):
            estimate = estimate[np.not_equal(tested, 0)]
        share, R = self._config.uniform_share, len(estimate)
        mean = (1 - share) / R * np.add.reduce(estimate) + share / len(ALPHAS)
        self._new += (1 - (1 - 1 / self._config.prior_outcomes) ** R) * (mean - self._new)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the sequences in these slots."""
        self._grow(slots)
        self._estimate[list(slots)] = self._new

    def mean(self) -> float:
        """Return the mean α of recent sequences."""
        share = self._config.uniform_share
        return float(self._new @ ALPHAS - share * ALPHAS.mean()) / (1 - share)

    def _grow(self, slots: Sequence[int]) -> None:
        missing = max(slots, default=-1) + 1 - len(self._estimate)
        if missing > 0:
            self._estimate = np.concatenate((self._estimate, np.tile(self._new, (missing, 1))))

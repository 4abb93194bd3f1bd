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
        self._powers = powers[:, 1:]
        # [2·(G + 1), 25]: likelihood of 0, 1, ... accepted draft tokens, then with a rejection after them
        self._likelihood = np.concatenate((powers.T, powers.T * (1 - ALPHAS)))
        self._prefixes = np.tri(max_draft_tokens + 1, max_draft_tokens, -1)  # row n: n ones, then zeros
        self._recent = np.full(len(ALPHAS), 1 / len(ALPHAS))  # mean of recent estimates
        self._estimate = np.zeros((0, len(ALPHAS)))  # by slot

    def expected_tokens(self, slots: Sequence[int], limits: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the expected tokens of a step per sequence, by number of draft tokens: ``[G + 1]``.

        Args:
            slots: Slots of the sequences.
            limits: Largest useful number of draft tokens of each sequence.
        """
        self._grow(slots)
        accepted = (self._estimate[list(slots)] @ self._powers) * self._prefixes[list(limits)]  # [R, G]
        return np.concatenate(([1.0], 1 + accepted.sum(0).cumsum() / len(slots)))

    def learn(self, slots: Sequence[int], tested: Sequence[int], correct: Sequence[int]) -> None:
        """Update the estimate with the outcome of a step.

        Args:
            slots: Slots of the sequences.
            tested: Number of draft tokens of each slot that are known to be correct or wrong.
            correct: Number of those before the first wrong one.
        """
        self._grow(slots)
        jump, most, half = self._config.jump_probability, self._most, len(self._likelihood) // 2
        self._estimate = (1 - jump) * self._estimate + jump * self._new()
        known = [each for each in zip(slots, tested, correct, strict=True) if each[1]]
        if known:
            rows = [slot for slot, *_ in known]
            outcomes = [min(k, most) if k >= min(n, most) else half + k for _, n, k in known]
            estimate = self._estimate[rows] * self._likelihood[outcomes]
            estimate /= estimate.sum(1, keepdims=True)
            self._estimate[rows] = estimate
            weight = 1 - (1 - 1 / self._config.prior_outcomes) ** len(known)
            self._recent += weight * (estimate.mean(0) - self._recent)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the sequences in these slots."""
        self._grow(slots)
        self._estimate[list(slots)] = self._new()

    def mean(self) -> float:
        """Return the mean α of recent sequences."""
        return float(self._recent @ ALPHAS)

    def _new(self) -> npt.NDArray[np.float64]:
        """Return the estimate for a new sequence, which also holds after a jump: ``[25]``."""
        share = self._config.uniform_share
        return share / len(ALPHAS) + (1 - share) * self._recent

    def _grow(self, slots: Sequence[int]) -> None:
        missing = max(slots, default=-1) + 1 - len(self._estimate)
        if missing > 0:
            self._estimate = np.concatenate((self._estimate, np.tile(self._new(), (missing, 1))))

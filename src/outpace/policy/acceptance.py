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

Array = npt.NDArray[np.float64]

ALPHAS = 1 / (1 + np.exp(-np.linspace(-6, 6, 25)))  # 0.0025 to 0.9975, evenly spaced in log-odds
LEVELS = 4  # confidence levels of a free drafter, each with its own α


def confidence_level(confidence: float) -> int:
    """Return the level of a drafter's confidence in [0, 1]; a NaN counts as 0."""
    return int(LEVELS * confidence) if 0 <= confidence < 1 else (LEVELS - 1) * (confidence >= 1)


class AcceptanceEstimate:
    """Probability of each α, for each slot and confidence level.

    Args:
        max_draft_tokens: Largest number of draft tokens G.
        config: Settings of the policy.
    """

    def __init__(self, max_draft_tokens: int, config: GoodputConfig) -> None:
        self._config = config
        powers = ALPHAS[:, None] ** np.arange(max_draft_tokens + 1)  # [25, G + 1]
        self._powers: Array = powers[:, 1:]
        # [2·(G + 1), 25]: likelihood of 0, 1, ... accepted draft tokens, then with a rejection after them
        self._likelihood = np.concatenate((powers.T, powers.T * (1 - ALPHAS)))
        self._prefixes = np.tri(max_draft_tokens + 1, max_draft_tokens, -1)  # row n: n ones, then zeros
        self._recent = np.full((LEVELS, len(ALPHAS)), 1 / len(ALPHAS))  # mean of recent estimates
        self._outcomes = [0] * LEVELS
        self._estimate = np.zeros((0, LEVELS, len(ALPHAS)))  # by slot

    def expected_tokens(self, slots: Sequence[int], levels: Sequence[int], limits: Sequence[int]) -> Array:
        """Return the expected tokens of a step per sequence, by number of draft tokens: ``[G + 1]``.

        Args:
            slots: Slots of the sequences.
            levels: Confidence level of each sequence.
            limits: Largest useful number of draft tokens of each sequence.
        """
        estimate = self._estimate_of(self._rows(slots, levels))
        accepted = (estimate @ self._powers) * self._prefixes[list(limits)]  # [R, G]
        return np.concatenate(([1.0], 1 + accepted.sum(0).cumsum() / len(slots)))

    def learn(
        self, slots: Sequence[int], levels: Sequence[int], tested: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Update the estimate with the outcome of a step.

        Args:
            slots: Slots with draft tokens.
            levels: Confidence level of each slot.
            tested: Number of draft tokens of each slot, at least one.
            accepted: Number of accepted draft tokens of each slot.
        """
        rows, half = self._rows(slots, levels), len(self._likelihood) // 2
        outcomes = [k if k == most else half + k for k, most in zip(accepted, tested, strict=True)]
        estimate = self._estimate_of(rows) * self._likelihood[np.array(outcomes)]
        estimate /= estimate.sum(1, keepdims=True)
        self._estimate.reshape(-1, len(ALPHAS))[rows] = estimate
        for level in set(levels):
            ones = estimate if levels.count(level) == len(levels) else estimate[rows % LEVELS == level]
            weight = 1 - (1 - 1 / self._config.prior_outcomes) ** len(ones)
            self._recent[level] += weight * (ones.sum(0) / len(ones) - self._recent[level])
            self._outcomes[level] += len(ones)

    def next_step(self) -> None:
        """Let each α jump with the probability of one step."""
        self._estimate *= 1 - self._config.jump_probability
        self._estimate += self._config.jump_probability * self._new()

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the sequences in these slots."""
        self._grow(slots)
        self._estimate[list(slots)] = self._new()

    def mean(self) -> float:
        """Return the mean α of recent sequences."""
        weights = self._outcomes if any(self._outcomes) else [1] * LEVELS
        return float(np.average(self._recent @ ALPHAS, weights=weights))

    def _new(self) -> Array:
        """Return the estimate for a new sequence, which also holds after a jump: ``[LEVELS, 25]``."""
        share = self._config.uniform_share
        return share / len(ALPHAS) + (1 - share) * self._recent

    def _rows(self, slots: Sequence[int], levels: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the rows of the estimate, as ``[slots · LEVELS, 25]``, of these slots at these levels."""
        self._grow(slots)
        return np.array([LEVELS * slot + level for slot, level in zip(slots, levels, strict=True)])

    def _estimate_of(self, rows: npt.NDArray[np.int64]) -> Array:
        return self._estimate.reshape(-1, len(ALPHAS))[rows]

    def _grow(self, slots: Sequence[int]) -> None:
        missing = max(slots, default=-1) + 1 - len(self._estimate)
        if missing > 0:
            self._estimate = np.concatenate((self._estimate, np.tile(self._new(), (missing, 1, 1))))

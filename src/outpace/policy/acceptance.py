"""Acceptance estimate: the probability that draft tokens are accepted.

Each sequence has an acceptance rate α that may jump at any step. The model is a hidden Markov model over a
few values of α, with the exact Bayesian filter. A run of k accepted draft tokens has likelihood α^k. If a
rejected one follows, the likelihood is multiplied by 1 − α. At each step α stays the same, or jumps to a new
value with probability ``JUMP_PROBABILITY``. So the estimate of a steady sequence keeps improving, and after a
jump it adapts within a few draft tokens. This is the filter of piecewise constant rates (Adams and MacKay
2007) in discrete form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LOG_ODDS = np.linspace(-6, 6, 25)
ALPHAS = 1 / (1 + np.exp(-LOG_ODDS))  # 0.0025 to 0.9975
JUMP_PROBABILITY = 0.01  # probability that a sequence's acceptance rate jumps at a step
PRIOR_UPDATE_WEIGHT = 0.05  # weight of each new posterior in the prior of new sequences
JUMP_UNIFORM_SHARE = 0.2  # uniform share of the prior after a jump
NEW_UNIFORM_SHARE = 0.05  # uniform share of the prior of a new sequence
POSITION_PRIOR_WEIGHT = 30.0  # draft tokens; prior weight of no correction by position
DECAY = 0.995  # factor on the weight of a draft for each later one


class AcceptanceEstimate:
    """Posterior of each slot over ``ALPHAS``, and the prior of new sequences.

    Args:
        max_draft_tokens: Largest number of draft tokens.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        # [len(ALPHAS), max_draft_tokens]: powers 1, 2, ... of each α
        self._powers = ALPHAS[:, None] ** np.arange(1, max_draft_tokens + 1)
        # [max_draft_tokens + 1, max_draft_tokens]: 1 for the first 0, 1, ... draft tokens
        self.prefix_mask = np.tri(max_draft_tokens + 1, max_draft_tokens, -1)
        # [2, max_draft_tokens + 1, len(ALPHAS)]: likelihood of 0, 1, ... accepted draft tokens, first without
        # and then with a rejected one after them
        runs = ALPHAS ** np.arange(max_draft_tokens + 1)[:, None]
        self._likelihood = np.stack((runs, runs * (1 - ALPHAS)))
        self.prior = np.full(len(ALPHAS), 1 / len(ALPHAS))  # mean posterior of recent sequences
        self._posterior: Array = np.zeros((0, len(ALPHAS)))  # by slot
        self.step = 0  # steps so far
        self._updated_at = np.zeros(0, dtype=np.int64)  # by slot, the step of the posterior; -1: unknown
        # Draft tokens accepted at each position: the number observed, and the number expected.
        self._observed, self._expected = np.zeros(max_draft_tokens), np.zeros(max_draft_tokens)
        self._prefix_probability: Array | None = None  # cached result of `prefix_probability`

    def posterior(self, slots: Sequence[int]) -> Array:
        """Return the posterior of these slots at the current step.

        At each step since the last update, the acceptance rate of a sequence may have jumped.

        Returns:
            Probabilities ``[R, len(ALPHAS)]``.
        """
        missing = max(slots) + 1 - len(self._posterior)
        if missing > 0:
            self._posterior = np.concatenate((self._posterior, np.zeros((missing, len(ALPHAS)))))
            self._updated_at = np.concatenate((self._updated_at, np.full(missing, -1)))
        index = np.asarray(slots)
        posterior: Array = self._posterior[index]
        updated_at = self._updated_at[index]
        oldest = updated_at.min()
        if oldest < self.step:
            no_jump = (1 - JUMP_PROBABILITY) ** (self.step - updated_at)
            after_jump = _mix_uniform(self.prior, JUMP_UNIFORM_SHARE)
            posterior = after_jump + no_jump[:, None] * (posterior - after_jump)
            if oldest < 0:
                posterior[updated_at < 0] = _mix_uniform(self.prior, NEW_UNIFORM_SHARE)
            self._posterior[index], self._updated_at[index] = posterior, self.step
        return posterior

    def prefix_probability(self, shift: Array | None = None) -> Array:
        """Return the probability that the first 1, 2, ... draft tokens are all accepted, by α.

        Args:
            shift: Number added to the log-odds of α.

        Returns:
            Probabilities ``[..., len(ALPHAS), max_draft_tokens]``.
        """
        if shift is None and self._prefix_probability is not None:
            return self._prefix_probability
        # Accepted draft tokens at each position, relative to the number that a constant α predicts
        correction = np.minimum(
            np.maximum(
                (self._observed + POSITION_PRIOR_WEIGHT) / (self._expected + POSITION_PRIOR_WEIGHT), 0.5
            ),
            1.5,
        )
        powers = self._powers if shift is None else self._powers_of(_shifted_alphas(shift))
        result: Array = np.minimum.accumulate(np.minimum(powers * correction, 1.0), axis=-1)
        if shift is None:
            self._prefix_probability = result
        return result

    def learn(
        self, slots: Sequence[int], tested: npt.ArrayLike, accepted: npt.ArrayLike, shift: Array | None = None
    ) -> None:
        """Update the posterior with the outcome of drafts.

        Args:
            slots: Slots of the sequences.
            tested: Number of draft tokens per slot, at least one.
            accepted: Number of accepted draft tokens per slot.
            shift: ``[R]``, added to the log-odds of α, because the drafter's confidence is known.
        """
        num_tested = np.minimum(tested, self.max_draft_tokens)
        num_accepted = np.minimum(accepted, self.max_draft_tokens)
        posterior, rejected = self.posterior(slots), num_accepted < num_tested
        if shift is None:
            expected = posterior @ self._powers
            likelihood = self._likelihood[rejected.astype(int), num_accepted]
        else:
            alphas = _shifted_alphas(shift)  # [R, len(ALPHAS)]
            expected = (posterior[:, None] @ self._powers_of(alphas))[:, 0]
            likelihood = alphas ** num_accepted[:, None] * np.where(rejected[:, None], 1 - alphas, 1.0)
        decay = DECAY ** len(slots)
        self._observed = decay * self._observed + self.prefix_mask[num_accepted].sum(0)
        self._expected = decay * self._expected + (expected * self.prefix_mask[num_tested]).sum(0)
        posterior = posterior * likelihood
        posterior /= posterior.sum(axis=1, keepdims=True)
        self._posterior[np.asarray(slots)] = posterior
        weight = 1 - (1 - PRIOR_UPDATE_WEIGHT) ** len(slots)
        self.prior += weight * (posterior.sum(0) / len(slots) - self.prior)
        self._prefix_probability = None

    def _powers_of(self, alphas: Array) -> Array:
        """Return the powers 1, 2, ... of each α, ``[..., max_draft_tokens]``."""
        powers: Array = np.multiply.accumulate(
            np.broadcast_to(alphas[..., None], (*alphas.shape, self.max_draft_tokens)), axis=-1
        )
        return powers

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the posterior of these slots."""
        self._updated_at[[slot for slot in slots if slot < len(self._updated_at)]] = -1


def _mix_uniform(prior: Array, share: float) -> Array:
    """Mix the prior with a uniform share."""
    return share / len(ALPHAS) + (1 - share) * prior


def _shifted_alphas(shift: Array) -> Array:
    """Return each α with ``shift`` added to its log-odds, ``[..., len(ALPHAS)]``."""
    alphas: Array = 1 / (1 + np.exp(-LOG_ODDS - shift[..., None]))
    return alphas


class ConfidenceCorrection:
    """Correction of the acceptance rate by the drafter's own confidence.

    For each confidence level, it compares the acceptance rate of this level with that of all draft tokens.
    The correction is the difference of their log-odds.
    """

    LEVELS = 8
    PRIOR_WEIGHT = 4.0  # draft tokens; prior weight of no correction

    def __init__(self) -> None:
        self._accepted, self._tested = np.zeros(self.LEVELS), np.zeros(self.LEVELS)  # by level

    def level(self, confidence: Sequence[float]) -> Ints:
        """Return the confidence level of each number in [0, 1]."""
        confidences = np.nan_to_num(np.asarray(confidence, dtype=float))
        levels: Ints = np.clip((confidences * self.LEVELS).astype(np.int64), 0, self.LEVELS - 1)
        return levels

    def shifts(self) -> Array:
        """Return the number to add to the log-odds of acceptance, by level: ``[LEVELS]``."""
        overall = (self._accepted.sum() + 1) / (self._tested.sum() + 2)
        by_level = (self._accepted + self.PRIOR_WEIGHT * overall) / (self._tested + self.PRIOR_WEIGHT)
        shifts: Array = np.log(by_level / (1 - by_level)) - np.log(overall / (1 - overall))
        return shifts

    def learn(self, levels: Ints, accepted: npt.NDArray[np.bool_]) -> None:
        """Record which draft tokens of these confidence levels were accepted."""
        decay = DECAY ** len(levels)
        self._accepted = decay * self._accepted + np.bincount(levels, accepted, self.LEVELS)
        self._tested = decay * self._tested + np.bincount(levels, minlength=self.LEVELS)

"""Acceptance estimate: the probability that draft tokens are accepted.

Each sequence has an acceptance rate α that may jump at any step. The model is a hidden Markov model over a
few values of α, with the exact Bayesian filter. A run of k accepted draft tokens has likelihood α^k. If a
rejected one follows, the likelihood is multiplied by 1 − α. At each step α keeps its value, or jumps to a new
one with probability ``CHANGE``. So a steady sequence is known ever better, and after a jump a handful of
draft tokens is enough. This is the filter of piecewise constant rates (Adams and MacKay 2007) in discrete
form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Levels = npt.NDArray[np.int64]

ODDS = np.linspace(-6, 6, 25)
ALPHAS = 1 / (1 + np.exp(-ODDS))  # 0.0025 to 0.9975
CHANGE = 0.01  # probability that a sequence's acceptance rate jumps at a step
LEARN = 0.05  # weight of each new posterior in the prior of new sequences
OPEN = 0.2  # uniform share of the prior after a jump
NEW = 0.05  # uniform share of the prior of a new sequence
CALM = 30.0  # prior weight, in draft tokens, of no correction by position
FADE = 0.995  # factor on the weight of a test for each later one


class AcceptanceEstimate:
    """Posterior of each slot over ``ALPHAS``, and the prior of new sequences.

    Args:
        most: Largest number of draft tokens.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._steady = ALPHAS[:, None] ** np.arange(1, most + 1)  # [len(ALPHAS), most]
        self.first = np.tri(most + 1, most, -1)  # [most + 1, most]: 1 for the first 0, 1, ... draft tokens
        # [2, most + 1, len(ALPHAS)]: likelihood of 0, 1, ... accepted, without and with a rejected one next
        runs = ALPHAS ** np.arange(most + 1)[:, None]
        self._likely = np.stack((runs, runs * (1 - ALPHAS)))
        self.usual = np.full(len(ALPHAS), 1 / len(ALPHAS))  # mean posterior of recent sequences
        self._rows: Array = np.zeros((0, len(ALPHAS)))  # by slot
        self.time = 0  # steps so far
        self._seen = np.zeros(0, dtype=np.int64)  # by slot, the step of the posterior; -1: unknown
        # Draft tokens accepted at each position: the number seen, and the number expected.
        self._came, self._expected = np.zeros(most), np.zeros(most)
        self._reach: Array | None = None  # cached result of `reach`

    def now(self, rows: Sequence[int]) -> Array:
        """Return the posterior of these slots at the current step.

        At each step since the last update, a sequence may have jumped.

        Returns:
            Probabilities ``[R, len(ALPHAS)]``.
        """
        missing = max(rows) + 1 - len(self._rows)
        if missing > 0:
            self._rows = np.concatenate((self._rows, np.zeros((missing, len(ALPHAS)))))
            self._seen = np.concatenate((self._seen, np.full(missing, -1)))
        slots = np.asarray(rows)
        found: Array = self._rows[slots]
        seen = self._seen[slots]
        oldest = seen.min()
        if oldest < self.time:
            stayed = (1 - CHANGE) ** (self.time - seen)
            jumped = _open(self.usual, OPEN)
            found = jumped + stayed[:, None] * (found - jumped)
            if oldest < 0:
                found[seen < 0] = _open(self.usual, NEW)
            self._rows[slots], self._seen[slots] = found, self.time
        return found

    def reach(self, shift: Array | None = None) -> Array:
        """Return the probability that the first 1, 2, ... draft tokens are all accepted, by α.

        Args:
            shift: Number added to the log-odds of α.

        Returns:
            Probabilities ``[..., len(ALPHAS), most]``.
        """
        if shift is None and self._reach is not None:
            return self._reach
        # Accepted draft tokens at each position, relative to what a constant α predicts
        correction = np.minimum(np.maximum((self._came + CALM) / (self._expected + CALM), 0.5), 1.5)
        steady = self._steady if shift is None else self._runs(_shifted(shift))
        found: Array = np.minimum.accumulate(np.minimum(steady * correction, 1.0), axis=-1)
        if shift is None:
            self._reach = found
        return found

    def learn(
        self, rows: Sequence[int], tested: npt.ArrayLike, kept: npt.ArrayLike, shift: Array | None = None
    ) -> None:
        """Update the posterior with the outcome of drafts.

        Args:
            rows: Slots of the sequences.
            tested: Number of tested draft tokens per slot, at least one.
            kept: Number of those that were accepted, from the first on.
            shift: ``[R]``, added to the log-odds of α, if these draft tokens were known to be better or
                worse.
        """
        tries, good = np.minimum(tested, self.most), np.minimum(kept, self.most)
        belief, lost = self.now(rows), good < tries
        if shift is None:
            hoped, likely = belief @ self._steady, self._likely[lost.astype(int), good]
        else:
            alphas = _shifted(shift)  # [R, len(ALPHAS)]
            hoped = (belief[:, None] @ self._runs(alphas))[:, 0]
            likely = alphas ** good[:, None] * np.where(lost[:, None], 1 - alphas, 1.0)
        fade = FADE ** len(rows)
        self._came = fade * self._came + self.first[good].sum(0)
        self._expected = fade * self._expected + (hoped * self.first[tries]).sum(0)
        belief = belief * likely
        belief /= belief.sum(axis=1, keepdims=True)
        self._rows[np.asarray(rows)] = belief
        self.usual += (1 - (1 - LEARN) ** len(rows)) * (belief.sum(0) / len(rows) - self.usual)
        self._reach = None

    def _runs(self, alphas: Array) -> Array:
        """Return the powers 1, 2, ... of each α, ``[..., most]``."""
        found: Array = np.multiply.accumulate(
            np.broadcast_to(alphas[..., None], (*alphas.shape, self.most)), axis=-1
        )
        return found

    def forget(self, rows: Sequence[int]) -> None:
        """Forget the posterior of these slots."""
        self._seen[[row for row in rows if row < len(self._seen)]] = -1


def _open(usual: Array, share: float) -> Array:
    """Mix the prior with a uniform share."""
    return share / len(ALPHAS) + (1 - share) * usual


def _shifted(shift: Array) -> Array:
    """Return each α with ``shift`` added to its log-odds, ``[..., len(ALPHAS)]``."""
    found: Array = 1 / (1 + np.exp(-ODDS - shift[..., None]))
    return found


class Signal:
    """Correction of the acceptance rate by the drafter's own confidence.

    For each level of confidence it estimates how much more often draft tokens are accepted than all are, in
    log-odds.
    """

    LEVELS = 8
    CALM = 4.0  # prior weight, in draft tokens, of no correction

    def __init__(self) -> None:
        self._kept, self._tested = np.zeros(self.LEVELS), np.zeros(self.LEVELS)

    def level(self, confidence: Sequence[float]) -> Levels:
        """Return the confidence level of each number in [0, 1]."""
        found = np.nan_to_num(np.asarray(confidence, dtype=float))
        levels: Levels = np.clip((found * self.LEVELS).astype(np.int64), 0, self.LEVELS - 1)
        return levels

    def shifts(self) -> Array:
        """Return the number to add to the log-odds of acceptance, by level: ``[LEVELS]``."""
        usual = (self._kept.sum() + 1) / (self._tested.sum() + 2)
        share = (self._kept + self.CALM * usual) / (self._tested + self.CALM)
        shifts: Array = np.log(share / (1 - share)) - np.log(usual / (1 - usual))
        return shifts

    def learn(self, levels: Levels, kept: npt.NDArray[np.bool_]) -> None:
        """Record which draft tokens of these confidence levels were accepted."""
        fade = FADE ** len(levels)
        self._kept = fade * self._kept + np.bincount(levels, kept, self.LEVELS)
        self._tested = fade * self._tested + np.bincount(levels, minlength=self.LEVELS)

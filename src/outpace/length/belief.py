"""How likely guesses are to be kept, as far as is known.

Each row has an acceptance α that may jump at any iteration: a hidden Markov model over a few values, with the
exact Bayesian filter. A run of k kept guesses has likelihood α^k, and (1 − α) more if another was lost; at
each iteration α stays what it was but for a chance CHANGE that it is drawn anew. So a steady row is known
ever better, and after a jump a handful of guesses is enough. (The filter of piecewise constant rates: Adams
and MacKay 2007 in discrete form.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Levels = npt.NDArray[np.int64]

ODDS = np.linspace(-6, 6, 25)
ALPHAS = 1 / (1 + np.exp(-ODDS))  # 0.0025 to 0.9975
CHANGE = 0.01  # chance that a row's acceptance jumps at an iteration
LEARN = 0.05  # how quickly new rows are taken to be like the last ones
OPEN = 0.2  # how much of what a row jumps to is left open
NEW = 0.05  # and of what a new row is like
CALM = 30.0  # tests that a correction by position counts as much as
FADE = 0.995  # what is left of a test's weight after another


class Belief:
    """Of each slot, how likely each α of ALPHAS is; and what new rows are like."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._steady = ALPHAS[:, None] ** np.arange(1, most + 1)  # [len(ALPHAS), most]
        self.first = np.tri(most + 1, most, -1)  # [most + 1, most]: 1 for the first 0, 1, ... guesses
        # [2, most + 1, len(ALPHAS)]: of 0, 1, ... kept guesses, without one more that was lost and with it
        runs = ALPHAS ** np.arange(most + 1)[:, None]
        self._likely = np.stack((runs, runs * (1 - ALPHAS)))
        self.usual = np.full(len(ALPHAS), 1 / len(ALPHAS))  # what rows were like lately
        self._rows: Array = np.zeros((0, len(ALPHAS)))  # by slot
        self.time = 0  # iterations so far
        self._seen = np.zeros(0, dtype=np.int64)  # by slot, the time that is meant; -1 if nothing is known
        # Guesses that reached each position and were kept: as many as there were, and as were expected.
        self._came, self._expected = np.zeros(most), np.zeros(most)
        self._reach: Array | None = None  # what follows from that

    def now(self, rows: Sequence[int]) -> Array:
        """`[R, len(ALPHAS)]`, after the iterations since, at each of which a row may have jumped."""
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
        """`[..., len(ALPHAS), most]`: probability that the first 1, 2, ... guesses are all kept, by α; shift:
        what is added to the log-odds of α."""
        if shift is None and self._reach is not None:
            return self._reach
        # By what factor guesses come further or less far than rows with a steady α would have it
        correction = np.minimum(np.maximum((self._came + CALM) / (self._expected + CALM), 0.5), 1.5)
        steady = self._steady if shift is None else self._runs(_shifted(shift))
        found: Array = np.minimum.accumulate(np.minimum(steady * correction, 1.0), axis=-1)
        if shift is None:
            self._reach = found
        return found

    def learn(
        self, rows: Sequence[int], tested: npt.ArrayLike, kept: npt.ArrayLike, shift: Array | None = None
    ) -> None:
        """Of so many guesses of each row that were tested, at least one, the first so many were kept; shift,
        `[R]`: what was added to the log-odds of α, if these guesses were known to be better or worse."""
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
        """`[..., most]`: each to the powers 1, 2, ..."""
        found: Array = np.multiply.accumulate(
            np.broadcast_to(alphas[..., None], (*alphas.shape, self.most)), axis=-1
        )
        return found

    def forget(self, rows: Sequence[int]) -> None:
        self._seen[[row for row in rows if row < len(self._seen)]] = -1


def _open(usual: Array, share: float) -> Array:
    """What is usual, but for a share that may be anything."""
    return share / len(ALPHAS) + (1 - share) * usual


def _shifted(shift: Array) -> Array:
    """`[..., len(ALPHAS)]`: each α, with so much added to its log-odds."""
    found: Array = 1 / (1 + np.exp(-ODDS - shift[..., None]))
    return found


class Signal:
    """What a drafter's own confidence says about its guess: by how much, in log-odds, guesses of each level
    of confidence are kept more often than all."""

    LEVELS = 8
    CALM = 4.0  # guesses that are taken to be like all others

    def __init__(self) -> None:
        self._kept, self._tested = np.zeros(self.LEVELS), np.zeros(self.LEVELS)

    def level(self, confidence: Sequence[float]) -> Levels:
        """Of numbers in [0, 1]."""
        found = np.nan_to_num(np.asarray(confidence, dtype=float))
        levels: Levels = np.clip((found * self.LEVELS).astype(np.int64), 0, self.LEVELS - 1)
        return levels

    def shifts(self) -> Array:
        """`[LEVELS]`: what to add to the log-odds of acceptance."""
        usual = (self._kept.sum() + 1) / (self._tested.sum() + 2)
        share = (self._kept + self.CALM * usual) / (self._tested + self.CALM)
        shifts: Array = np.log(share / (1 - share)) - np.log(usual / (1 - usual))
        return shifts

    def learn(self, levels: Levels, kept: npt.NDArray[np.bool_]) -> None:
        """Of guesses of these levels, whether they were kept."""
        fade = FADE ** len(levels)
        self._kept = fade * self._kept + np.bincount(levels, kept, self.LEVELS)
        self._tested = fade * self._tested + np.bincount(levels, minlength=self.LEVELS)

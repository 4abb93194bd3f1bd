"""Pearson's χ² of counts against exact probabilities: p-values, power, and a test of up to three looks.

A misplacement of δ is a total variation distance of δ: that much of the probability lies on other outcomes
than it should. By Cauchy and Schwarz Σ(q − p)²/p >= (Σ|q − p|)² = 4δ², with equality where every probability
is wrong by the same factor 1 ± 2δ. So N samples of any misplacement δ give the statistic a noncentrality of
at least 4δ²N, and a power that is computed from 4δ²N holds for the least favourable misplacement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CERTAINTY = 0.99  # of finding what is `detectable`
LOOK_AGAIN = 0.05  # p-values below this are settled by more samples
SUSPICIOUS = 1e-3  # p-values below this, after the last look, are no agreement
LOOKS = (
    1 / 8,
    1.0,
    1.7,
)  # times the samples: early for large faults, then all, then more where it is unsettled
SPENT = 0.1, 0.1, 0.8  # shares of the probability of a false alarm
MISSES = 0.005, 0.005  # probability to miss what is detectable at the second look, and at the third
EXPECTED = 20  # samples; outcomes that expect fewer are merged
MOST_SAMPLES = 10_000_000


def p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike, expected: float) -> float:
    """P(a χ² at least this large) for `counts` of independent draws from `probabilities`.

    Counts and probabilities may have several rows, one per group of draws, each row a distribution of its
    own. Rare outcomes are merged until each expects so many draws; one of probability 0 gives p = 0.
    """
    observed = np.atleast_2d(np.asarray(counts, dtype=np.float64))
    chances = np.atleast_2d(np.asarray(probabilities, dtype=np.float64))
    if not np.allclose(chances.sum(1), 1, rtol=1e-6):
        raise ValueError("probabilities do not sum to 1")
    p, freedom = _pearson(observed, chances, expected)
    if freedom == 0 and p and (np.count_nonzero(chances, axis=1) > 1).any():
        raise ValueError("too few draws: every bin was merged into one, so nothing was tested")
    return p


def _pearson(observed: Floats, chances: Floats, expected: float) -> tuple[float, int]:
    """The p-value of all groups together, and the degrees of freedom; without any, p = 1."""
    if (observed[chances == 0] > 0).any():
        return 0.0, 0
    statistic, freedom = 0.0, 0
    for seen, hoped in zip(observed, chances * observed.sum(1, keepdims=True), strict=True):
        seen, hoped = merge(seen, hoped, expected)
        statistic += float(((seen - hoped) ** 2 / hoped).sum())
        freedom += len(hoped) - 1
    return (_beyond(statistic, freedom) if freedom else 1.0), freedom


def merge(seen: Floats, hoped: Floats, expected: float) -> tuple[Floats, Floats]:
    """Join bins that expect fewer draws, in the order they come, until each expects at least so many."""
    rare = (hoped > 0) & (hoped < expected)
    merged_seen, merged_hoped = list(seen[hoped >= expected]), list(hoped[hoped >= expected])
    s = h = 0.0
    for one_seen, one_hoped in zip(seen[rare], hoped[rare], strict=True):
        s, h = s + one_seen, h + one_hoped
        if h >= expected:
            merged_seen.append(s)
            merged_hoped.append(h)
            s = h = 0.0
    if h > 0 and merged_hoped:  # what is left goes to the smallest
        smallest = int(np.argmin(merged_hoped))
        merged_seen[smallest] += s
        merged_hoped[smallest] += h
    elif h > 0:
        merged_seen, merged_hoped = [s], [h]
    return np.asarray(merged_seen), np.asarray(merged_hoped)


def _beyond(statistic: float, freedom: float, noncentrality: float = 0.0) -> float:
    """P(a noncentral χ² at least this large): a Poisson mixture of central ones."""
    mean = noncentrality / 2
    j = torch.arange(int(mean + 12 * math.sqrt(mean)) + 40 if mean else 1, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(j, torch.tensor(mean)) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, statistic / 2))
    return float(weights @ tails)


def _bisect(low: float, high: float, enough: Callable[[float], bool], tolerance: float) -> float:
    """The least number in low..high that is enough, up to a tolerance."""
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=1024)
def noncentrality(freedom: int, level: float, miss: float) -> float:
    """The noncentrality at which a χ² test of this level misses with probability `miss`."""
    high = freedom + 1e4
    critical = _bisect(freedom, high, lambda x: _beyond(x, freedom) < level, 1e-4)
    return _bisect(0, high, lambda x: _beyond(critical, freedom, x) > 1 - miss, 1e-3)


@dataclass(frozen=True)
class Power:
    """Misplacements that would be found with `CERTAINTY`.

    on_every  misplaced on every prompt; more on some makes up for less on others
    on_one    misplaced on this prompt alone, one number per prompt
    """

    on_every: float
    on_one: list[float]


def power(chances: Floats, samples: int, alarm: float) -> Power:
    """Return the misplacements that `decide` finds with so many samples per prompt.

    Probability that moves between outcomes that were merged is not seen, so their mass is added.
    """
    prompts = len(chances)
    on_every, on_one = 0.0, [0.0] * prompts
    _, second, third = looks(samples)
    for draws, level, miss in (
        (second, LOOK_AGAIN, MISSES[0]),
        (third, SPENT[2] * alarm, MISSES[1]),
    ):
        freedoms = [len(merge(row * draws, row * draws, EXPECTED)[1]) - 1 for row in chances]
        hidden = np.where((chances > 0) & (chances * draws < EXPECTED), chances, 0).sum(1)
        levels = _levels(level, prompts)
        if sum(freedoms):
            asked = noncentrality(sum(freedoms), levels[0], miss) / (4 * draws)
            on_every = max(on_every, _shared(hidden, asked))
        for i, freedom in enumerate(freedoms):
            alone = math.inf
            if freedom:
                alone = float(hidden[i]) + math.sqrt(noncentrality(freedom, levels[1], miss) / (4 * draws))
            on_one[i] = min(1.0, max(on_one[i], alone))
    return Power(min(on_every or 1.0, *on_one), on_one)


def _shared(hidden: Floats, asked: float) -> float:
    """The misplacement on every prompt of which enough is seen: Σ(δ − hidden)² >= asked."""
    return _bisect(0, 1, lambda delta: bool((np.clip(delta - hidden, 0, None) ** 2).sum() >= asked), 1e-6)


def looks(samples: int) -> list[int]:
    """Return the samples per prompt at each look."""
    return [math.ceil(share * samples) for share in LOOKS]


def _levels(level: float, prompts: int) -> tuple[float, float]:
    """Of the test of all prompts together and of that of each: half for the one, half for the others."""
    return (level, level) if prompts == 1 else (level / 2, level / (2 * prompts))


def samples_for(misplacement: float, chances: Floats, alarm: float) -> int:
    """Return the samples per prompt that find such a misplacement on every prompt."""

    def enough(samples: float) -> bool:
        return power(chances, math.ceil(samples), alarm).on_every <= misplacement

    if not enough(MOST_SAMPLES):
        raise ValueError(
            f"misplacement: got {misplacement}; more than {MOST_SAMPLES:,} samples per prompt would be needed"
        )
    return math.ceil(_bisect(1, MOST_SAMPLES, enough, 0.5))


@dataclass(frozen=True)
class Decision:
    """Outcome of a test in up to three looks.

    different  whether the last look found a difference
    p_value    of that look, corrected for the number of prompts
    each       p-value of each prompt by itself, uncorrected
    samples    per prompt
    counts     `[prompts, outcomes]`
    """

    different: bool
    p_value: float
    each: list[float]
    samples: int
    counts: Ints


def decide(
    draw: Callable[[int, int], npt.ArrayLike], chances: Floats, samples: int, alarm: float
) -> Decision:
    """Compare samples with exact probabilities, and look again where one look does not settle it.

    A difference is found where a look's p-value is below its share of `alarm`, so a correct sampler is found
    different with probability `alarm` at most. The second look is the last, unless its p-value is below
    LOOK_AGAIN: then more samples are drawn, and all of them decide.

    Args:
        draw: Takes the index of a prompt and a number of samples; returns how often each outcome came.
        chances: Exact probabilities, `[prompts, outcomes]`.
        samples: Samples per prompt at the second look.
        alarm: Probability of a false alarm.
    """
    counts = np.zeros(chances.shape, dtype=np.int64)
    drawn = 0
    for look, total in enumerate(looks(samples)):
        for i in range(len(chances)):
            counts[i] += np.asarray(draw(i, total - drawn), dtype=np.int64)
        drawn = total
        p, each = _corrected(counts, chances)
        different = p < SPENT[look] * alarm
        if different or (look == 1 and p >= LOOK_AGAIN):
            break
    return Decision(different, p, each, drawn, counts)


def _corrected(counts: Ints, chances: Floats) -> tuple[float, list[float]]:
    """One p-value for all prompts, and one for each: Bonferroni over the sum and the single ones."""
    observed = counts.astype(np.float64)
    each = [_pearson(observed[i : i + 1], chances[i : i + 1], EXPECTED)[0] for i in range(len(chances))]
    together = _pearson(observed, chances, EXPECTED)[0]
    if len(each) == 1:
        return together, each
    return min(1.0, 2 * together, 2 * len(each) * min(each)), each

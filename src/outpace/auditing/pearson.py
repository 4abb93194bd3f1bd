"""Pearson's χ² of counts against exact probabilities: p-values, power, and a test of up to three looks.

A misplacement of δ is a total variation distance of δ: that much of the probability lies on wrong outcomes.
By Cauchy and Schwarz ``Σ(q − p)²/p >= (Σ|q − p|)² = 4δ²``. Equality holds where every probability is wrong by
the same factor 1 ± 2δ. So N samples of any misplacement δ give the statistic a noncentrality of at least
4δ²N. A power that is computed from 4δ²N therefore holds for the least favourable misplacement.

The χ² distribution is an approximation whose tail is too light. A count that expects m has skewness 1/√m, and
the first Edgeworth term changes a tail at z standard deviations by exp(±z³/(6√m)). For two outcomes, of which
one expects 20, enumeration gives the ratio of the true tail to the stated one. It is 3 at 4.5e-5, 6 at 5e-6
and 12 at 1e-6; more outcomes do better. ``ALARM_SHARES`` leaves a margin for that. ``min_expected_count``
grows as z⁶, so that the margin suffices for smaller alarms.
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

CERTAINTY = 0.99  # probability of finding a `detectable` misplacement
LOOK_AGAIN = 0.1  # a p-value below this at the second look leads to a third look
SUSPICIOUS = 1e-3  # a p-value below this after the last look does not count as agreement
LOOKS = 1 / 8, 1.0, 1.6  # fractions of the samples: early for large faults, all, more if unsettled
# Share of the probability of a false alarm per look. The module's docstring says why they sum to less than 1.
ALARM_SHARES = 0.01, 0.03, 0.2
MISSES = 0.002, 0.008  # probability of missing a detectable misplacement at the second and third look
MAX_SAMPLES = 10_000_000


def p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike, min_count: float) -> float:
    """Return P(a χ² at least this large) for ``counts`` of independent samples from ``probabilities``.

    Counts and probabilities may have several rows, one per group of samples, each row a distribution of its
    own.

    Args:
        counts: Samples of each outcome.
        probabilities: The exact probability of each outcome.
        min_count: Smallest expected count of a bin. Rare outcomes are merged until their bin reaches it.

    Returns:
        The p-value. It is 0 if an outcome of probability 0 was sampled.

    Raises:
        ValueError: The probabilities do not sum to 1, or every bin was merged into one.
    """
    observed = np.atleast_2d(np.asarray(counts, dtype=np.float64))
    exact = np.atleast_2d(np.asarray(probabilities, dtype=np.float64))
    if not np.allclose(exact.sum(1), 1, rtol=1e-6):
        raise ValueError("probabilities do not sum to 1")
    p, freedom = _pearson(observed, exact, min_count)
    if freedom == 0 and p and (np.count_nonzero(exact, axis=1) > 1).any():
        raise ValueError("too few samples: every bin was merged into one, so nothing was tested")
    return p


def min_expected_count(alarm: float) -> float:
    """Return the smallest expected count of a bin; rarer outcomes are merged."""
    return 20 * max(1.0, math.log(alarm) / math.log(1e-4)) ** 3


def _pearson(
    observed: Floats, probabilities: Floats, min_count: float, rounding: Floats | None = None
) -> tuple[float, int]:
    """Return the p-value of all groups together, and the degrees of freedom; without any, p = 1."""
    if (observed[probabilities == 0] > 0).any():
        return 0.0, 0
    statistic, freedom, null = 0.0, 0, 0.0
    for i, (seen, row) in enumerate(zip(observed, probabilities, strict=True)):
        samples = seen.sum()
        bins = merge(row * samples, min_count)
        for one in bins:
            expected = row[one].sum() * samples
            statistic += float((seen[one].sum() - expected) ** 2 / expected)
        freedom += max(0, len(bins) - 1)
        null += 0.0 if rounding is None else float(rounding[i] * samples)
    return (_tail(statistic, freedom, null) if freedom else 1.0), freedom


def merge(expected: Floats, min_count: float) -> list[Ints]:
    """Return bins of outcome indices; each bin has an expected count of at least ``min_count`` if possible.

    Each frequent outcome has its own bin. Rare outcomes are joined in order of their index. Leftover rare
    outcomes go to the last bin of rare ones, or else to the rarest frequent outcome. Impossible outcomes are
    in no bin.
    """
    bins = [np.array([i]) for i in np.flatnonzero(expected >= min_count)]
    joined: list[Ints] = []
    waiting, total = list[int](), 0.0
    for i in np.flatnonzero((expected > 0) & (expected < min_count)):
        waiting.append(int(i))
        total += expected[i]
        if total >= min_count:
            joined.append(np.array(waiting))
            waiting, total = [], 0.0
    if waiting and joined:
        joined[-1] = np.append(joined[-1], waiting)
    elif waiting and bins:
        rarest = min(range(len(bins)), key=lambda i: float(expected[bins[i]].sum()))
        bins[rarest] = np.append(bins[rarest], waiting)
    elif waiting:
        joined = [np.array(waiting)]
    return bins + joined


def _tail(statistic: float, freedom: float, noncentrality: float = 0.0) -> float:
    """Return P(a noncentral χ² at least this large): a Poisson mixture of central ones."""
    mean = noncentrality / 2
    j = torch.arange(int(mean + 12 * math.sqrt(mean)) + 40 if mean else 1, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(j, torch.tensor(mean)) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, statistic / 2))
    return float(weights @ tails)


def _bisect(low: float, high: float, enough: Callable[[float], bool], tolerance: float) -> float:
    """Return the smallest number in low..high that passes ``enough``, up to a tolerance."""
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=1024)
def noncentrality(freedom: int, level: float, miss: float, null: float = 0.0) -> float:
    """Return the noncentrality at which a χ² test of this level misses with probability ``miss``.

    ``null`` is the noncentrality that a correct sampler may have.
    """
    high = freedom + 1e4 + 4 * null
    critical = _bisect(freedom, high, lambda x: _tail(x, freedom, null) < level, 1e-4)
    return _bisect(0, high, lambda x: _tail(critical, freedom, x) > 1 - miss, 1e-3)


@dataclass(frozen=True)
class Power:
    """Smallest misplacements that are found with probability ``CERTAINTY``.

    Attributes:
        on_every: Misplacement on every prompt. More on some prompts makes up for less on others.
        on_one: Misplacement on one prompt alone, one number per prompt.
    """

    on_every: float
    on_one: list[float]


def power(probabilities: Floats, samples: int, alarm: float, rounding: Floats | None = None) -> Power:
    """Return the misplacements that ``decide`` finds with ``samples`` samples per prompt.

    The test does not see probability that moves within a bin. At most all of the bin but its rarest outcome
    can move, so that much is added.
    """
    prompts = len(probabilities)
    per_sample = np.zeros(prompts) if rounding is None else rounding
    on_every, on_one = 0.0, [0.0] * prompts
    _, second, third = looks(samples)
    for n, level, miss in (
        (second, LOOK_AGAIN, MISSES[0]),
        (third, ALARM_SHARES[2] * alarm, MISSES[1]),
    ):
        bins = [merge(row * n, min_expected_count(alarm)) for row in probabilities]
        freedoms = [max(0, len(one) - 1) for one in bins]
        hidden = np.array(
            [
                sum(row[one].sum() - row[one].min() for one in row_bins)
                for row, row_bins in zip(probabilities, bins, strict=True)
            ]
        )
        levels = _levels(level, prompts)
        together = 1.0
        if sum(freedoms):
            null = float(per_sample.sum() * n)
            together = _shared(hidden, noncentrality(sum(freedoms), levels[0], miss, null) / (4 * n))
        on_every = max(on_every, together)
        for i, freedom in enumerate(freedoms):
            alone = 1.0
            if freedom:
                required = noncentrality(freedom, levels[1], miss, float(per_sample[i] * n)) / (4 * n)
                alone = float(hidden[i]) + math.sqrt(required)
            on_one[i] = min(1.0, max(on_one[i], alone))
    return Power(min(on_every, *on_one), on_one)


def _shared(hidden: Floats, required: float) -> float:
    """Return the smallest δ on every prompt with Σ(δ − hidden)² >= required."""
    return _bisect(0, 1, lambda delta: bool((np.clip(delta - hidden, 0, None) ** 2).sum() >= required), 1e-6)


def looks(samples: int) -> list[int]:
    """Return the number of samples per prompt at each look."""
    return [math.ceil(fraction * samples) for fraction in LOOKS]


def _levels(level: float, prompts: int) -> tuple[float, float]:
    """Return the level of the test of all prompts together, and the level of the test of each.

    The joint test gets half of the level, and the single tests share the other half.
    """
    return (level, level) if prompts == 1 else (level / 2, level / (2 * prompts))


def samples_for(misplacement: float, probabilities: Floats, alarm: float) -> int:
    """Return the number of samples per prompt that finds such a misplacement on every prompt."""

    def enough(samples: float) -> bool:
        return power(probabilities, math.ceil(samples), alarm).on_every <= misplacement

    if not enough(MAX_SAMPLES):
        raise ValueError(
            f"misplacement: got {misplacement}; more than {MAX_SAMPLES:,} samples per prompt would be needed"
        )
    return math.ceil(_bisect(1, MAX_SAMPLES, enough, 0.5))


@dataclass(frozen=True)
class Decision:
    """Outcome of a test in up to three looks.

    Attributes:
        different: Whether the last look found a difference.
        p_value: The p-value of that look, corrected for the number of prompts.
        each: The p-value of each prompt by itself, uncorrected.
        samples: Samples per prompt.
        counts: Samples of each outcome, ``[prompts, outcomes]``.
    """

    different: bool
    p_value: float
    each: list[float]
    samples: int
    counts: Ints


def decide(
    sample: Callable[[int, int], npt.ArrayLike],
    probabilities: Floats,
    samples: int,
    alarm: float,
    rounding: Floats | None = None,
) -> Decision:
    """Test samples against exact probabilities in up to three looks.

    A look finds a difference if its p-value is below its share of ``alarm``. So a correct sampler is reported
    different with probability ``alarm`` at most. The second look is the last, unless its p-value is below
    ``LOOK_AGAIN``. The third look adds more samples and tests all of them.

    Args:
        sample: Function of a prompt index and a number of samples. It returns the count of each outcome.
        probabilities: Exact probabilities, ``[prompts, outcomes]``.
        samples: Samples per prompt at the second look.
        alarm: Probability of a false alarm.
        rounding: Σ(q − p)²/p per prompt that rounding may cause in a correct sampler's distribution q.
    """
    counts = np.zeros(probabilities.shape, dtype=np.int64)
    sampled = 0
    for look, total in enumerate(looks(samples)):
        for i in range(len(probabilities)):
            counts[i] += np.asarray(sample(i, total - sampled), dtype=np.int64)
        sampled = total
        p, each = corrected(counts, probabilities, alarm, rounding)
        different = p < ALARM_SHARES[look] * alarm
        if different or (look == 1 and p >= LOOK_AGAIN):
            break
    return Decision(different, p, each, sampled, counts)


def corrected(
    counts: Ints, probabilities: Floats, alarm: float, rounding: Floats | None = None
) -> tuple[float, list[float]]:
    """Return one p-value of all prompts, and one of each.

    The first has a Bonferroni correction over the joint test and the single tests.
    """
    observed, min_count = counts.astype(np.float64), min_expected_count(alarm)
    rows = [slice(i, i + 1) for i in range(len(probabilities))]
    each = [
        _pearson(observed[i], probabilities[i], min_count, None if rounding is None else rounding[i])[0]
        for i in rows
    ]
    together = _pearson(observed, probabilities, min_count, rounding)[0]
    if len(each) == 1:
        return together, each
    return min(1.0, 2 * together, 2 * len(each) * min(each)), each

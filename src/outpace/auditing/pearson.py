"""Pearson's χ² of counts against exact probabilities: p-values, power, and a test of up to three looks.

A misplacement of δ is a total variation distance of δ: that much of the probability lies on other outcomes
than it should. By Cauchy and Schwarz ``Σ(q − p)²/p >= (Σ|q − p|)² = 4δ²``. Equality holds where every
probability is wrong by the same factor 1 ± 2δ. So N samples of any misplacement δ give the statistic a
noncentrality of at least 4δ²N. A power that is computed from 4δ²N therefore holds for the least favourable
misplacement.

The χ² distribution is an approximation whose tail is too light. A count that expects m has skewness 1/√m, and
the first Edgeworth term changes a tail at z standard deviations by exp(±z³/(6√m)). For two outcomes, of which
one expects 20, enumeration gives the ratio of the true tail to the stated one. It is 3 at 4.5e-5, 6 at 5e-6
and 12 at 1e-6; more outcomes do better. ``SPENT`` leaves a margin for that. ``expected`` grows as z⁶, so that
the margin suffices for smaller alarms.
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

CERTAINTY = 0.99  # probability to find what is `detectable`
LOOK_AGAIN = 0.1  # p-values below this are settled by more samples
SUSPICIOUS = 1e-3  # p-values below this, after the last look, are no agreement
LOOKS = 1 / 8, 1.0, 1.6  # times the samples: early for large faults, all, more where unsettled
SPENT = 0.01, 0.03, 0.2  # shares of the probability of a false alarm; see above for why they are less than 1
MISSES = 0.002, 0.008  # probability to miss what is detectable at the second look, and at the third
MOST_SAMPLES = 10_000_000


def p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike, least: float) -> float:
    """Return P(a χ² at least this large) for ``counts`` of independent samples from ``probabilities``.

    Counts and probabilities may have several rows, one per group of samples, each row a distribution of its
    own.

    Args:
        counts: How often each outcome came.
        probabilities: The exact probability of each outcome.
        least: Samples that a bin must expect; rare outcomes are merged until it does.

    Returns:
        The p-value. It is 0 if an outcome of probability 0 came.

    Raises:
        ValueError: The probabilities do not sum to 1, or every bin was merged into one.
    """
    observed = np.atleast_2d(np.asarray(counts, dtype=np.float64))
    chances = np.atleast_2d(np.asarray(probabilities, dtype=np.float64))
    if not np.allclose(chances.sum(1), 1, rtol=1e-6):
        raise ValueError("probabilities do not sum to 1")
    p, freedom = _pearson(observed, chances, least)
    if freedom == 0 and p and (np.count_nonzero(chances, axis=1) > 1).any():
        raise ValueError("too few draws: every bin was merged into one, so nothing was tested")
    return p


def expected(alarm: float) -> float:
    """Return the samples that a bin must expect; rarer outcomes are merged."""
    return 20 * max(1.0, math.log(alarm) / math.log(1e-4)) ** 3


def _pearson(
    observed: Floats, chances: Floats, least: float, rounding: Floats | None = None
) -> tuple[float, int]:
    """Return the p-value of all groups together, and the degrees of freedom; without any, p = 1."""
    if (observed[chances == 0] > 0).any():
        return 0.0, 0
    statistic, freedom, null = 0.0, 0, 0.0
    for i, (seen, row) in enumerate(zip(observed, chances, strict=True)):
        draws = seen.sum()
        bins = merge(row * draws, least)
        for one in bins:
            hoped = row[one].sum() * draws
            statistic += float((seen[one].sum() - hoped) ** 2 / hoped)
        freedom += max(0, len(bins) - 1)
        null += 0.0 if rounding is None else float(rounding[i] * draws)
    return (_beyond(statistic, freedom, null) if freedom else 1.0), freedom


def merge(hoped: Floats, least: float) -> list[Ints]:
    """Return the bins: indices of outcomes that are counted together, so that each bin expects enough.

    Frequent outcomes have a bin of their own. Rare ones are joined in the order they come. The remaining rare
    ones go to the last bin of rare ones, or else to the rarest frequent outcome. Impossible outcomes are in
    no bin.
    """
    bins = [np.array([i]) for i in np.flatnonzero(hoped >= least)]
    joined: list[Ints] = []
    waiting, total = list[int](), 0.0
    for i in np.flatnonzero((hoped > 0) & (hoped < least)):
        waiting.append(int(i))
        total += hoped[i]
        if total >= least:
            joined.append(np.array(waiting))
            waiting, total = [], 0.0
    if waiting and joined:
        joined[-1] = np.append(joined[-1], waiting)
    elif waiting and bins:
        rarest = min(range(len(bins)), key=lambda i: float(hoped[bins[i]].sum()))
        bins[rarest] = np.append(bins[rarest], waiting)
    elif waiting:
        joined = [np.array(waiting)]
    return bins + joined


def _beyond(statistic: float, freedom: float, noncentrality: float = 0.0) -> float:
    """Return P(a noncentral χ² at least this large): a Poisson mixture of central ones."""
    mean = noncentrality / 2
    j = torch.arange(int(mean + 12 * math.sqrt(mean)) + 40 if mean else 1, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(j, torch.tensor(mean)) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, statistic / 2))
    return float(weights @ tails)


def _bisect(low: float, high: float, enough: Callable[[float], bool], tolerance: float) -> float:
    """Return the least number in low..high that is enough, up to a tolerance."""
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
    critical = _bisect(freedom, high, lambda x: _beyond(x, freedom, null) < level, 1e-4)
    return _bisect(0, high, lambda x: _beyond(critical, freedom, x) > 1 - miss, 1e-3)


@dataclass(frozen=True)
class Power:
    """Misplacements that would be found with ``CERTAINTY``.

    Attributes:
        on_every: Misplaced on every prompt. More on some prompts makes up for less on others.
        on_one: Misplaced on this prompt alone, one number per prompt.
    """

    on_every: float
    on_one: list[float]


def power(chances: Floats, samples: int, alarm: float, rounding: Floats | None = None) -> Power:
    """Return the misplacements that ``decide`` finds with ``samples`` samples per prompt.

    Probability that moves within a bin is not seen. At most all of the bin but its rarest outcome can move,
    so that much is added.
    """
    prompts = len(chances)
    per_draw = np.zeros(prompts) if rounding is None else rounding
    on_every, on_one = 0.0, [0.0] * prompts
    _, second, third = looks(samples)
    for draws, level, miss in (
        (second, LOOK_AGAIN, MISSES[0]),
        (third, SPENT[2] * alarm, MISSES[1]),
    ):
        bins = [merge(row * draws, expected(alarm)) for row in chances]
        freedoms = [max(0, len(one) - 1) for one in bins]
        hidden = np.array(
            [
                sum(row[one].sum() - row[one].min() for one in of)
                for row, of in zip(chances, bins, strict=True)
            ]
        )
        levels = _levels(level, prompts)
        together = 1.0
        if sum(freedoms):
            null = float(per_draw.sum() * draws)
            together = _shared(hidden, noncentrality(sum(freedoms), levels[0], miss, null) / (4 * draws))
        on_every = max(on_every, together)
        for i, freedom in enumerate(freedoms):
            alone = 1.0
            if freedom:
                asked = noncentrality(freedom, levels[1], miss, float(per_draw[i] * draws)) / (4 * draws)
                alone = float(hidden[i]) + math.sqrt(asked)
            on_one[i] = min(1.0, max(on_one[i], alone))
    return Power(min(on_every, *on_one), on_one)


def _shared(hidden: Floats, asked: float) -> float:
    """Return the misplacement on every prompt of which enough is seen: Σ(δ − hidden)² >= asked."""
    return _bisect(0, 1, lambda delta: bool((np.clip(delta - hidden, 0, None) ** 2).sum() >= asked), 1e-6)


def looks(samples: int) -> list[int]:
    """Return the samples per prompt at each look."""
    return [math.ceil(share * samples) for share in LOOKS]


def _levels(level: float, prompts: int) -> tuple[float, float]:
    """Return the level of the test of all prompts together, and that of the test of each.

    Half is for the first, half for the others.
    """
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

    Attributes:
        different: Whether the last look found a difference.
        p_value: The p-value of that look, corrected for the number of prompts.
        each: The p-value of each prompt by itself, uncorrected.
        samples: Samples per prompt.
        counts: How often each outcome came, ``[prompts, outcomes]``.
    """

    different: bool
    p_value: float
    each: list[float]
    samples: int
    counts: Ints


def decide(
    draw: Callable[[int, int], npt.ArrayLike],
    chances: Floats,
    samples: int,
    alarm: float,
    rounding: Floats | None = None,
) -> Decision:
    """Compare samples with exact probabilities, and look again where one look does not settle it.

    A difference is found where a look's p-value is below its share of ``alarm``. So a correct sampler is
    found different with probability ``alarm`` at most. The second look is the last, unless its p-value is
    below ``LOOK_AGAIN``. Then more samples are taken, and all of them decide.

    Args:
        draw: Takes the index of a prompt and a number of samples; returns how often each outcome came.
        chances: Exact probabilities, ``[prompts, outcomes]``.
        samples: Samples per prompt at the second look.
        alarm: Probability of a false alarm.
        rounding: Σ(q − p)²/p per prompt that a correct sampler's distribution q may be away from p.
    """
    counts = np.zeros(chances.shape, dtype=np.int64)
    drawn = 0
    for look, total in enumerate(looks(samples)):
        for i in range(len(chances)):
            counts[i] += np.asarray(draw(i, total - drawn), dtype=np.int64)
        drawn = total
        p, each = corrected(counts, chances, alarm, rounding)
        different = p < SPENT[look] * alarm
        if different or (look == 1 and p >= LOOK_AGAIN):
            break
    return Decision(different, p, each, drawn, counts)


def corrected(
    counts: Ints, chances: Floats, alarm: float, rounding: Floats | None = None
) -> tuple[float, list[float]]:
    """Return one p-value for all prompts, and one for each.

    The first is corrected by Bonferroni over the test of the sum and the single ones.
    """
    observed, least, away = counts.astype(np.float64), expected(alarm), rounding
    rows = [slice(i, i + 1) for i in range(len(chances))]
    each = [_pearson(observed[i], chances[i], least, None if away is None else away[i])[0] for i in rows]
    together = _pearson(observed, chances, least, away)[0]
    if len(each) == 1:
        return together, each
    return min(1.0, 2 * together, 2 * len(each) * min(each)), each

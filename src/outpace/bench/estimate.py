"""Means of values in clusters, as tokens are in texts, with confidence intervals and autocorrelation.

A value that is NaN is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LAGS = 5


@dataclass(frozen=True)
class Estimate:
    """A mean with a confidence interval.

    Attributes:
        mean: Mean of all values.
        count: Number of values.
        clusters: Number of clusters.
        half: Half the width of the confidence interval; None for a single cluster.
    """

    mean: float
    count: int
    clusters: int
    half: float | None

    @property
    def interval(self) -> list[float] | None:
        """Confidence interval of a fraction, which lies between 0 and 1."""
        if self.half is None:
            return None
        return [max(0.0, self.mean - self.half), min(1.0, self.mean + self.half)]

    @property
    def max_error(self) -> float | None:
        """Largest distance of a value in ``interval`` from the mean."""
        return (
            None if self.interval is None else max(self.interval[1] - self.mean, self.mean - self.interval[0])
        )

    def needed(self, within: float) -> int | None:
        """Return about how many clusters like these would give an interval of ± ``within``."""
        if self.half is None:
            return None
        return max(2, math.ceil(self.clusters * (self.half / within) ** 2))


def estimate(clusters: Sequence[Floats], confidence: float = 0.95) -> Estimate | None:
    """Return the mean of all values; None without any.

    Clusters are independent, values of one cluster are not. So the mean is a ratio of sums. Its variance is
    that of Σ(values − mean) over clusters. The interval takes Student's t of one degree less than there are
    clusters.

    Raises:
        ValueError: ``confidence`` does not lie between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence!r}; it must lie between 0 and 1")
    known = [found for one in clusters if (found := one[~np.isnan(one)]).size]
    if not known:
        return None
    m, count = len(known), sum(one.size for one in known)
    mean = float(sum(one.sum() for one in known) / count)
    half = None
    if m > 1:
        squares = sum(float((one - mean).sum()) ** 2 for one in known)
        half = student(confidence, m - 1) * math.sqrt(squares * m / (m - 1)) / count
        if all(np.allclose(one, mean, rtol=0, atol=1e-9) for one in known):  # zero variance is not certainty
            half = 1 - (1 - confidence) ** (1 / count)
    return Estimate(mean, count, m, half)


def student(confidence: float, freedom: int) -> float:
    """Return the t with ``P(|T| < t)`` equal to ``confidence`` in Student's distribution, by bisection."""
    low, high = 0.0, 1.0
    while student_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_probability(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def student_probability(t: float, freedom: int) -> float:
    """Return ``P(|T| < t)`` of Student's distribution: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for i in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (i - 1) / i
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))


def autocorrelation(clusters: Sequence[Floats], lags: int = LAGS) -> list[float | None]:
    """Return the correlation of values with those 1, 2, ... places later in their cluster.

    It is about the mean of all values. It is None where there are no such pairs, or values do not vary.
    """
    every = np.concatenate([np.zeros(0), *clusters])
    every = every[~np.isnan(every)]
    if not every.size or every.var() < 1e-12:
        return [None] * lags
    found: list[float | None] = []
    for lag in range(1, lags + 1):
        pairs = np.concatenate([np.stack((one[:-lag], one[lag:]), axis=1) for one in clusters])
        pairs = pairs[~np.isnan(pairs).any(axis=1)] - every.mean()
        spread = math.sqrt(float((pairs**2).sum(axis=0).prod()))
        found.append(float(pairs.prod(axis=1).sum()) / spread if spread else None)
    return found

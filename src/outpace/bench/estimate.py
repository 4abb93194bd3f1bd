"""A mean over values that come in clusters, as tokens come in texts: how sure it is, and how much one value
says of the next. A value that is NaN is not there."""

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
    """A mean of so many values in so many clusters, known to ± `half`; None where there is one cluster."""

    mean: float
    count: int
    clusters: int
    half: float | None

    @property
    def interval(self) -> list[float] | None:
        """Of a share, which lies between 0 and 1."""
        if self.half is None:
            return None
        return [max(0.0, self.mean - self.half), min(1.0, self.mean + self.half)]

    @property
    def off(self) -> float | None:
        """By how much it may be off at most, as a share."""
        return (
            None if self.interval is None else max(self.interval[1] - self.mean, self.mean - self.interval[0])
        )

    def needed(self, within: float) -> int | None:
        """About how many clusters like these would make it known to ± `within`."""
        if self.half is None:
            return None
        return max(2, math.ceil(self.clusters * (self.half / within) ** 2))


def estimate(clusters: Sequence[Floats], confidence: float = 0.95) -> Estimate | None:
    """The mean of all values; None without any.

    Values of a cluster are not independent, clusters are: a ratio of sums, whose variance is that of
    Σ(values − mean) over clusters, with Student's t of one degree less than there are clusters.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence!r}; it must lie between 0 and 1")
    there = [found for one in clusters if (found := one[~np.isnan(one)]).size]
    if not there:
        return None
    m, count = len(there), sum(one.size for one in there)
    mean = float(sum(one.sum() for one in there) / count)
    half = None
    if m > 1:
        off = sum(float((one - mean).sum()) ** 2 for one in there)
        half = student(confidence, m - 1) * math.sqrt(off * m / (m - 1)) / count
        if all(np.allclose(one, mean, rtol=0, atol=1e-9) for one in there):  # others would not be unlikely
            half = 1 - (1 - confidence) ** (1 / count)
    return Estimate(mean, count, m, half)


def student(confidence: float, freedom: int) -> float:
    """The t that Student's distribution stays below in size with this probability, by bisection."""
    low, high = 0.0, 1.0
    while inside(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def inside(t: float, freedom: int) -> float:
    """P(|T| < t), Abramowitz and Stegun 26.7.3 and 26.7.4."""
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
    """Of values with those 1, 2, ... places later in their cluster, about the mean of all; None where
    there are no such pairs, or values do not vary."""
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

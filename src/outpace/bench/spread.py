"""How far measurements lie apart, and how sure a ratio of them is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.bench.estimate import student

SURE = 0.95  # of cases in which an interval is to hold what is true


@dataclass(frozen=True)
class Spread:
    """Of some values; percentiles lie on straight lines between them."""

    mean: float
    p50: float
    p90: float
    p99: float
    deviation: float  # of what they are a sample of; 0 for a single one

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not len(values):
            raise ValueError("values: there are none")
        found = np.asarray(values, float)
        p50, p90, p99 = np.percentile(found, (50, 90, 99))
        deviation = found.std(ddof=1) if len(found) > 1 else 0.0
        return cls(float(found.mean()), float(p50), float(p90), float(p99), float(deviation))


Rate = tuple[float, float]
"""Tokens, and seconds that they took."""


def faster(ours: Sequence[Rate], theirs: Sequence[Rate]) -> tuple[float, tuple[float, float] | None]:
    """How many times as many tokens a second, of things measured in pairs; and an interval for it.

    Sums are divided, so that long texts count for more. What belongs together stays together: the variance of
    the quotient's logarithm is the jackknife's, with one pair at a time left out, and with Student's t of one
    degree less than there are pairs. A single pair has no interval.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"ours: got {len(ours)} rates, and theirs {len(theirs)}; they must be pairs")
    pairs = np.concatenate((np.asarray(ours, float), np.asarray(theirs, float)), axis=1)  # [n, 4]
    sums, n = pairs.sum(0), len(pairs)
    value = float((sums[0] / sums[1]) / (sums[2] / sums[3]))
    if n == 1:
        return value, None
    without = np.log(sums - pairs) @ (1.0, -1.0, -1.0, 1.0)  # the logarithm, without each of them
    half = student(SURE, n - 1) * math.sqrt((n - 1) * float(without.var()))
    return value, (value * math.exp(-half), value * math.exp(half))

"""Spread of measurements, and confidence intervals of their ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.bench.estimate import student

SURE = 0.95  # confidence of intervals


@dataclass(frozen=True)
class Spread:
    """Mean, percentiles and standard deviation of some values.

    Percentiles are interpolated linearly between the values.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    deviation: float  # of the population that the values sample; 0 for a single value

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values.

        Raises:
            ValueError: There are no values.
        """
        if not len(values):
            raise ValueError("values: there are none")
        found = np.asarray(values, float)
        p50, p90, p99 = np.percentile(found, (50, 90, 99))
        deviation = found.std(ddof=1) if len(found) > 1 else 0.0
        return cls(float(found.mean()), float(p50), float(p90), float(p99), float(deviation))


Rate = tuple[float, float]
"""Tokens, and the seconds that they took."""


def faster(measured: Sequence[Rate], baseline: Sequence[Rate]) -> tuple[float, tuple[float, float] | None]:
    """Return the ratio of throughputs measured in pairs, and its confidence interval.

    The ratio is one of sums, so that long texts count for more. Pairs stay together: the variance of the
    ratio's logarithm is the jackknife's, which leaves out one pair at a time. The interval takes Student's t
    of one degree less than there are pairs.

    Args:
        measured: Rates of a method.
        baseline: Rates of the baseline, in the same order.

    Returns:
        The ratio and its interval; None for the interval of a single pair.

    Raises:
        ValueError: The rates are not pairs, or there are none.
    """
    if len(measured) != len(baseline) or not len(measured):
        raise ValueError(
            f"measured: got {len(measured)} rates, and {len(baseline)} of the baseline; they must be pairs"
        )
    pairs = np.concatenate((np.asarray(measured, float), np.asarray(baseline, float)), axis=1)  # [n, 4]
    sums, n = pairs.sum(0), len(pairs)
    value = float((sums[0] / sums[1]) / (sums[2] / sums[3]))
    if n == 1:
        return value, None
    without = np.log(sums - pairs) @ (1.0, -1.0, -1.0, 1.0)  # the logarithm, without each pair in turn
    half = student(SURE, n - 1) * math.sqrt((n - 1) * float(without.var()))
    return value, (value * math.exp(-half), value * math.exp(half))

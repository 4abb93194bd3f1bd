"""Percentiles, deviations and ratios match calculations by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from outpace.bench.estimate import student
from outpace.bench.spread import Spread, faster


def test_spread_has_interpolated_percentiles_and_the_sample_deviation() -> None:
    values = [7.0, 1.0, 10.0, 4.0, 2.0, 9.0, 3.0, 8.0, 5.0, 6.0]
    found = Spread.of(values)
    assert found.mean == 5.5
    assert found.p50 == 5.5
    assert found.p90 == pytest.approx(9.1)  # nine tenths of the way from the first to the tenth
    assert found.p99 == pytest.approx(9.91)
    assert found.deviation == pytest.approx(statistics.stdev(values))


def test_single_value_has_deviation_zero() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 0.0)
    with pytest.raises(ValueError, match="values: there are none"):
        Spread.of([])


def test_speedup_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    measured, baseline = [(10, 1.0), (30, 2.0)], [(10, 2.0), (30, 3.0)]
    value, interval = faster(measured, baseline)
    assert value == pytest.approx((40 / 3) / (40 / 5))
    # Without the first pair it is 1.5, without the second 2
    half = student(0.95, 1) * math.log(2 / 1.5) / 2
    assert interval == pytest.approx((value * math.exp(-half), value * math.exp(half)))


@pytest.mark.parametrize("n", [4, 12])
def test_interval_covers_the_true_speedup_at_its_confidence(n: int) -> None:
    """Texts differ much, and each is randomly faster or slower; 1000 runs, ± 4 standard errors."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(1000):
        tokens, speed = rng.integers(20, 200, n), rng.uniform(10, 30, n)
        measured, baseline = (
            [
                (float(t), t / s * math.exp(0.05 * rng.standard_normal()))
                for t, s in zip(tokens, speed, strict=True)
            ]
            for _ in range(2)
        )
        _, interval = faster(measured, baseline)
        assert interval is not None
        missed += not interval[0] <= 1 <= interval[1]
    assert missed / 1000 == pytest.approx(0.05, abs=0.028)


def test_interval_pairs_the_rates_of_each_text() -> None:
    """Texts differ a hundredfold, but all have the same ratio."""
    baseline = [(100, 1.0), (1000, 900.0), (3, 7.0), (50, 0.1)]
    measured = [(tokens, seconds / 1.25) for tokens, seconds in baseline]
    value, interval = faster(measured, baseline)
    assert value == pytest.approx(1.25)
    assert interval == pytest.approx((1.25, 1.25))


def test_interval_is_deterministic_and_a_single_pair_has_none() -> None:
    measured = [(10, 1.0), (12, 1.5), (9, 1.0), (11, 0.8)]
    baseline = [(10, 1.1), (12, 1.4), (9, 1.3), (11, 1.0)]
    assert faster(measured, baseline) == faster(measured, baseline)
    assert faster([(10, 1.0)], [(10, 2.0)]) == (2.0, None)
    for some, others in ((measured, baseline[:3]), ([], [])):
        with pytest.raises(ValueError, match="they must be pairs"):
            faster(some, others)

"""Means of clusters and their confidence intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outpace.bench.estimate import autocorrelation, estimate, student

# Student's t, two-sided, as printed in every table of it: degrees of freedom, confidence, t
TABLE = [
    (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.99, 4.604), (9, 0.9, 1.833),
    (11, 0.95, 2.201), (30, 0.95, 2.042), (120, 0.99, 2.617),
]  # fmt: skip


@pytest.mark.parametrize(("freedom", "confidence", "t"), TABLE)
def test_students_t_matches_published_tables(freedom: int, confidence: float, t: float) -> None:
    assert student(confidence, freedom) == pytest.approx(t, abs=5e-4)


def test_interval_matches_a_calculation_by_hand() -> None:
    clusters = [np.array([1.0, 0.0, 0.5]), np.array([np.nan, 1.0]), np.array([0.5, 0.5])]
    found = estimate(clusters, 0.95)
    assert found is not None
    mean = 3.5 / 6
    off = (1.5 - 3 * mean) ** 2 + (1 - mean) ** 2 + (1 - 2 * mean) ** 2
    assert found.mean == pytest.approx(mean)
    assert (found.count, found.clusters) == (6, 3)
    half = 4.302653 * math.sqrt(off * 3 / 2) / 6
    assert found.half == pytest.approx(half, rel=1e-6)
    assert found.interval == pytest.approx([max(0.0, mean - half), min(1.0, mean + half)])
    assert found.needed(half / 2) == 12  # half the width needs four times as many clusters


def test_equal_values_within_clusters_give_a_wider_interval_than_mixed_ones() -> None:
    together = estimate([np.full(50, value) for value in (0.0, 1.0, 0.0, 1.0)])
    mixed = estimate([np.tile([0.0, 1.0], 25)] * 4)
    assert together is not None
    assert mixed is not None
    assert together.mean == mixed.mean == 0.5
    assert together.half is not None
    assert together.half > 0.5
    assert mixed.half == 0


def test_interval_covers_the_true_mean_at_its_confidence() -> None:
    """400 samples of 8 clusters: 360 expected at 90 %, standard deviation 6."""
    noise = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        levels = noise.normal(0.5, 0.1, 8)
        found = estimate([level + noise.normal(0, 0.1, 20) for level in levels], 0.9)
        assert found is not None
        assert found.half is not None
        covered += abs(found.mean - 0.5) <= found.half
    assert 336 <= covered <= 384


def test_interval_of_a_fraction_stays_within_0_and_1() -> None:
    found = estimate([np.zeros(4), np.ones(4)])
    assert found is not None
    assert found.half is not None
    assert found.half > 1
    assert (found.interval, found.max_error) == ([0.0, 1.0], 0.5)


def test_one_cluster_has_no_interval_and_no_values_have_no_estimate() -> None:
    alone = estimate([np.array([0.2, 0.4])])
    assert alone is not None
    assert alone.mean == pytest.approx(0.3)
    assert (alone.interval, alone.needed(0.1)) == (None, None)
    assert estimate([np.array([np.nan])]) is None
    with pytest.raises(ValueError, match="confidence: got 1"):
        estimate([np.ones(2)], 1)


def test_alternating_values_have_negative_then_positive_autocorrelation() -> None:
    found = autocorrelation([np.tile([0.0, 1.0], 40)] * 2, lags=2)
    assert found == [pytest.approx(-1), pytest.approx(1)]
    assert autocorrelation([np.ones(9)], lags=2) == [None, None]
    assert autocorrelation([np.array([0.0, np.nan, 1.0, np.nan])], lags=2) == [None, pytest.approx(-1)]


def test_autocorrelation_pairs_stay_within_a_cluster() -> None:
    """Within clusters values are equal; across their borders they are opposite."""
    found = autocorrelation([np.zeros(2), np.ones(2)] * 10, lags=2)
    assert found == [pytest.approx(1), None]

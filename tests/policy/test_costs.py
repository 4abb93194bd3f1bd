"""The cost model knows what a step takes, whatever else happens on the machine."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outpace.policy.config import GoodputConfig
from outpace.policy.costs import StepCosts

CONFIG = GoodputConfig()


def measured(seconds: dict[int, float], times: int = 4) -> StepCosts:
    costs = StepCosts(16, CONFIG)
    for _ in range(times):
        for g, each in seconds.items():
            costs.record(g, each)
    return costs


def test_seconds_between_measured_g_are_interpolated_and_beyond_them_extrapolated() -> None:
    ratios = measured({0: 2.0, 2: 3.0, 4: 4.0}).ratios()
    assert ratios[:5] == pytest.approx([1, 1.25, 1.5, 1.75, 2])
    assert ratios[16] == pytest.approx(5)


def test_larger_g_are_tried_while_only_one_is_measured() -> None:
    """The second token of a pass may double its time on a CPU, and further ones may be nearly free."""
    assert measured({0: 1.0, 2: 2.0}).ratios()[2:] == pytest.approx([2] * 15)


def test_first_seconds_of_a_g_may_contain_a_warm_up() -> None:
    costs = StepCosts(4, CONFIG)
    for seconds in (50.0, 1.0, 1.0):
        costs.record(0, seconds)
    assert costs.baseline_seconds == pytest.approx(1.0, rel=0.2)
    costs.record(2, 30.0)
    assert costs.measured == [0]
    costs.record(2, 1.5)
    assert costs.ratios()[2] == pytest.approx(1.5, rel=0.2)


def test_slower_machine_or_longer_context_changes_all_g_alike() -> None:
    costs = measured({0: 1.0, 4: 1.5}, times=20)
    for t in range(200):
        costs.record(4, 1.5 * (1 + 0.01 * t))
    assert costs.baseline_seconds == pytest.approx(3.0, rel=0.1)
    assert costs.ratios()[4] == pytest.approx(1.5, rel=0.1)


def test_g_that_was_not_measured_for_long_takes_over_its_own_difference() -> None:
    costs = measured({0: 1.0, 4: 3.0}, times=6)
    for _ in range(1000):
        costs.record(0, 1.0)
    for _ in range(40):
        costs.record(4, 1.2)
        for _ in range(50):
            costs.record(0, 1.0)
    assert costs.ratios()[4] == pytest.approx(1.2, rel=0.1)
    assert costs.baseline_seconds == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("stall", [10.0, 1000.0])
def test_one_stall_moves_the_estimate_little(stall: float) -> None:
    costs = measured({0: 1.0, 4: 1.5}, times=20)
    costs.record(0, stall)
    assert costs.baseline_seconds == pytest.approx(1.0, rel=0.06)
    assert costs.ratios()[4] == pytest.approx(1.5, rel=0.06)


def test_measurement_is_stale_after_many_passes_and_sooner_if_there_are_few() -> None:
    costs = measured({0: 1.0, 2: 1.2}, times=CONFIG.cost_measurements)
    for g in (4, 4):
        costs.record(g, 1.4)
    ages: dict[int, int] = {}
    for t in range(2 * CONFIG.stale_passes):
        ages |= {g: t for g in (2, 4) if costs.stale(g) and g not in ages}
        costs.record(0, 1.0)
    assert ages[2] == pytest.approx(CONFIG.stale_passes, abs=4)
    assert ages[4] == pytest.approx(CONFIG.stale_passes * 2 / CONFIG.cost_measurements, abs=4)
    assert not costs.stale(0)


def test_noise_averages_out() -> None:
    rng, costs = np.random.default_rng(0), StepCosts(4, CONFIG)
    for _ in range(400):
        for g, seconds in {0: 1.0, 4: 1.3}.items():
            costs.record(g, seconds * math.exp(0.1 * rng.standard_normal()))
    assert costs.ratios()[4] == pytest.approx(1.3, rel=0.12)


def test_catch_up_costs_its_measured_seconds_per_token() -> None:
    assert measured({0: 2.0}).catch_up(1000) == 0  # nothing is known of drafts
    costs = measured({0: 2.0, 1: 3.0})
    assert costs.catch_up(32) == pytest.approx(1.0)  # as if a draft step could process 16 tokens
    costs.record_catch_up(1, 3.0)  # a stall in a short catch-up says little
    assert costs.catch_up(200) < 10
    for _ in range(50):
        costs.record_catch_up(1000, 100.0)
    assert costs.catch_up(200) == pytest.approx(10.0, rel=0.05)
    for _ in range(40):  # few tokens do not outweigh the many of an encoder's input
        costs.record_catch_up(5, 0.1)
    assert costs.catch_up(200) == pytest.approx(10.0, rel=0.2)
    costs.record_catch_up(5, -1e9)
    assert costs.catch_up(200) == 0  # never below zero

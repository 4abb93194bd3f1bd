"""The schedule of probes, checked step by step."""

from __future__ import annotations

import pytest

from outpace.policy.budget import EXPENSIVE_INTERVAL, INCOME, LOSS_FRACTION, ExplorationBudget, Price
from outpace.policy.probes import (
    MAX_CAPTURE_PRICE,
    MAX_DECISION_INTERVAL,
    PROBE_TIMEOUT,
    STALE_AFTER,
    Probes,
    capture_price,
)

CHEAP = Price(0.2)


def run_baseline_steps(probes: Probes, steps: int) -> None:
    for _ in range(steps):
        probes.end_step(drafted=False)


def start(probes: Probes, price: Price = CHEAP, *, hopeless: bool = False, min_wait: float = 0.0) -> bool:
    return probes.start_if_due(price, hopeless, min_wait)


def skipped_decisions(probes: Probes) -> int:
    skipped = 0
    while probes.skip_decision():
        skipped += 1
    return skipped


def test_probe_is_due_after_a_waiting_time_that_grows_with_its_loss() -> None:
    probes = Probes(ExplorationBudget())
    run_baseline_steps(probes, round(CHEAP.loss / LOSS_FRACTION) - 1)
    assert not start(probes)
    run_baseline_steps(probes, 1)
    assert start(probes)


def test_next_probe_waits_for_the_outcome_of_the_last() -> None:
    probes = Probes(ExplorationBudget())
    run_baseline_steps(probes, EXPENSIVE_INTERVAL)
    assert start(probes)
    assert not start(probes)
    assert probes.end_step(drafted=False) is None  # a step that was started before the probe
    assert not start(probes)
    assert probes.end_step(drafted=True) == CHEAP
    assert probes.end_step(drafted=True) is None
    run_baseline_steps(probes, EXPENSIVE_INTERVAL)
    assert start(probes)


def test_probe_without_an_outcome_ends_after_the_timeout() -> None:
    probes = Probes(ExplorationBudget())
    probes.start(CHEAP)
    run_baseline_steps(probes, PROBE_TIMEOUT)
    assert probes.end_step(drafted=False) == CHEAP
    run_baseline_steps(probes, EXPENSIVE_INTERVAL)
    assert start(probes)


def test_withdrawn_probe_may_start_at_the_next_choice() -> None:
    probes = Probes(ExplorationBudget())
    run_baseline_steps(probes, EXPENSIVE_INTERVAL)
    assert start(probes)
    probes.withdraw()
    assert start(probes)


def test_probe_after_a_success_is_due_at_once_within_a_sequence() -> None:
    probes = Probes(ExplorationBudget())
    probes.end_step(drafted=True)
    probes.record_outcome(succeeded=True)
    assert start(probes)
    probes.end_step(drafted=True)
    assert start(probes)
    probes.end_step(drafted=True)
    probes.new_sequence()
    assert not start(probes)


def test_probe_with_hopeless_costs_is_due_after_the_long_interval() -> None:
    probes = Probes(ExplorationBudget())
    run_baseline_steps(probes, EXPENSIVE_INTERVAL - 1)
    assert not start(probes, hopeless=True)
    run_baseline_steps(probes, 1)
    assert start(probes, hopeless=True)


def test_no_decision_is_made_before_a_probe_may_be_due() -> None:
    probes = Probes(ExplorationBudget())
    run_baseline_steps(probes, 4)
    assert not start(probes)
    assert skipped_decisions(probes) == round(CHEAP.loss / LOSS_FRACTION) - 4
    probes.budget.balance = 0.0
    assert not start(probes)  # the balance does not cover it
    assert skipped_decisions(probes) == round(CHEAP.loss / INCOME)
    assert not start(probes, Price(100.0))
    assert skipped_decisions(probes) == MAX_DECISION_INTERVAL
    assert not start(probes)
    probes.end_step(drafted=True)
    assert skipped_decisions(probes) == 0
    assert not start(probes)
    probes.new_sequence()
    assert skipped_decisions(probes) == 0


def test_decisions_after_an_outcome_without_a_draft_are_skipped_for_the_minimum_wait_only() -> None:
    probes = Probes(ExplorationBudget())
    run_baseline_steps(probes, 4)
    probes.record_outcome(succeeded=False)
    assert not start(probes)
    assert skipped_decisions(probes) == 0
    assert not start(probes, min_wait=3.0)
    assert skipped_decisions(probes) == 3


def test_estimates_are_stale_after_some_steps_without_an_outcome() -> None:
    probes = Probes(ExplorationBudget())
    run_baseline_steps(probes, STALE_AFTER - 1)
    assert not probes.stale
    run_baseline_steps(probes, 1)
    assert probes.stale
    probes.record_outcome(succeeded=False)
    assert not probes.stale


def test_price_of_a_capture_has_an_upper_limit() -> None:
    assert capture_price(2.0, 0.5) == pytest.approx(4.0)
    assert capture_price(100.0, 0.5) == MAX_CAPTURE_PRICE

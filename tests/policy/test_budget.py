"""The exploration budget, checked against values computed by hand."""

from __future__ import annotations

import math

import pytest

from outpace.policy.budget import (
    EXPENSIVE_INTERVAL,
    EXPENSIVE_LOSS,
    INCOME,
    INCOME_LIMIT,
    INITIAL_BALANCE,
    LOSS_FRACTION,
    MAX_BALANCE,
    MAX_UNEXPECTED_LOSS,
    MIN_BALANCE,
    ExplorationBudget,
    Price,
)


def test_gains_and_losses_change_the_balance_within_its_limits() -> None:
    budget = ExplorationBudget()
    budget.book(1.0)
    assert budget.balance == pytest.approx(INITIAL_BALANCE + 1 + INCOME)
    for _ in range(40):
        budget.book(1.0)
    assert budget.balance == MAX_BALANCE
    assert budget.debt == 0
    for _ in range(40):
        budget.book(-1.0)
    assert budget.balance == pytest.approx(MIN_BALANCE + INCOME)
    assert budget.debt == pytest.approx(-MIN_BALANCE - INCOME)


def test_income_stops_at_its_limit_and_resumes_after_a_loss() -> None:
    budget = ExplorationBudget()
    for _ in range(10_000):
        budget.book(0.0)
    assert budget.balance == INCOME_LIMIT
    budget.book(-1.0)
    for _ in range(round(1 / INCOME) + 1):
        budget.book(0.0)
    assert budget.balance == INCOME_LIMIT
    budget.book(2.0)
    budget.book(0.0)
    assert budget.balance == INCOME_LIMIT + 2  # the limit does not reduce gains


def test_loss_of_a_stalled_step_is_capped_beyond_the_expected_loss() -> None:
    budget = ExplorationBudget()
    budget.book(-50.0)
    assert budget.balance == pytest.approx(INITIAL_BALANCE - MAX_UNEXPECTED_LOSS + INCOME)
    budget = ExplorationBudget()
    budget.book(-6.0, expected_loss=6.0)
    assert budget.balance == pytest.approx(INITIAL_BALANCE - 6 + INCOME)


def test_cost_of_a_capture_lowers_the_balance_to_zero_at_most() -> None:
    budget = ExplorationBudget()
    budget.book(-1.0, capture=5.0)
    assert budget.balance == pytest.approx(INITIAL_BALANCE - 6 + INCOME)
    budget.book(-1.0, capture=9.0)  # more than the balance
    assert budget.balance == pytest.approx(INCOME)
    budget.book(-1.0, capture=9.0)
    assert budget.balance == pytest.approx(2 * INCOME - 1)


def test_probe_is_due_when_its_loss_is_a_small_fraction_of_the_waiting_time() -> None:
    budget = ExplorationBudget()
    assert budget.steps_until_due(Price(0.2), 0) == pytest.approx(0.2 / LOSS_FRACTION)
    assert budget.steps_until_due(Price(0.2), 10) <= 0
    assert budget.steps_until_due(Price(0.0), 0) <= 0
    assert budget.steps_until_due(Price(0.2, 3.0), 20) > 20  # with catching up
    assert budget.steps_until_due(Price(0.2), math.inf) < 0  # after a successful probe


def test_probe_is_due_when_the_balance_covers_it() -> None:
    budget = ExplorationBudget()
    assert budget.steps_until_due(Price(1.0, 0.0, 9.0), 1000) == pytest.approx(
        (10 - INITIAL_BALANCE) / INCOME
    )
    budget.balance = INCOME_LIMIT  # the capture costs more than income can save
    assert budget.steps_until_due(Price(1.0, 0.0, 20.0), 0) == pytest.approx((21 - INCOME_LIMIT) / INCOME)
    assert budget.steps_until_due(Price(1.0, 0.0, 20.0), 9 / INCOME) <= 0
    budget.balance = MIN_BALANCE
    assert budget.steps_until_due(Price(0.5), math.inf) == pytest.approx((0.5 - MIN_BALANCE) / INCOME)


@pytest.mark.parametrize("loss", [EXPENSIVE_LOSS + 0.1, 20.0])
def test_expensive_probe_is_due_after_the_long_interval(loss: float) -> None:
    budget = ExplorationBudget()
    budget.balance = MAX_BALANCE
    assert budget.steps_until_due(Price(0.5, loss), 100) == EXPENSIVE_INTERVAL - 100
    assert budget.steps_until_due(Price(0.5, loss), EXPENSIVE_INTERVAL) <= 0


def test_probe_above_the_income_limit_waits_until_income_would_have_covered_it() -> None:
    budget = ExplorationBudget()
    budget.balance = MAX_BALANCE
    steps = budget.steps_until_due(Price(0.5, 1000.0), EXPENSIVE_INTERVAL)
    assert steps == pytest.approx((1000.5 - MAX_BALANCE) / INCOME - EXPENSIVE_INTERVAL)
    assert budget.steps_until_due(Price(0.5, 1000.0), 1001 / INCOME) <= 0


@pytest.mark.parametrize("steps_since_draft", [math.inf, 1e6])
def test_probe_above_the_income_limit_needs_a_balance_at_the_limit(steps_since_draft: float) -> None:
    budget = ExplorationBudget()
    budget.balance = MIN_BALANCE
    steps = budget.steps_until_due(Price(0.5, 1000.0), steps_since_draft)
    assert steps == pytest.approx((INCOME_LIMIT - MIN_BALANCE) / INCOME)
    budget.balance = MAX_BALANCE
    assert budget.steps_until_due(Price(0.5, 1000.0), steps_since_draft) <= 0

"""What may be lost, by hand."""

from __future__ import annotations

import math

import pytest

from outpace.policy import budget
from outpace.policy.budget import (
    DEAR,
    FIRST,
    INCOME,
    LEAST,
    MOST,
    SAVED,
    SELDOM,
    SHARE,
    ExplorationBudget,
    Price,
)


def test_what_is_won_and_lost_is_remembered_within_bounds() -> None:
    one = ExplorationBudget()
    one.book(1.0)
    assert one.balance == pytest.approx(FIRST + 1 + INCOME)
    for _ in range(40):
        one.book(1.0)
    assert one.balance == MOST
    assert one.overdrawn == 0
    for _ in range(40):
        one.book(-1.0)
    assert one.balance == pytest.approx(LEAST + INCOME)
    assert one.overdrawn == pytest.approx(-LEAST - INCOME)


def test_what_is_given_makes_up_for_losses_and_does_not_pile_up() -> None:
    one = ExplorationBudget()
    for _ in range(10_000):
        one.book(0.0)
    assert one.balance == SAVED
    one.book(-1.0)
    for _ in range(round(1 / INCOME) + 1):
        one.book(0.0)
    assert one.balance == SAVED
    one.book(2.0)
    one.book(0.0)
    assert one.balance == SAVED + 2  # nor is what was won taken away


def test_an_accident_is_not_booked_but_what_was_expected_is() -> None:
    stalled, dear, made = ExplorationBudget(), ExplorationBudget(), ExplorationBudget()
    stalled.book(-50.0)
    assert stalled.balance == pytest.approx(FIRST - budget.ACCIDENT + INCOME)
    dear.book(-6.0, expected=6.0)
    assert dear.balance == pytest.approx(FIRST - 6 + INCOME)
    made.book(-1.0, once=5.0)
    assert made.balance == pytest.approx(FIRST - 6 + INCOME)
    made.book(-1.0, once=9.0)  # more than there is
    assert made.balance == pytest.approx(INCOME)
    made.book(-1.0, once=9.0)
    assert made.balance == pytest.approx(2 * INCOME - 1)


def test_a_try_is_due_by_what_it_takes_of_the_time() -> None:
    one = ExplorationBudget()
    assert one.wait(Price(0.2), 0) == pytest.approx(0.2 / SHARE)
    assert one.wait(Price(0.2), 10) <= 0
    assert one.wait(Price(0.0), 0) <= 0
    assert one.wait(Price(0.2, 3.0), 20) > 20  # with what is read
    assert one.wait(Price(0.2), math.inf) < 0  # after one that went well


def test_a_try_is_due_when_there_is_enough_for_it() -> None:
    one = ExplorationBudget()
    assert one.wait(Price(1.0, 0.0, 9.0), 1000) == pytest.approx((10 - FIRST) / INCOME)
    one.balance = SAVED  # all that can be saved, though making something takes more
    assert one.wait(Price(1.0, 0.0, 20.0), 0) == pytest.approx((21 - SAVED) / INCOME)
    assert one.wait(Price(1.0, 0.0, 20.0), 9 / INCOME) <= 0
    one.balance = LEAST
    assert one.wait(Price(0.5), math.inf) == pytest.approx((0.5 - LEAST) / INCOME)


@pytest.mark.parametrize("loss", [DEAR + 0.1, 20.0])
def test_what_takes_much_is_tried_seldom_but_not_never(loss: float) -> None:
    one = ExplorationBudget()
    one.balance = MOST
    assert one.wait(Price(0.5, loss), 100) == SELDOM - 100
    assert one.wait(Price(0.5, loss), SELDOM) <= 0


def test_what_takes_more_than_can_be_saved_waits_until_it_is_as_little_of_the_time() -> None:
    one = ExplorationBudget()
    one.balance = MOST
    assert one.wait(Price(0.5, 1000.0), SELDOM) == pytest.approx((1000.5 - MOST) / INCOME - SELDOM)
    assert one.wait(Price(0.5, 1000.0), 1001 / INCOME) <= 0


@pytest.mark.parametrize("since", [math.inf, 1e6])
def test_what_takes_more_than_can_be_saved_needs_all_that_can(since: float) -> None:
    one = ExplorationBudget()
    one.balance = LEAST
    assert one.wait(Price(0.5, 1000.0), since) == pytest.approx((SAVED - LEAST) / INCOME)
    one.balance = MOST
    assert one.wait(Price(0.5, 1000.0), since) <= 0

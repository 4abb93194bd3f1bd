"""When tries are made, by hand."""

from __future__ import annotations

import pytest

from outpace.policy.budget import INCOME, SELDOM, SHARE, ExplorationBudget, Price
from outpace.policy.probes import AGAIN, LATE, MADE, PATIENCE, Probes, booked

CHEAP = Price(0.2)


def rested(tries: Probes, iterations: int) -> None:
    for _ in range(iterations):
        tries.over(proposed=False)


def due(tries: Probes, price: Price = CHEAP, *, hopeless: bool = False, thinking: float = 0.0) -> bool:
    return tries.make_if_due(price, hopeless, thinking)


def waited(tries: Probes) -> int:
    found = 0
    while tries.rest():
        found += 1
    return found


def test_one_is_due_after_a_rest_by_what_it_takes() -> None:
    tries = Probes(ExplorationBudget())
    rested(tries, round(CHEAP.loss / SHARE) - 1)
    assert not due(tries)
    rested(tries, 1)
    assert due(tries)


def test_the_next_is_not_made_before_the_outcome_of_the_last() -> None:
    tries = Probes(ExplorationBudget())
    rested(tries, SELDOM)
    assert due(tries)
    assert not due(tries)
    assert tries.over(proposed=False) is None  # one that was under way before
    assert not due(tries)
    assert tries.over(proposed=True) == CHEAP
    assert tries.over(proposed=True) is None
    rested(tries, SELDOM)
    assert due(tries)


def test_one_that_nothing_is_heard_of_has_come_to_nothing() -> None:
    tries = Probes(ExplorationBudget())
    tries.make(CHEAP)
    rested(tries, LATE)
    assert tries.over(proposed=False) == CHEAP
    rested(tries, SELDOM)
    assert due(tries)


def test_one_that_was_withdrawn_is_made_at_the_next_choice() -> None:
    tries = Probes(ExplorationBudget())
    rested(tries, SELDOM)
    assert due(tries)
    tries.withdraw()
    assert due(tries)


def test_after_one_that_went_well_there_is_no_rest_within_a_text() -> None:
    tries = Probes(ExplorationBudget())
    tries.over(proposed=True)
    tries.heard(went_well=True)
    assert due(tries)
    tries.over(proposed=True)
    assert due(tries)
    tries.over(proposed=True)
    tries.another_text()
    assert not due(tries)


def test_where_costs_speak_against_any_one_is_made_seldom() -> None:
    tries = Probes(ExplorationBudget())
    rested(tries, SELDOM - 1)
    assert not due(tries, hopeless=True)
    rested(tries, 1)
    assert due(tries, hopeless=True)


def test_it_is_not_thought_of_again_before_one_may_be_due() -> None:
    tries = Probes(ExplorationBudget())
    rested(tries, 4)
    assert not due(tries)
    assert waited(tries) == round(CHEAP.loss / SHARE) - 4
    tries.budget.balance = 0.0
    assert not due(tries)  # for want of something to spend
    assert waited(tries) == round(CHEAP.loss / INCOME)
    assert not due(tries, Price(100.0))
    assert waited(tries) == PATIENCE
    assert not due(tries)
    tries.over(proposed=True)
    assert waited(tries) == 0
    assert not due(tries)
    tries.another_text()
    assert waited(tries) == 0


def test_news_without_guesses_is_followed_but_for_the_time_that_thinking_takes() -> None:
    tries = Probes(ExplorationBudget())
    rested(tries, 4)
    tries.heard(went_well=False)
    assert not due(tries)
    assert waited(tries) == 0
    assert not due(tries, thinking=3.0)
    assert waited(tries) == 3


def test_without_news_nothing_is_believed() -> None:
    tries = Probes(ExplorationBudget())
    rested(tries, AGAIN - 1)
    assert not tries.blind
    rested(tries, 1)
    assert tries.blind
    tries.heard(went_well=False)
    assert not tries.blind


def test_what_is_made_once_is_booked_up_to_a_bound() -> None:
    assert booked(2.0, 0.5) == pytest.approx(4.0)
    assert booked(100.0, 0.5) == MADE

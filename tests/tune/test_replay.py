"""Expected times of texts against counts by hand and against theory."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.bench import theory
from outpace.tune.replay import Replay, expected_seconds


def test_with_certain_outcomes_the_time_is_a_count_of_steps() -> None:
    accepted = np.array([1.0, 1, 0, 1, 0, 0, 1, 1])
    # With three draft tokens, the steps have tokens 0-2, 3-4, 5, 6-7.
    assert expected_seconds(accepted, 3, 2.0, 1.0) == pytest.approx(4 * 2.0)
    assert expected_seconds(accepted, 0, 1.0, 1.0) == pytest.approx(8.0)
    assert expected_seconds(np.full(8, np.nan), 3, 2.0, 1.0) == pytest.approx(8.0)
    assert expected_seconds(np.zeros(0), 3, 2.0, 1.0) == 0


@pytest.mark.parametrize("alpha", [0.2, 0.7])
@pytest.mark.parametrize("g", [1, 4])
def test_with_one_alpha_the_time_agrees_with_theory(alpha: float, g: int) -> None:
    n = 4000
    total = expected_seconds(np.full(n, alpha), g, 1.5, 1.0)
    assert n / total == pytest.approx(theory.expected_tokens(alpha, g) / 1.5, rel=2e-3)


def test_a_policy_per_text_beats_the_best_fixed_number() -> None:
    easy, hard = np.ones(48), np.zeros(48)
    replay = Replay([easy, hard] * 3, [1.0, 1.5, 1.6, 1.7, 1.8, 1.9], 1.0)
    assert replay.num_draft_tokens == [0, 1, 2, 3, 4, 5]
    g = replay.best()
    fixed, per_text = replay.fixed(g), replay.best_per_text()
    # Each hard text takes 48 steps without speculation, each easy one 8 steps of 1.9 seconds.
    assert per_text[0] == pytest.approx(96 / (48 + 8 * 1.9))
    assert fixed[0] < 1 < per_text[0]
    low, high = per_text[1] or (0, 0)
    assert low < per_text[0] < high

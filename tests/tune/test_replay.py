"""What texts would have taken, against walking through them."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.bench import theory
from outpace.tune.replay import Replay, seconds


def test_of_sure_guesses_it_is_the_count_of_passes() -> None:
    right = np.array([1.0, 1, 0, 1, 0, 0, 1, 1])
    # Three guesses an iteration: tokens 0-2, 3-4, 5, 6-7
    assert seconds(right, 3, 2.0, 1.0) == pytest.approx(4 * 2.0)
    assert seconds(right, 0, 1.0, 1.0) == pytest.approx(8.0)
    assert seconds(np.full(8, np.nan), 3, 2.0, 1.0) == pytest.approx(8.0)
    assert seconds(np.zeros(0), 3, 2.0, 1.0) == 0


@pytest.mark.parametrize("alpha", [0.2, 0.7])
@pytest.mark.parametrize("g", [1, 4])
def test_of_one_alpha_it_is_theory(alpha: float, g: int) -> None:
    n = 4000
    taken = seconds(np.full(n, alpha), g, 1.5, 1.0)
    assert n / taken == pytest.approx(theory.expected_tokens(alpha, g) / 1.5, rel=2e-3)


def test_the_best_length_and_what_a_policy_may_reach() -> None:
    easy, hard = np.ones(48), np.zeros(48)
    replay = Replay([easy, hard] * 3, [1.0, 1.5, 1.6, 1.7, 1.8, 1.9], 1.0)
    assert replay.lengths == [0, 1, 2, 3, 4, 5]
    g = replay.best()
    fixed, reached = replay.fixed(g), replay.chosen()
    # With the best of each, plain for the hard ones: 48 + 8 passes of 1.9
    assert reached[0] == pytest.approx(96 / (48 + 8 * 1.9))
    assert fixed[0] < 1 < reached[0]
    low, high = reached[1] or (0, 0)
    assert low < reached[0] < high

"""The acceptance estimate is the exact Bayesian filter of acceptance rates that jump."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from outpace import Decoder, Goodput, LookupDrafter
from outpace.bench import theory
from outpace.policy import Load, StepOutcome
from outpace.policy.acceptance import ALPHAS, AcceptanceEstimate
from outpace.policy.config import GoodputConfig
from tests.tiny import tiny

CONFIG = GoodputConfig()


def estimate_of(estimate: AcceptanceEstimate, slot: int = 0) -> float:
    """Return the probability that the next draft token of a slot is accepted."""
    return float(estimate.expected_tokens([slot], [1])[1]) - 1


def test_estimate_equals_the_sum_over_all_possible_jumps() -> None:
    """The reference sums over all possible jumps between three steps."""
    outcomes = [(4, 4), (4, 1), (2, 0)]  # tested, accepted
    jump, uniform = CONFIG.jump_probability, np.full(len(ALPHAS), 1 / len(ALPHAS))
    config = GoodputConfig(prior_outcomes=10**12)  # the estimate for a new sequence stays uniform
    estimate = AcceptanceEstimate(4, config)
    for tested, accepted in outcomes:
        estimate.learn([0], [tested], [accepted])
    likelihood = [
        ALPHAS**accepted * np.where(accepted < tested, 1 - ALPHAS, 1.0) for tested, accepted in outcomes
    ]
    total = np.zeros(len(ALPHAS))
    for jumps in itertools.product([False, True], repeat=2):
        run, last = uniform * likelihood[0], 1.0
        for jumped, each in zip(jumps, likelihood[1:], strict=True):
            last *= jump if jumped else 1 - jump
            run = (run.sum() * uniform if jumped else run) * each
        total += last * run
    expected = total / total.sum() @ ALPHAS
    assert estimate_of(estimate) == pytest.approx(expected)


def test_expected_tokens_are_those_of_theory_for_a_known_acceptance_rate() -> None:
    estimate, rng = AcceptanceEstimate(6, CONFIG), np.random.default_rng(0)
    for _ in range(3000):
        estimate.learn([0], [6], [int((rng.random(6) < 0.7).cumprod().sum())])
    expected = [float(theory.expected_tokens(0.7, g)) for g in range(7)]
    assert estimate.expected_tokens([0], [6]) == pytest.approx(expected, rel=0.15)


def test_draft_tokens_beyond_the_limit_of_a_sequence_gain_nothing() -> None:
    estimate = AcceptanceEstimate(4, CONFIG)
    both, one = (estimate.expected_tokens([0, 1], limits) for limits in ([4, 4], [4, 1]))
    assert one[:2] == pytest.approx(both[:2])
    assert one[2:] - one[1] == pytest.approx((both[2:] - both[1]) / 2)
    assert estimate.expected_tokens([0], [0]) == pytest.approx(np.ones(5))


def test_new_sequences_resemble_recent_ones() -> None:
    estimate, rng = AcceptanceEstimate(4, CONFIG), np.random.default_rng(5)
    for _ in range(400):
        estimate.learn([0], [4], [int((rng.random(4) < 0.8).cumprod().sum())])
    estimate.forget([0])
    before = estimate_of(estimate)
    assert 0.7 < before < 0.85
    assert 0.7 < estimate_of(estimate, slot=9) < 0.85
    estimate.learn([0], [4], [0])  # one rejection does not outweigh them
    assert 0.55 < estimate_of(estimate) < before
    assert 0.7 < estimate.mean() < 0.85


def test_rate_that_did_not_occur_for_long_is_still_noticed() -> None:
    estimate, rng = AcceptanceEstimate(4, CONFIG), np.random.default_rng(5)
    for _ in range(20_000):
        estimate.learn([0], [4], [int((rng.random(4) < 0.9).cumprod().sum())])
    for _ in range(8):
        estimate.learn([0], [4], [0])
    assert estimate_of(estimate) < 0.2


def test_each_slot_has_its_own_estimate() -> None:
    estimate = AcceptanceEstimate(4, CONFIG)
    for _ in range(30):
        estimate.learn([0, 1, 2], [4, 4, 0], [4, 0, 0])
    assert estimate_of(estimate, 0) > 0.9
    assert estimate_of(estimate, 1) < 0.1
    assert 0.2 < estimate_of(estimate, 2) < 0.8  # it has no draft tokens


def test_proposed_tokens_that_were_not_scored_update_the_estimate() -> None:
    policy = Goodput()
    for _ in range(3):
        policy.choose([0], proposed=[8])
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0, [1], [0]))
    before = policy.acceptance_rate
    assert before < 0.5
    for _ in range(60):
        policy.choose([0], proposed=[8])
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0, [1], [1]))
    assert policy.acceptance_rate > before + 0.2
    assert policy.choose([0], proposed=[8]) != [0]


@pytest.mark.parametrize("engine", [False, True])
def test_prompt_lookup_is_compared_with_the_generated_tokens_where_nothing_is_drafted(engine: bool) -> None:
    """The estimate becomes high for a repetitive text, though no pass ever has draft tokens."""

    class NeverDrafts(Goodput):
        idle = False  # the free drafter always proposes

        def choose(self, *args: object, **options: object) -> list[int]:
            return [0] * len(super().choose(*args, **options))  # type: ignore[arg-type]

    policy = NeverDrafts()
    decoder = Decoder(tiny(), LookupDrafter(), num_draft_tokens=policy, engine=engine)
    rates = []
    for step in decoder.stream([5, 6] * 12, temperature=0, max_new_tokens=100):
        assert step.num_draft_tokens == 0
        rates.append(policy.acceptance_rate)
    assert max(rates) > rates[0]
    assert max(rates) > 0.6

"""The default policy, in simulations with known acceptance and costs, and in a decoder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outpace import Decoder, Goodput, LookupDrafter
from outpace.bench import theory
from outpace.draft.base import Draft, State
from outpace.policy import Hint, Load, StepOutcome
from outpace.policy.acceptance import (
    ALPHAS,
    JUMP_PROBABILITY,
    JUMP_UNIFORM_SHARE,
    NEW_UNIFORM_SHARE,
    PRIOR_UPDATE_WEIGHT,
    AcceptanceEstimate,
    ConfidenceCorrection,
)
from outpace.policy.costs import Costs, RobustMean
from outpace.policy.goodput import EARLY_STEPS
from tests import tiers
from tests.policy.simulation import Cost, Simulation, flat, steep
from tests.tiny import tiny

STEPS = 600
SEEDS = range(tiers.sized(1, 2))


def expected_rate(alpha: float, cost: Cost, B: int, draft_step: float, g: int) -> float:
    """Return the expected tokens per second with a fixed g."""
    return float(B * theory.expected_tokens(alpha, g) / (cost(B, g) + g * draft_step))


def measured_rate(alpha: float, cost: Cost, B: int, draft_step: float) -> float:
    """Return the tokens per second of ``Goodput`` in simulations."""
    catch_up = 0.1 * draft_step / B
    simulations = [
        Simulation(lambda t, slot: alpha, cost, B, draft_step, catch_up, seed=seed).run(Goodput(), STEPS)
        for seed in SEEDS
    ]
    return sum(each.tokens for each in simulations) / sum(each.seconds for each in simulations)


@pytest.mark.parametrize("B", [1, 8, 64])
@pytest.mark.parametrize("cost", [flat, steep])
@pytest.mark.parametrize(("alpha", "c"), [(0.02, 0.0), (0.02, 0.2), (0.3, 0.9), (0.8, 0.9)])
def test_drafter_that_cannot_pay_costs_at_most_3_percent(alpha: float, c: float, cost: Cost, B: int) -> None:
    draft_step = c * cost(B, 0)
    baseline = expected_rate(alpha, cost, B, draft_step, 0)
    assert measured_rate(alpha, cost, B, draft_step) >= 0.97 * baseline


@pytest.mark.parametrize(
    ("cost", "alpha", "c", "B"),
    [*itertools.product([flat], [0.5, 0.8, 0.9], [0.02, 0.2], [1, 8]), (steep, 0.9, 0.0, 1)],
)
def test_rate_is_within_5_percent_of_the_best_fixed_g(cost: Cost, alpha: float, c: float, B: int) -> None:
    draft_step = c * cost(B, 0)
    best = max(expected_rate(alpha, cost, B, draft_step, g) for g in range(17))
    assert measured_rate(alpha, cost, B, draft_step) >= 0.95 * best


def fast(batch: int, g: int) -> float:
    """Cost of passes as short as on a GPU, where the time of decisions matters."""
    return 4e-3 * flat(batch, g)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("cost", "c"), [(flat, 0.05), (flat, 0.1), (steep, 0.0), (fast, 0.05)])
def test_choice_follows_a_jump_of_the_acceptance_rate(cost: Cost, c: float, ahead: int) -> None:
    draft_step = c * cost(1, 0)
    high, low = 0.9, 0.1

    def steps_to_settle(chosen: list[int], alpha: float) -> int:
        rates = [expected_rate(alpha, cost, 1, draft_step, g) for g in range(17)]
        good = [rates[g] >= 0.9 * max(rates) for g in chosen]
        return next(i for i in range(len(good)) if all(good[i : i + 3]))

    for seed in SEEDS:
        simulation = Simulation(
            lambda t, slot: low if 200 <= t < 350 else high,
            cost,
            draft_step=draft_step,
            catch_up=0.1 * draft_step,
            seed=seed,
            ahead=ahead,
        ).run(Goodput(), 500)
        assert steps_to_settle(simulation.chosen[200:350], low) <= 20
        assert steps_to_settle(simulation.chosen[350:], high) <= 100


def test_large_batch_that_cannot_pay_does_not_prevent_speculation_at_batch_size_1() -> None:
    policy = Goodput()
    Simulation(lambda t, slot: 0.95, steep, 64).run(policy, 60)
    alone = Simulation(lambda t, slot: 0.95, steep, 1).run(policy, 400)
    assert alone.rate >= 0.9 * max(expected_rate(0.95, steep, 1, 0, g) for g in range(17))


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("stall", [3.0, 10.0])
def test_stalled_pass_does_not_spoil_the_estimate_of_its_g(when: int, stall: float) -> None:
    simulation = Simulation(lambda t, slot: 0.9, flat, 1, 0.02, 0.002, stalls={when: stall}).run(
        Goodput(), 600
    )
    assert simulation.rate >= 0.9 * max(expected_rate(0.9, flat, 1, 0.02, g) for g in range(17))
    bad = Simulation(lambda t, slot: 0.05, flat, 1, 0.9, 0.05, stalls={when: stall}).run(Goodput(), 600)
    assert bad.rate >= 0.95


def test_speculation_resumes_after_a_busy_start() -> None:
    policy = Goodput()
    busy = Simulation(lambda t, slot: 0.95, lambda batch, g: 3 * steep(batch, g), 1).run(policy, 100)
    idle = Simulation(lambda t, slot: 0.95, steep, 1).run(policy, 1500)
    best = max(expected_rate(0.95, steep, 1, 0, g) for g in range(17))
    assert busy.rate <= best
    assert idle.rate >= 0.9 * best


def test_sequences_with_low_acceptance_do_not_prevent_speculation_in_later_ones() -> None:
    policy = Goodput()
    bad = Simulation(lambda t, slot: 0.02, flat, 1, 0.2, 0.02, prompt=16)
    for _ in range(16):
        bad.run(policy, 200)
    assert bad.rate >= 0.97
    good = Simulation(lambda t, slot: 0.95, flat, 1, 0.2, 0.02, prompt=16)
    for _ in range(6):
        good.run(policy, 100)
    assert good.rate >= 0.8 * max(expected_rate(0.95, flat, 1, 0.2, g) for g in range(17))


@pytest.mark.parametrize(("alpha", "c"), [(0.02, 0.3), (0.5, 0.35)])
def test_cost_of_reading_long_prompts_is_bounded(alpha: float, c: float) -> None:
    """The answers are short, so speculation cannot repay the reading of a long prompt."""
    policy = Goodput()
    simulation = Simulation(lambda t, slot: alpha, flat, 1, c, c / 16, prompt=512)
    for _ in range(12):
        simulation.run(policy, 40)
    assert simulation.rate >= 0.95


def test_posterior_equals_the_exact_bayesian_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference sums over all possible jumps between three steps."""
    outcomes = [(4, 4), (4, 1), (2, 0)]  # tested, accepted
    prior = np.full(len(ALPHAS), 1 / len(ALPHAS))
    likelihoods = [
        ALPHAS**accepted * (1 - ALPHAS if accepted < tested else 1) for tested, accepted in outcomes
    ]
    no_jump = (1 - JUMP_PROBABILITY) * np.eye(len(ALPHAS))
    weights = prior * likelihoods[0]
    for likelihood in likelihoods[1:]:
        weights = (no_jump.T @ weights + JUMP_PROBABILITY * prior * weights.sum()) * likelihood
    monkeypatch.setattr("outpace.policy.acceptance.PRIOR_UPDATE_WEIGHT", 0.0)  # a constant prior
    estimate = AcceptanceEstimate(16)
    for tested, accepted in outcomes:
        estimate.step += 1
        estimate.posterior([5])
        estimate.learn([5], [tested], [accepted])
    estimate.posterior([5])
    assert estimate._posterior[5] == pytest.approx(weights / weights.sum())


def test_positions_with_less_acceptance_than_a_constant_alpha_predicts_are_corrected() -> None:
    estimate = AcceptanceEstimate(4)
    for _ in range(300):
        estimate.step += 1
        estimate.posterior([0])
        estimate.learn([0], [4], [2])  # two are always accepted, a third never
    corrected = estimate.posterior([0]) @ estimate.prefix_probability()
    uncorrected = estimate.posterior([0]) @ ALPHAS[:, None] ** np.arange(1, 5)
    assert corrected[0, 2] < 0.8 * uncorrected[0, 2]
    assert corrected[0, 0] >= uncorrected[0, 0]


def test_confidence_shifts_the_acceptance_as_far_as_outcomes_show() -> None:
    correction = ConfidenceCorrection()
    assert correction.shifts() == pytest.approx(np.zeros(8))
    for _ in range(100):
        correction.learn(correction.level([0.95, 0.1]), np.array([True, False]))
    low, high = correction.shifts()[correction.level([0.1, 0.95])]
    assert high > 1 > -1 > low
    assert list(correction.level([0.0, 1.0, float("nan"), 2.0, -1.0])) == [0, 7, 0, 7, 0]


def test_longer_prefixes_are_never_more_likely_to_be_accepted() -> None:
    estimate, rng = AcceptanceEstimate(8), np.random.default_rng(0)
    for _ in range(200):
        tested = rng.integers(1, 9, 4)
        estimate.step += 1
        estimate.learn(range(4), tested, np.where(rng.random(4) < 0.5, 0, tested))
        probability = estimate.prefix_probability()
        assert (np.diff(probability, axis=-1) <= 0).all()
        assert probability.max() <= 1


def test_pass_seconds_are_interpolated_and_extrapolated_between_measured_g() -> None:
    costs = Costs(8)
    assert costs.baseline_seconds(Load(1)) is None
    for g, seconds in ((0, 9.0), (0, 1.0), (4, 9.0), (4, 3.0)):  # one of two may be a warm-up
        costs.record_pass(Load(1), g, seconds)
    assert costs.pass_seconds(Load(1)) == pytest.approx([1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5])
    for _ in range(2):
        costs.record_pass(Load(64), 0, 10.0)
    assert costs.pass_seconds(Load(64)) == pytest.approx(10 * costs.pass_seconds(Load(1)))
    costs.record_pass(Load(1), 8, 100.0)
    assert costs.pass_seconds(Load(1))[8] == 5  # a single measurement is ignored
    assert costs.pass_seconds(Load(1), confirmed_only=False)[8] == 100
    for _ in range(2):
        costs.record_pass(Load(1), 8, 2.0)
    assert costs.pass_seconds(Load(1))[4:].tolist() == [2] * 5  # more tokens never take less
    smaller = Costs(8)
    for load, g, seconds in ((Load(64), 0, 1.0), (Load(64), 4, 9.0), (Load(1), 0, 1.0)):
        smaller.record_pass(load, g, seconds)
        smaller.record_pass(load, g, seconds)
    # Times of larger batches are not used for smaller ones.
    assert smaller.pass_seconds(Load(1)).tolist() == [1] * 9
    for _ in range(3):
        costs.record_pass(Load(1), 0, 1000.0)  # the machine was suspended
    assert costs.baseline_seconds(Load(1)) < 8  # type: ignore[operator]


def test_g_measured_at_different_context_lengths_are_compared_at_the_same_one() -> None:
    costs, longer = Costs(8), Load(1, 2000)
    for _ in range(2):
        costs.record_pass(Load(1), 0, 1.0)
        costs.record_pass(Load(1), 4, 3.0)
    assert costs.baseline_seconds(longer) == 1
    for _ in range(100):
        costs.record_pass(longer, 0, 2.0)
    assert costs.pass_seconds(longer)[[0, 2, 4, 8]] == pytest.approx([2, 4, 6, 10], rel=0.03)
    assert costs.pass_seconds(Load(1, 1000))[[0, 4]] == pytest.approx([1.5, 4.5], rel=0.03)
    for _ in range(100):
        costs.record_pass(Load(1), 0, 1.0)
    assert costs.pass_seconds(Load(1))[[0, 4]] == pytest.approx([1, 3], rel=0.03)


def test_cost_per_token_of_context_is_estimated() -> None:
    costs, rng = Costs(8), np.random.default_rng(0)
    for t in range(1000):  # sequences without speculation, one token at a time
        context = 30 + t % 250
        costs.record_pass(Load(64, context), 0, (1 + 1e-3 * context) * (1 + 0.01 * rng.standard_normal()))
    for context in (30, 500):
        assert costs.baseline_seconds(Load(64, context)) == pytest.approx(1 + 1e-3 * context, rel=0.03)
    for _ in range(400):  # then long contexts, and short ones again
        for g, base in ((0, 1.0), (4, 1.2)):
            costs.record_pass(Load(1, 30000), g, 4 * base)
    for _ in range(3):
        costs.record_pass(Load(1, 100), 0, 1.01)
    assert costs.pass_seconds(Load(1, 100))[[0, 4]] == pytest.approx([1.01, 1.21], rel=0.05)


@pytest.mark.parametrize("stall", [10.0, 30.0])
def test_stall_in_a_long_context_does_not_spoil_the_estimate_for_short_ones(stall: float) -> None:
    policy = Goodput()
    Simulation(lambda t, slot: 0.8, flat, 8, slope=1e-3, prompt=300, stalls={2: stall}).run(policy, 40)
    simulation = Simulation(lambda t, slot: 0.8, flat, 8, slope=1e-3, prompt=30, seed=1)
    for _ in range(4):
        simulation.run(policy, 80)
    assert policy.forecast.costs(Load(8, 30)).pass_seconds(Load(8, 30)).min() > 0.9
    rates = [expected_rate(0.8, flat, 8, 0, g) for g in range(17)]
    assert np.mean([rates[g] for g in simulation.chosen]) >= 0.93 * max(rates)


def test_stall_after_a_change_to_a_shorter_context_counts_as_an_outlier() -> None:
    costs = Costs(8)
    for _ in range(50):
        costs.record_pass(Load(1, 2000), 0, 1.0)
    costs.record_pass(Load(1, 100), 0, 100.0)
    assert costs.baseline_seconds(Load(1, 100)) < 1.5  # type: ignore[operator]


def test_larger_batch_takes_the_shape_of_a_smaller_one_in_long_contexts() -> None:
    costs, rng = Costs(8), np.random.default_rng(0)
    for _ in range(200):  # nearly all of the time is due to the context
        for g, seconds in ((0, 1.0), (4, 2.0)):
            context = 30000 + int(rng.integers(100))
            costs.record_pass(Load(1, context), g, seconds * (1 + 0.05 * rng.standard_normal()))
    for _ in range(3):
        costs.record_pass(Load(64, 30000), 0, 10.0)
    assert costs.pass_seconds(Load(64, 30000))[[0, 4]] == pytest.approx([10, 20], rel=0.1)


@pytest.mark.parametrize("alpha", [0.6, 0.8])
def test_slower_passes_in_longer_contexts_do_not_mislead_the_choice(alpha: float) -> None:
    """As with 64 sequences on a GPU: a pass takes 1.4 times as long after 300 tokens as after 30."""

    def cost(batch: int, g: int) -> float:
        return 1.0 + 0.16 * g + 0.02 * g**2

    policy = Goodput()
    for seed in SEEDS:
        Simulation(lambda t, slot: alpha, cost, 64, slope=0.0015, noise=0.01, prompt=32, seed=seed).run(
            policy, 90
        )
    simulation = Simulation(lambda t, slot: alpha, cost, 64, slope=0.0015, noise=0.01, prompt=32, seed=9)
    simulation.run(policy, 90)
    rates = [expected_rate(alpha, cost, 64, 0, g) for g in range(17)]
    assert np.mean([rates[g] for g in simulation.chosen]) >= 0.97 * max(rates)


def test_proposals_of_a_free_drafter_are_scored_where_confidence_is_high() -> None:
    """Prompt lookup after a match of one token is mostly wrong, and after three mostly correct."""
    policy, rng = Goodput(), np.random.default_rng(0)
    scored: dict[bool, list[int]] = {True: [], False: []}  # by whether the confidence is high
    for t in range(600):
        confident = bool(t % 2)
        (g,) = policy.choose([0], hint=Hint([8], [1.0 if confident else 0.3]))
        rejected = np.flatnonzero(rng.random(8) >= (0.9 if confident else 0.1))
        correct = int(rejected[0]) if len(rejected) else 8
        accepted = min(g, correct)
        unscored = correct > g if g < 8 and accepted == g else None
        policy.observe(
            StepOutcome([0], [g], [accepted], g, Load(1), steep(1, g), unscored_correct=[unscored])
        )
        scored[confident].append(g)
    assert np.mean(scored[True][100:]) > 3
    assert np.mean(scored[False][100:]) < 0.5
    assert policy.choose([0], hint=Hint([0], [0.0])) == [0]


def test_unscored_draft_tokens_update_the_acceptance_estimate() -> None:
    policy = Goodput()
    for _ in range(3):
        policy.choose([0], hint=Hint([8], [1.0]))
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0, unscored_correct=[None]))
    for _ in range(30):
        policy.choose([0], hint=Hint([8], [1.0]))
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0, unscored_correct=[True]))
    assert policy.forecast.acceptance.posterior([0])[0] @ ALPHAS > 0.9
    assert policy.choose([0], hint=Hint([8], [1.0])) != [0]


def test_drafting_stops_where_the_confidence_is_low() -> None:
    policy = Goodput()
    for _ in range(200):
        (g,) = policy.choose([0])
        if g == 0:
            policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0))
            continue
        sampled = 0
        confidences = [0.95, 0.95, 0.05, 0.05]
        while sampled < min(g, 4) and not policy.enough([confidences[sampled]]):
            sampled += 1
        steps = sampled + (sampled < min(g, 4))
        accepted = min(sampled, 2)  # the confident ones are correct, the others wrong
        policy.observe(
            StepOutcome([0], [sampled], [accepted], sampled, Load(1), 1.0 + 0.2 * steps, 0.2 * steps, steps)
        )
    policy.choose([0])
    assert not policy.enough([0.95])
    assert not policy.enough([0.95])
    assert policy.enough([0.05])


def test_early_stopping_is_off_for_short_draft_steps() -> None:
    policy = Goodput()
    for seconds, asks in ((1e-3, False), (1e-1, True)):
        for _ in range(60):
            (g,) = policy.choose([0])
            policy.observe(StepOutcome([0], [g], [g], g, Load(1), 1.0 + g * seconds, g * seconds, g))
        policy.choose([0])
        assert policy.asks is asks


@pytest.mark.parametrize(("alpha", "c"), [(0.3, 0.05), (0.6, 0.05), (0.9, 0.02)])
def test_g_is_captured_when_it_would_pay(alpha: float, c: float) -> None:
    best = max(expected_rate(alpha, flat, 1, c, g) for g in range(17))
    for seed in SEEDS:
        simulation = Simulation(lambda t, slot: alpha, flat, 1, c, 0.1 * c, seed=seed, capture=40.0).run(
            Goodput(), 2000
        )
        early = [g for g, t in simulation.captured.items() if t < 2 * EARLY_STEPS]
        assert 0 in early
        assert len(simulation.captured) <= len(early) + 3
        rates = [expected_rate(alpha, flat, 1, c, g) for g in simulation.chosen[2 * EARLY_STEPS :]]
        assert np.mean(rates) >= 0.95 * best


@pytest.mark.parametrize(
    ("captured", "jump"),
    tiers.each_value([[0], [0, 1, 2, 3, 5, 8, 12, 16], [2, 7], []], [12, 8]),
)
def test_choice_is_near_the_best_whatever_another_policy_has_captured(captured: list[int], jump: int) -> None:
    """From g = jump on, passes take much longer.

    With a jump at 8, the best g is 7, which is no candidate.
    """

    def cost(batch: int, g: int) -> float:
        return 1.0 + 0.05 * g + 0.5 * (g >= jump)

    best = max(expected_rate(0.85, cost, 1, 0, g) for g in range(17))
    share = 0.95 if jump == 12 else 0.9
    for seed in SEEDS:
        simulation = Simulation(
            lambda t, slot: 0.85 if t < 1000 else 0.02,
            cost,
            1,
            seed=seed,
            capture=40.0,
            captured=dict.fromkeys(captured, -1),
        )
        policy = Goodput()
        simulation.run(policy, 1000)
        assert np.mean([expected_rate(0.85, cost, 1, 0, g) for g in simulation.chosen[500:]]) >= share * best
        simulation.run(policy, 1000)
        assert np.mean([expected_rate(0.02, cost, 1, 0, g) for g in simulation.chosen[1100:]]) >= 0.97


def test_longer_g_is_captured_if_the_first_captured_g_does_not_pay() -> None:
    """A pass over more than one token takes twice as long, however many there are."""

    def cost(batch: int, g: int) -> float:
        return 1.0 if g == 0 else 1.95 + 0.03 * g

    best = max(expected_rate(0.7, cost, 1, 0, g) for g in range(17))
    for seed in SEEDS:
        simulation = Simulation(lambda t, slot: 0.7, cost, 1, seed=seed, capture=40.0).run(Goodput(), 1500)
        assert np.mean([expected_rate(0.7, cost, 1, 0, g) for g in simulation.chosen[500:]]) >= 0.9 * best


def test_longer_g_is_captured_even_if_it_pays_only_late() -> None:
    def cost(batch: int, g: int) -> float:
        return 1.0 if g == 0 else 2.4 + 0.02 * g

    best, rates = max(expected_rate(0.8, cost, 1, 0, g) for g in range(17)), list[float]()
    for seed in range(tiers.sized(6, 12)):  # with some seeds, luck decides when the policy notices
        simulation = Simulation(lambda t, slot: 0.05 if t < 400 else 0.8, cost, 1, seed=seed, capture=40.0)
        chosen = simulation.run(Goodput(), 2000).chosen[1200:]
        rates.append(float(np.mean([expected_rate(0.8, cost, 1, 0, g) for g in chosen])))
        assert seed not in SEEDS or rates[-1] >= 0.9 * best
    assert np.mean(rates) >= 0.9 * best


def test_useless_drafter_causes_few_captures_over_many_sampling_parameters() -> None:
    """Each sequence has its own sampling parameters, for which nothing is captured."""
    policy, captures = Goodput(), 0
    for seed in range(20):
        simulation = Simulation(lambda t, slot: 0.02, flat, 1, 0.05, 0.005, seed=seed, capture=40.0).run(
            policy, 60
        )
        captures += len([g for g in simulation.captured if g])
    assert captures <= 3


def test_missed_savings_add_up_whichever_slots_are_active() -> None:
    captured_at: dict[bool, list[int]] = {}  # steps of captures, by whether all slots are always active
    for steady in (True, False):
        policy, captured = Goodput(), {0, 2}
        captured_at[steady] = []
        for t in range(1200):
            slots = range(16) if steady else range(1 + t % 16)
            load = Load(16, captured=frozenset(captured))
            g = max(policy.choose(slots, load=load))
            if g not in captured:
                captured_at[steady].append(t)
            seconds, capture = (flat(16, g), 0.0) if g in captured else (None, 100.0)
            captured.add(g)
            drafted = [g] * len(slots)
            policy.observe(StepOutcome(slots, drafted, drafted, g, load, seconds, capture_seconds=capture))
    assert len(captured_at[True]) > 2
    assert captured_at[False] == pytest.approx(captured_at[True], abs=40)


@pytest.mark.parametrize(("alpha", "c"), [(0.02, 0.05), (0.6, 0.9)])
def test_drafter_that_cannot_pay_causes_one_capture(alpha: float, c: float) -> None:
    for seed in SEEDS:
        simulation = Simulation(lambda t, slot: alpha, flat, 8, c, 0.01 * c, seed=seed, capture=40.0).run(
            Goodput(), 3000
        )
        assert len([g for g in simulation.captured if g]) == 1


@pytest.mark.parametrize("max_draft_tokens", [1, 2, 3])
def test_choice_respects_a_small_max_draft_tokens(max_draft_tokens: int) -> None:
    policy = Goodput(max_draft_tokens)
    for batch in (1, 4):
        for _ in range(40):
            chosen = policy.choose(range(batch))
            g = max(chosen)
            assert g <= max_draft_tokens
            policy.observe(StepOutcome(range(batch), chosen, [0] * batch, g, Load(batch), steep(batch, g)))


def test_probe_with_an_expected_gain_runs() -> None:
    policy = Goodput()
    for seconds in (1.0, 1.0, 1.0):
        policy.choose([0])
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), seconds))
    for _ in range(2):
        policy.forecast.costs(Load(1)).record_pass(Load(1), 4, 0.9)  # before the machine became slower
    policy.probes._steps_since_outcome = 100
    assert policy.choose([0]) != [0]


def test_drafts_that_always_stop_before_their_first_token_become_rare() -> None:
    """Their draft steps take time and yield nothing."""
    policy, drafts = Goodput(), 0
    for t in range(500):
        (g,) = policy.choose([0])
        if t < 100:
            policy.observe(StepOutcome([0], [g], [g], g, Load(1), steep(1, g) + 0.2 * g, 0.2 * g, g))
        else:
            steps = int(g > 0)
            policy.observe(
                StepOutcome([0], [0], [0], 0, Load(1), 1.0 + 0.2 * steps, 0.2 * steps, steps, requested=[0])
            )
            drafts += steps
    assert drafts < 60


def test_goodput_is_the_default_and_refuses_invalid_arguments() -> None:
    assert isinstance(Decoder(tiny(), "lookup").policy, Goodput)
    assert repr(Goodput(3)) == "Goodput(3)"
    for wrong in (0, 2.5, True):
        with pytest.raises((ValueError, TypeError), match="max_draft_tokens: got"):
            Goodput(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft_step", "chunk_seconds", "high", "low", "within"),
    [
        *(
            (*draft, 200, low, 100)
            for draft in [(0.07, 0.15), (0.07, 0.27), (0.3, 0.4)]
            for low in (150, 400)
        ),
        (0.07, 0.15, 0, 300, 100),
        (0.07, 0.27, 0, 300, 300),
    ],
)
def test_drafting_resumes_after_a_long_pause(
    draft_step: float, chunk_seconds: float, high: int, low: int, within: int
) -> None:
    """As in the graph executor: catching up reads chunks of 32 tokens, and its capture takes longest.

    With high = 0, drafts have gained nothing before the pause.
    """
    end = high + low
    for seed in SEEDS:
        policy, rng = Goodput(), np.random.default_rng(seed)
        chosen, unread, captured, catch_up_captured = list[int](), 0, set[int](), False
        for t in range(end + within):
            chunks = -(-unread // 32)
            load = Load(1, 32 + t, 32 * chunks, frozenset(captured))
            (g,) = policy.choose([0], load=load)
            rejected = np.flatnonzero(rng.random(g) >= (0.02 if high <= t < end else 0.9))
            accepted = int(rejected[0]) if len(rejected) else g
            captures_catch_up = bool(g and unread and not catch_up_captured)
            policy.observe(
                StepOutcome(
                    [0],
                    [g],
                    [accepted],
                    g,
                    load,
                    flat(1, g) + draft_step * g if g in captured else None,
                    catch_up_seconds=0.0 if captures_catch_up or not g else chunk_seconds * chunks,
                    capture_seconds=0.0 if g in captured else 20.0,
                    catch_up_capture_seconds=27.0 * captures_catch_up,
                )
            )
            captured, catch_up_captured = captured | {g}, catch_up_captured or captures_catch_up
            unread = 0 if g else unread + 1
            chosen.append(g)
        assert np.mean(chosen[end - 50 : end]) < 1
        speculative = [g for g in chosen[-20:] if g]  # one baseline pass may be measured again
        assert len(speculative) >= 19
        assert min(speculative) >= 2


def scored_proposals(
    policy: Goodput, cost: float, correct: Callable[[int], bool], steps: int
) -> list[int | None]:
    """Return how many of eight proposed tokens are scored at each step; None without a proposal.

    Args:
        policy: The policy.
        cost: Time of a proposal, as a fraction of a baseline pass.
        correct: Whether all proposed tokens are correct, by step.
        steps: Number of steps.
    """
    scored: list[int | None] = []
    for t in range(steps):
        if policy.idle:
            scored.append(None)
            policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0))
            continue
        (g,) = policy.choose([0], hint=Hint([8], [1.0]))
        scored.append(g)
        accepted, unscored = g * correct(t), correct(t) if g < 8 else None
        policy.observe(
            StepOutcome(
                [0], [g], [accepted], g, Load(1), steep(1, g) + cost, cost, unscored_correct=[unscored]
            )
        )
    return scored


@pytest.mark.parametrize(("cost", "interval"), [(0.005, 1), (0.035, 4), (0.5, 8)])
def test_free_drafter_that_never_helps_proposes_less_often_the_more_it_costs(
    cost: float, interval: int
) -> None:
    scored = scored_proposals(Goodput(), cost, lambda t: False, 400)
    assert None not in scored[:2]
    later = [g for g in scored[100:] if g is not None]
    assert len(later) == pytest.approx(300 / interval, abs=1)
    assert not any(later)


def test_free_drafter_may_spend_one_baseline_step_before_it_pauses() -> None:
    policy, idle = Goodput(), list[bool]()
    for _ in range(100):
        idle.append(policy.idle)
        if not policy.idle:
            policy.choose([0], hint=Hint([0], [0.0]))
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.05, 0.0 if idle[-1] else 0.05))
    assert 20 <= idle.index(True) <= 25  # 1 / 0.05, and a few steps before a baseline time is known
    assert 0.1 < np.mean([not each for each in idle[30:]]) < 0.25


def test_free_drafter_that_pauses_notices_when_its_proposals_become_correct() -> None:
    scored = scored_proposals(Goodput(), 0.5, lambda t: t >= 300, 400)
    assert next(t for t, g in enumerate(scored) if g) < 300 + 16
    assert None not in scored[320:]


def test_free_drafter_proposes_seldom_if_proposals_cost_more_than_they_gain() -> None:
    """It has draft tokens at every tenth step, and half of them are accepted.

    They are worth a pass now and then. They are not worth a tenth of each pass.
    """
    policy, rng = Goodput(), np.random.default_rng(0)
    total_seconds, tokens = 0.0, 0
    for t in range(2000):
        if policy.idle:
            g = accepted = 0
            policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0))
            total_seconds += 1.0
        else:
            (g,) = policy.choose([0], hint=Hint([8 if t % 10 == 0 else 0], [1.0]))
            rejected = np.flatnonzero(rng.random(g) >= 0.5)
            accepted = int(rejected[0]) if len(rejected) else g
            seconds = 1 + 0.05 * g + 0.1
            policy.observe(
                StepOutcome([0], [g], [accepted], g, Load(1), seconds, 0.1, unscored_correct=[None])
            )
            total_seconds += seconds
        tokens += accepted + 1
    assert tokens / total_seconds > 0.97


class SlowLookup(LookupDrafter):
    """Prompt lookup that takes longer than a pass."""

    proposals = 0

    def propose(self, state: State, g: int) -> Draft:
        self.proposals += 1
        time.sleep(0.01)
        return super().propose(state, g)


@pytest.mark.parametrize("engine", [False, True])
def test_slow_free_drafter_proposes_seldom(engine: bool) -> None:
    drafter = SlowLookup(min_ngram=2)
    decoder = Decoder(tiny(), drafter, engine=engine)
    baseline = Decoder(tiny())
    options: dict[str, Any] = {"max_new_tokens": 100, "seed": 3, "ignore_eos": True, "temperature": 1.5}
    out = decoder.generate([5, 6, 7], **options)
    assert drafter.proposals < 50
    assert out.stats.new_tokens == 100
    greedy: dict[str, Any] = options | {"temperature": 0}
    expected = baseline.generate([5, 6, 7], **greedy)
    assert decoder.generate([5, 6, 7], **greedy).token_ids == expected.token_ids


def test_drafting_resumes_even_if_catching_up_is_slow() -> None:
    """Catching up takes a twentieth of a baseline pass per token. Draft tokens are rejected at first."""
    for seed in SEEDS:
        simulation = Simulation(lambda t, slot: 0.05 if t < 80 else 0.9, flat, 1, 0.3, 0.05, seed=seed)
        simulation.run(Goodput(), 600)
        assert np.mean(np.array(simulation.chosen[400:]) > 0) > 0.9


def test_time_of_catching_up_is_not_counted_as_draft_steps() -> None:
    costs, load = Costs(4), Load(8, catch_up_tokens=8 * 100)
    costs.record_draft(load, 2, 3.4, 0.0)  # 0.2 of it for the steps
    assert costs.draft_step_seconds(load) == pytest.approx(3.4 / 102)
    costs.record_draft(Load(8), 2, 0.2, 0.0)
    assert costs.draft_step_seconds(load) == pytest.approx(0.1)
    costs.record_draft(load, 2, 3.4, 0.0)
    assert costs.draft_step_seconds(load) == pytest.approx(0.1)
    assert costs.catch_up_seconds(load) == pytest.approx(3.2)


def test_successful_probe_is_followed_by_another_if_the_balance_covers_it() -> None:
    def next_g(balance: float, new_sequence: bool = False) -> int:
        policy, load = Goodput(), Load(1)
        for g in (0, 0, 2, 2, 1, 1):  # drafts take twice as long, and nothing is accepted
            policy.observe(StepOutcome([0], [g], [0], g, load, 1.0 + (g > 0), 0.0, g))
        policy.probes.succeeded, policy.budget.balance = True, balance
        if new_sequence:
            policy.reset([0])
            policy.forecast.acceptance.learn([0], [8], [0])
        return max(policy.choose([0], load=load))

    assert next_g(balance=20.0) > 0
    assert next_g(balance=-1.0) == 0
    assert next_g(balance=20.0, new_sequence=True) == 0


def test_catching_up_is_measured_for_each_batch_size() -> None:
    """On a GPU, 16 sequences catch up as fast as one."""
    costs = Costs(4)
    costs.record_draft(Load(1, catch_up_tokens=32), 0, 0.0, 0.5)
    assert costs.catch_up_seconds(Load(1, catch_up_tokens=64)) == pytest.approx(1.0)
    costs.record_draft(Load(16), 3, 0.3, 0.0)
    assert costs.catch_up_seconds(Load(16, catch_up_tokens=16 * 32)) == pytest.approx(0.2)  # from draft steps
    costs.record_draft(Load(64), 3, 0.3, 0.0)
    assert costs.catch_up_seconds(Load(64, catch_up_tokens=64 * 32)) == pytest.approx(0.8)  # more tokens
    costs.record_draft(Load(16, catch_up_tokens=16 * 32), 0, 0.0, 0.6)
    assert costs.catch_up_seconds(Load(16, catch_up_tokens=16 * 64)) == pytest.approx(1.2)
    assert costs.catch_up_seconds(Load(1, catch_up_tokens=32)) == pytest.approx(0.5)


class NeverDrafts(Goodput):
    """Policy that decides like ``Goodput`` and then drafts nothing."""

    idle = False  # the free drafter always proposes

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, hint: Hint | None = None
    ) -> list[int]:
        super().choose(slots, load=load, hint=hint)
        return [0] * len(slots)


@pytest.mark.parametrize("engine", [False, True])
def test_unscored_proposals_of_prompt_lookup_are_compared_with_the_generated_tokens(engine: bool) -> None:
    """The estimate becomes high for a repetitive text, though nothing is drafted."""
    policy = NeverDrafts()
    decoder = Decoder(tiny(), LookupDrafter(min_ngram=1), num_draft_tokens=policy, engine=engine)
    alphas = []
    for step in decoder.stream([5, 6] * 12, temperature=0, max_new_tokens=100):
        assert step.num_draft_tokens == 0
        alphas.append(float(policy.forecast.acceptance.posterior([0])[0] @ ALPHAS))
    assert max(alphas) > 0.9
    assert policy.probes._steps_since_outcome < 90


def test_correction_by_position_follows_new_outcomes() -> None:
    estimate = AcceptanceEstimate(4)
    before = estimate.prefix_probability()
    for _ in range(40):  # the first is always accepted, the second never
        estimate.step += 1
        estimate.learn([0], [2], [1])
    assert (estimate.prefix_probability()[:, 1] < 0.8 * before[:, 1]).all()


def test_prior_is_the_mean_recent_posterior_mixed_with_a_uniform_share() -> None:
    estimate, prior = AcceptanceEstimate(4), np.full(len(ALPHAS), 1 / len(ALPHAS))
    for accepted in (4, 0, 4):
        estimate.step += 1
        estimate.learn([0, 1], [4, 4], [accepted, accepted])
        prior += (1 - (1 - PRIOR_UPDATE_WEIGHT) ** 2) * (estimate.posterior([0, 1]).mean(0) - prior)
    assert estimate.posterior([7])[0] == pytest.approx(
        NEW_UNIFORM_SHARE / len(ALPHAS) + (1 - NEW_UNIFORM_SHARE) * prior
    )
    estimate.step += 10_000  # it has jumped for sure, and the uniform share is larger
    assert estimate.posterior([0])[0] == pytest.approx(
        JUMP_UNIFORM_SHARE / len(ALPHAS) + (1 - JUMP_UNIFORM_SHARE) * prior
    )


def test_one_rejection_in_a_new_sequence_does_not_outweigh_the_prior() -> None:
    estimate, rng = AcceptanceEstimate(4), np.random.default_rng(5)
    for _ in range(200):
        estimate.step += 1
        estimate.learn([0], [4], [(rng.random(4) < 0.8).cumprod().sum()])
    estimate.forget([0])
    estimate.learn([0], [4], [0])
    assert 0.65 < float(estimate.posterior([0])[0] @ ALPHAS) < 0.78


def test_each_slot_has_its_own_acceptance_estimate() -> None:
    estimate = AcceptanceEstimate(4)
    for _ in range(30):
        estimate.step += 1
        estimate.learn([0, 1], [4, 4], [4, 0])
    good, bad = estimate.posterior([0, 1]) @ ALPHAS
    assert good > 0.9
    assert bad < 0.1
    policy = Goodput()
    for _ in range(60):
        chosen = max(policy.choose([0, 1]))
        policy.observe(
            StepOutcome([0, 1], [chosen] * 2, [chosen, 0], chosen, Load(2), flat(2, chosen), 0.0, chosen)
        )
    assert max(policy.choose([0], load=Load(2))) > max(policy.choose([1], load=Load(2)))


def test_hint_applies_to_each_slot_separately() -> None:
    policy = Goodput(8)
    for g in (0, 0, 8, 8):
        policy.forecast.costs(Load(2)).record_pass(Load(2), g, flat(2, g))
    for _ in range(50):
        policy.forecast.confidence.learn(np.array([7, 0]), np.array([True, False]))
    tokens = {
        hint: policy.forecast.plan([0, 1], Load(2), Hint(*hint), confirmed_only=True).tokens
        for hint in (((8, 8), (1.0, 0.0)), ((8, 8), (0.0, 1.0)), ((8, 1), (1.0, 0.0)), ((1, 8), (1.0, 0.0)))
    }
    confident_first, confident_last, short_last, short_first = tokens.values()
    assert confident_first == pytest.approx(confident_last)
    assert short_last[8] < confident_first[8]
    assert short_first[8] < short_last[8]  # the confident one is shortened
    assert short_first[2] - short_first[1] < confident_first[2] - confident_first[1]


def test_no_g_is_captured_beyond_the_proposed_tokens() -> None:
    policy = Goodput()
    for g in (0, 0, 8, 8, 16, 16):
        policy.forecast.costs(Load(1)).record_pass(Load(1), g, 1.0)
    policy.forecast.costs(Load(1)).record_capture(100.0)
    for _ in range(20):
        policy.forecast.acceptance.learn([0], [8], [8])
    load = Load(1, captured=frozenset({0, 8, 10, 12, 16}))
    assert [policy.choose([0], load=load, hint=Hint([n], [1.0])) for n in (16, 8, 7)] == [[16], [8], [0]]


@pytest.mark.parametrize("hinted", [False, True])
def test_budget_books_the_actual_acceptance_of_hinted_drafts_only(hinted: bool) -> None:
    """Drafts of the graph executor report no draft steps."""
    policy = Goodput()
    for g in (0, 0, 2, 2):
        policy.forecast.costs(Load(1)).record_pass(Load(1), g, 1.0)
    for _ in range(20):
        policy.forecast.acceptance.learn([0], [8], [8])
    policy.choose([0], hint=Hint([4], [1.0]) if hinted else None)
    before = policy.budget.balance
    # The drafter proposed none of two requested tokens, which counts as rejected.
    policy.observe(StepOutcome([0], [0], [0], 2, Load(1), 1.0, requested=[2]))
    gain = policy.budget.balance - before
    assert gain < 0.1 if hinted else gain > 0.5


def test_end_of_one_sequence_among_others_causes_no_new_decision() -> None:
    policy = Goodput()
    policy.choose([0, 1])
    policy.probes._steps_to_decision = 9
    policy.reset([0])
    assert policy.probes._steps_to_decision == 9
    policy.choose([0, 1])
    policy.reset([0, 1])
    assert policy.probes._steps_to_decision == 0


def test_draft_time_has_a_fixed_part_and_a_part_per_step() -> None:
    costs, load = Costs(8), Load(1)
    for steps in (2, 3) * 10:
        costs.record_draft(load, steps, 0.5 + steps, 0.0)
    assert costs.draft_step_seconds(load) == pytest.approx(1.0, rel=0.1)
    assert costs.draft_seconds(load)[[0, 2, 3, 6]] == pytest.approx([0.0, 2.5, 3.5, 6.5], rel=0.06)
    warm = Costs(8)
    warm.record_draft(load, 2, 100.0, 0.0)
    for _ in range(3):
        warm.record_draft(load, 1, 1.0, 0.0)
    assert warm.draft_step_seconds(load) == pytest.approx(1.0)
    old = Costs(8)
    for steps, seconds in ((2, 20.0), *[(1, 1.0)] * 2, (2, 20.0), *[(1, 1.0)] * 600):
        old.record_draft(load, steps, seconds, 0.0)
    assert old.draft_step_seconds(load) < 1.5
    for _ in range(80_000):  # another batch size, which does not age these measurements
        old.record_draft(Load(8), 3, 3.0, 0.0)
    assert old.draft_step_seconds(load) < 1.5
    alike = Costs(8)
    alike.record_draft(load, 2, 3.0, 0.0)
    assert alike.draft_seconds(load)[[0, 1, 4]] == pytest.approx([0.0, 1.5, 6.0])


def test_mean_clips_single_outliers_and_follows_lasting_changes() -> None:
    mean = RobustMean()
    for _ in range(30):
        mean.add(1.0)
    mean.add(100.0)
    assert mean.value < 1.05
    mean.add(1.0)
    for _ in range(12):
        mean.add(100.0)
    assert mean.value > 20
    for t in range(5000):  # alternating values are no lasting change
        mean.add(10.0 if t % 2 else 1.0)
    assert 1 < mean.value < 10


def test_a_policy_must_derive_from_the_interface() -> None:
    class Other:
        max_draft_tokens = 3

        def choose(self, slots: Sequence[int]) -> list[int]:
            return [3] * len(slots)

    for wrong in (Other(), Goodput):
        with pytest.raises(TypeError, match=r"it must be an int, .* or another DraftLengthPolicy"):
            Decoder(tiny(), "lookup", num_draft_tokens=wrong)  # type: ignore[arg-type]

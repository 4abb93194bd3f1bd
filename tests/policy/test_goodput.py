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
from outpace.bench.simulation import Cost, Simulation, flat, steep
from outpace.draft.base import Draft, State
from outpace.policy import GoodputConfig, Load, StepOutcome
from tests import tiers
from tests.tiny import tiny

STEPS = 600
SEEDS = range(tiers.sized(1, 2))


def expected_rate(alpha: float, cost: Cost, B: int, draft_step: float, g: int) -> float:
    """Return the expected tokens per second with a fixed g."""
    return float(B * theory.expected_tokens(alpha, g) / (cost(B, g) + g * draft_step))


def measured_rate(alpha: float, cost: Cost, B: int, draft_step: float, steps: int = STEPS) -> float:
    """Return the tokens per second of ``Goodput`` in simulations."""
    catch_up = 0.1 * draft_step / B
    simulations = [
        Simulation(lambda t, slot: alpha, cost, B, draft_step, catch_up, seed=seed).run(Goodput(), steps)
        for seed in range(tiers.sized(3, 6))
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


def test_exploration_seconds_are_what_a_drafter_that_cannot_pay_costs() -> None:
    policy = Goodput()
    simulation = Simulation(lambda t, slot: 0.02, flat, 1, 0.5, noise=0.01).run(policy, 1000)
    lost = simulation.seconds - simulation.tokens * flat(1, 0)
    assert 0.5 * lost <= policy.exploration_seconds <= 1.5 * lost


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


def test_no_more_tokens_are_scored_than_a_free_drafter_proposes() -> None:
    policy = Goodput()
    for t in range(100):
        proposed = [8, 0, 3][t % 3]
        (g,) = policy.choose([0], proposed=[proposed])
        assert g <= proposed
        policy.observe(StepOutcome([0], [g], [g], g, Load(1), steep(1, g)))
    assert policy.choose([0], proposed=[8]) == [8]


@pytest.mark.parametrize(("alpha", "c"), [(0.3, 0.05), (0.6, 0.05), (0.9, 0.02)])
def test_g_is_captured_when_it_would_pay(alpha: float, c: float) -> None:
    best = max(expected_rate(alpha, flat, 1, c, g) for g in range(17))
    for seed in SEEDS:
        simulation = Simulation(lambda t, slot: alpha, flat, 1, c, 0.1 * c, seed=seed, capture=40.0).run(
            Goodput(), 2000
        )
        early = [g for g, t in simulation.captured.items() if t < 2 * 128]
        assert 0 in early
        assert len(simulation.captured) <= len(early) + 3
        rates = [expected_rate(alpha, flat, 1, c, g) for g in simulation.chosen[2 * 128 :]]
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
        rate = np.mean([expected_rate(0.85, cost, 1, 0, g) for g in simulation.chosen[500:]])
        if jump == 8 and rate < share * best:
            pytest.xfail("a limit: a g between two measured ones that costs less than they suggest")
        assert rate >= share * best
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
    assert np.mean(rates) >= 0.9 * best
    assert sorted(rates)[1] >= 0.85 * best


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


@pytest.mark.parametrize(
    ("alpha", "c"),
    [
        (0.02, 0.05),
        pytest.param(
            0.6, 0.9, marks=pytest.mark.xfail(strict=True, reason="a limit: it causes two or three captures")
        ),
    ],
)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jump_probability", 0.0),
        ("stale_passes", 2.5),
        ("outlier_factor", 1.0),
        ("income", -0.1),
        ("margin", "x"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{name}: got .*; it must be"):
        GoodputConfig(**{name: value})


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
                    None if g not in captured or captures_catch_up else flat(1, g) + draft_step * g,
                    catch_up_seconds=0.0 if captures_catch_up or not g else chunk_seconds * chunks,
                    capture_seconds=20.0 * (g not in captured) + 27.0 * captures_catch_up,
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
        (g,) = policy.choose([0], proposed=[8])
        scored.append(g)
        tested = min(g + 1, 8) if correct(t) or not g else g
        accepted, right = g * correct(t), tested * correct(t)
        policy.observe(StepOutcome([0], [g], [accepted], g, Load(1), steep(1, g), [tested], [right], cost))
    return scored


@pytest.mark.parametrize("cost", [0.005, 0.035, 0.5])
def test_proposals_of_a_free_drafter_that_never_helps_cost_little(cost: float) -> None:
    policy = Goodput()
    scored = scored_proposals(policy, cost, lambda t: False, 1000)
    assert None not in scored[:2]
    proposals = len([g for g in scored if g is not None])
    assert cost * proposals <= policy.config.balance + 0.02 * 1000
    assert not any(scored[100:])


@pytest.mark.parametrize("cost", [0.005, 0.035, 0.5])
def test_free_drafter_that_pauses_notices_when_its_proposals_become_correct(cost: float) -> None:
    scored = scored_proposals(Goodput(), cost, lambda t: t >= 300, 600)
    assert next(t for t, g in enumerate(scored) if g) < (316 if cost < 0.1 else 400)
    assert None not in scored[320 if cost < 0.1 else 420 :]


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
            (g,) = policy.choose([0], proposed=[8 if t % 10 == 0 else 0])
            rejected = np.flatnonzero(rng.random(g) >= 0.5)
            accepted = int(rejected[0]) if len(rejected) else g
            seconds = 1 + 0.05 * g
            policy.observe(StepOutcome([0], [g], [accepted], g, Load(1), seconds, proposal_seconds=0.1))
            total_seconds += seconds + 0.1
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


def test_drafting_resumes_while_income_pays_for_catching_up() -> None:
    """Draft tokens are rejected at first. Catching up takes 0.5 % of a baseline step per token."""
    for seed in range(tiers.sized(3, 6)):
        simulation = Simulation(lambda t, slot: 0.05 if t < 80 else 0.9, flat, 1, 0.3, 0.005, seed=seed)
        simulation.run(Goodput(), 600)
        assert np.mean(np.array(simulation.chosen[400:]) > 0) > 0.9


def test_a_policy_must_derive_from_the_interface() -> None:
    class Other:
        max_draft_tokens = 3

        def choose(self, slots: Sequence[int]) -> list[int]:
            return [3] * len(slots)

    for wrong in (Other(), Goodput):
        with pytest.raises(TypeError, match=r"it must be an int, .* or another DraftLengthPolicy"):
            Decoder(tiny(), "lookup", num_draft_tokens=wrong)  # type: ignore[arg-type]

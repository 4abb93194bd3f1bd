"""The default length: in worlds whose acceptance and costs are known, and in a decoder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outpace import Decoder, Goodput, LookupDrafter
from outpace.bench import theory
from outpace.decoder import POLICY
from outpace.draft.base import Draft, State
from outpace.policy import DraftLengthPolicy, Hint, Load, StepOutcome
from outpace.policy.acceptance import ALPHAS, CHANGE, LEARN, NEW, OPEN, AcceptanceEstimate, Signal
from outpace.policy.costs import Costs, Mean
from outpace.policy.goodput import YOUNG
from tests.policy.world import Cost, World, flat, steep
from tests.tiny import tiny

ITERATIONS = 600
SEEDS = range(2)


def expected(alpha: float, cost: Cost, B: int, step: float, g: int) -> float:
    """Tokens a second of a fixed length."""
    return float(B * theory.expected_tokens(alpha, g) / (cost(B, g) + g * step))


def rate(alpha: float, cost: Cost, B: int, step: float) -> float:
    worlds = [
        World(lambda t, row: alpha, cost, B, step, 0.1 * step / B, seed=seed).run(Goodput(), ITERATIONS)
        for seed in SEEDS
    ]
    return sum(one.tokens for one in worlds) / sum(one.seconds for one in worlds)


@pytest.mark.parametrize("B", [1, 8, 64])
@pytest.mark.parametrize("cost", [flat, steep])
@pytest.mark.parametrize(("alpha", "c"), [(0.02, 0.0), (0.02, 0.2), (0.3, 0.9), (0.8, 0.9)])
def test_what_cannot_pay_costs_next_to_nothing(alpha: float, c: float, cost: Cost, B: int) -> None:
    step = c * cost(B, 0)
    assert rate(alpha, cost, B, step) >= 0.97 * expected(alpha, cost, B, step, 0)


@pytest.mark.parametrize(
    ("cost", "alpha", "c", "B"),
    [*itertools.product([flat], [0.5, 0.8, 0.9], [0.02, 0.2], [1, 8]), (steep, 0.9, 0.0, 1)],
)
def test_it_comes_close_to_the_best_fixed_length(cost: Cost, alpha: float, c: float, B: int) -> None:
    step = c * cost(B, 0)
    best = max(expected(alpha, cost, B, step, g) for g in range(17))
    assert rate(alpha, cost, B, step) >= 0.95 * best


def soon(batch: int, g: int) -> float:
    """As long as on a GPU, too: beside that, thinking takes a while."""
    return 4e-3 * flat(batch, g)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("cost", "c"), [(flat, 0.05), (flat, 0.1), (steep, 0.0), (soon, 0.05)])
def test_a_change_of_acceptance_is_noticed(cost: Cost, c: float, ahead: int) -> None:
    step = c * cost(1, 0)
    high, low = 0.9, 0.1

    def settled(chosen: list[int], alpha: float) -> int:
        rates = [expected(alpha, cost, 1, step, g) for g in range(17)]
        good = [rates[g] >= 0.9 * max(rates) for g in chosen]
        return next(i for i in range(len(good)) if all(good[i : i + 3]))

    for seed in SEEDS:
        world = World(
            lambda t, row: low if 200 <= t < 350 else high, cost, 1, step, 0.1 * step, seed=seed, ahead=ahead
        ).run(Goodput(), 500)
        assert settled(world.lengths[200:350], low) <= 20
        assert settled(world.lengths[350:], high) <= 100


def test_a_batch_that_cannot_pay_says_nothing_of_one_row() -> None:
    policy = Goodput()
    World(lambda t, row: 0.95, steep, 64).run(policy, 60)
    alone = World(lambda t, row: 0.95, steep, 1).run(policy, 400)
    assert alone.rate >= 0.9 * max(expected(0.95, steep, 1, 0, g) for g in range(17))


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("stall", [3.0, 10.0])
def test_a_pass_that_stalled_is_not_held_against_its_length(when: int, stall: float) -> None:
    world = World(lambda t, row: 0.9, flat, 1, 0.02, 0.002, stalls={when: stall}).run(Goodput(), 600)
    assert world.rate >= 0.9 * max(expected(0.9, flat, 1, 0.02, g) for g in range(17))
    bad = World(lambda t, row: 0.05, flat, 1, 0.9, 0.05, stalls={when: stall}).run(Goodput(), 600)
    assert bad.rate >= 0.95


def test_a_machine_that_was_busy_at_first_is_given_another_chance() -> None:
    policy = Goodput()
    busy = World(lambda t, row: 0.95, lambda batch, g: 3 * steep(batch, g), 1).run(policy, 100)
    then = World(lambda t, row: 0.95, steep, 1).run(policy, 1500)
    best = max(expected(0.95, steep, 1, 0, g) for g in range(17))
    assert busy.rate <= best
    assert then.rate >= 0.9 * best


def test_texts_that_a_draft_was_bad_at_do_not_keep_it_from_others() -> None:
    policy = Goodput()
    bad = World(lambda t, row: 0.02, flat, 1, 0.2, 0.02, prompt=16)
    for _ in range(16):
        bad.run(policy, 200)
    assert bad.rate >= 0.97
    good = World(lambda t, row: 0.95, flat, 1, 0.2, 0.02, prompt=16)
    for _ in range(6):
        good.run(policy, 100)
    assert good.rate >= 0.8 * max(expected(0.95, flat, 1, 0.2, g) for g in range(17))


@pytest.mark.parametrize(("alpha", "c"), [(0.02, 0.3), (0.5, 0.35)])
def test_prompts_that_a_draft_has_to_read_are_paid_for(alpha: float, c: float) -> None:
    """A long prompt before a short answer: what reading it takes is not won back."""
    policy = Goodput()
    world = World(lambda t, row: alpha, flat, 1, c, c / 16, prompt=512)
    for _ in range(12):
        world.run(policy, 40)
    assert world.rate >= 0.95


def test_what_is_believed_is_what_bayes_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all ways in which the acceptance may have jumped between three iterations."""
    seen = [(4, 4), (4, 1), (2, 0)]  # tested, kept
    prior = np.full(len(ALPHAS), 1 / len(ALPHAS))
    like = [ALPHAS**kept * (1 - ALPHAS if kept < tested else 1) for tested, kept in seen]
    stay = (1 - CHANGE) * np.eye(len(ALPHAS))
    weights = prior * like[0]
    for one in like[1:]:
        weights = (stay.T @ weights + CHANGE * prior * weights.sum()) * one
    monkeypatch.setattr("outpace.policy.acceptance.LEARN", 0.0)  # of what other rows are like
    belief = AcceptanceEstimate(16)
    for tested, kept in seen:
        belief.time += 1
        belief.now([5])
        belief.learn([5], [tested], [kept])
    belief.now([5])
    assert belief._rows[5] == pytest.approx(weights / weights.sum())


def test_positions_that_come_less_far_than_thought_are_corrected() -> None:
    belief = AcceptanceEstimate(4)
    for _ in range(300):
        belief.time += 1
        belief.now([0])
        belief.learn([0], [4], [2])  # two are always kept, a third never
    reach = belief.now([0]) @ belief.reach()
    steady = belief.now([0]) @ ALPHAS[:, None] ** np.arange(1, 5)
    assert reach[0, 2] < 0.8 * steady[0, 2]
    assert reach[0, 0] >= steady[0, 0]


def test_confidence_counts_as_much_as_it_has_told() -> None:
    signal = Signal()
    assert signal.shifts() == pytest.approx(np.zeros(8))
    for _ in range(100):
        signal.learn(signal.level([0.95, 0.1]), np.array([True, False]))
    low, high = signal.shifts()[signal.level([0.1, 0.95])]
    assert high > 1 > -1 > low
    assert list(signal.level([0.0, 1.0, float("nan"), 2.0, -1.0])) == [0, 7, 0, 7, 0]


def test_more_guesses_are_never_likelier_to_be_kept_than_fewer() -> None:
    belief, draw = AcceptanceEstimate(8), np.random.default_rng(0)
    for _ in range(200):
        tested = draw.integers(1, 9, 4)
        belief.time += 1
        belief.learn(range(4), tested, np.where(draw.random(4) < 0.5, 0, tested))
        reach = belief.reach()
        assert (np.diff(reach, axis=-1) <= 0).all()
        assert reach.max() <= 1


def test_costs_between_measurements_lie_on_lines_and_go_on() -> None:
    costs = Costs(8)
    assert costs.plain(Load(1)) is None
    for g, seconds in ((0, 9.0), (0, 1.0), (4, 9.0), (4, 3.0)):  # one of two may be a warm-up
        costs.note(Load(1), g, seconds)
    assert costs.passes(Load(1)) == pytest.approx([1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5])
    for _ in range(2):
        costs.note(Load(64), 0, 10.0)
    assert costs.passes(Load(64)) == pytest.approx(10 * costs.passes(Load(1)))
    costs.note(Load(1), 8, 100.0)
    assert costs.passes(Load(1))[8] == 5  # which was seen once
    assert costs.passes(Load(1), sure=False)[8] == 100
    for _ in range(2):
        costs.note(Load(1), 8, 2.0)
    assert costs.passes(Load(1))[4:].tolist() == [2] * 5  # more never take less
    fewer = Costs(8)
    for load, g, seconds in ((Load(64), 0, 1.0), (Load(64), 4, 9.0), (Load(1), 0, 1.0)):
        fewer.note(load, g, seconds)
        fewer.note(load, g, seconds)
    assert fewer.passes(Load(1)).tolist() == [1] * 9  # larger batches say nothing of smaller ones
    for _ in range(3):
        costs.note(Load(1), 0, 1000.0)  # the machine slept
    assert costs.plain(Load(1)) < 8  # type: ignore[operator]


def test_lengths_that_were_measured_after_other_texts_are_compared_fairly() -> None:
    costs, longer = Costs(8), Load(1, 2000)
    for _ in range(2):
        costs.note(Load(1), 0, 1.0)
        costs.note(Load(1), 4, 3.0)
    assert costs.plain(longer) == 1
    for _ in range(100):
        costs.note(longer, 0, 2.0)
    assert costs.passes(longer)[[0, 2, 4, 8]] == pytest.approx([2, 4, 6, 10], rel=0.03)
    assert costs.passes(Load(1, 1000))[[0, 4]] == pytest.approx([1.5, 4.5], rel=0.03)
    for _ in range(100):
        costs.note(Load(1), 0, 1.0)
    assert costs.passes(Load(1))[[0, 4]] == pytest.approx([1, 3], rel=0.03)


def test_what_a_token_of_the_text_takes_is_found_out() -> None:
    costs, draw = Costs(8), np.random.default_rng(0)
    for t in range(1000):  # texts of plain decoding, one token at a time
        context = 30 + t % 250
        costs.note(Load(64, context), 0, (1 + 1e-3 * context) * (1 + 0.01 * draw.standard_normal()))
    for context in (30, 500):
        assert costs.plain(Load(64, context)) == pytest.approx(1 + 1e-3 * context, rel=0.03)
    for _ in range(400):  # then long texts, and short ones again
        for g, base in ((0, 1.0), (4, 1.2)):
            costs.note(Load(1, 30000), g, 4 * base)
    for _ in range(3):
        costs.note(Load(1, 100), 0, 1.01)
    assert costs.passes(Load(1, 100))[[0, 4]] == pytest.approx([1.01, 1.21], rel=0.05)


@pytest.mark.parametrize("stall", [10.0, 30.0])
def test_a_stall_in_a_long_text_does_not_spoil_short_ones(stall: float) -> None:
    policy = Goodput()
    World(lambda t, row: 0.8, flat, 8, slope=1e-3, prompt=300, stalls={2: stall}).run(policy, 40)
    world = World(lambda t, row: 0.8, flat, 8, slope=1e-3, prompt=30, seed=1)
    for _ in range(4):
        world.run(policy, 80)
    assert policy.forecast.at(Load(8, 30)).passes(Load(8, 30)).min() > 0.9
    rates = [expected(0.8, flat, 8, 0, g) for g in range(17)]
    assert np.mean([rates[g] for g in world.lengths]) >= 0.93 * max(rates)


def test_a_stall_at_a_shorter_text_is_an_accident() -> None:
    costs = Costs(8)
    for _ in range(50):
        costs.note(Load(1, 2000), 0, 1.0)
    costs.note(Load(1, 100), 0, 100.0)
    assert costs.plain(Load(1, 100)) < 1.5  # type: ignore[operator]


def test_larger_batches_take_their_shape_after_such_texts() -> None:
    costs, draw = Costs(8), np.random.default_rng(0)
    for _ in range(200):  # nearly all of it is due to the text
        for g, seconds in ((0, 1.0), (4, 2.0)):
            context = 30000 + int(draw.integers(100))
            costs.note(Load(1, context), g, seconds * (1 + 0.05 * draw.standard_normal()))
    for _ in range(3):
        costs.note(Load(64, 30000), 0, 10.0)
    assert costs.passes(Load(64, 30000))[[0, 4]] == pytest.approx([10, 20], rel=0.1)


@pytest.mark.parametrize("alpha", [0.6, 0.8])
def test_longer_texts_that_take_longer_do_not_mislead(alpha: float) -> None:
    """As 64 rows on a GPU: a pass takes half as long again after 300 tokens as after 30."""

    def cost(batch: int, g: int) -> float:
        return 1.0 + 0.16 * g + 0.02 * g**2

    policy = Goodput()
    for seed in SEEDS:
        World(lambda t, row: alpha, cost, 64, slope=0.0015, noise=0.01, prompt=32, seed=seed).run(policy, 90)
    world = World(lambda t, row: alpha, cost, 64, slope=0.0015, noise=0.01, prompt=32, seed=9)
    world.run(policy, 90)
    rates = [expected(alpha, cost, 64, 0, g) for g in range(17)]
    assert np.mean([rates[g] for g in world.lengths]) >= 0.97 * max(rates)


def test_a_guess_that_costs_nothing_is_used_where_it_is_good() -> None:
    """A copy after a single word is mostly wrong, one after three mostly right."""
    policy, draw = Goodput(), np.random.default_rng(0)
    used: dict[bool, list[int]] = {True: [], False: []}
    for t in range(600):
        good = bool(t % 2)
        (g,) = policy.choose([0], hint=Hint([8], [1.0 if good else 0.3]))
        lost = np.flatnonzero(draw.random(8) >= (0.9 if good else 0.1))
        right = int(lost[0]) if len(lost) else 8
        kept, unused = min(g, right), right > g if g < 8 else None
        policy.observe(
            StepOutcome([0], [g], [kept], g, Load(1), steep(1, g), unused=[unused if kept == g else None])
        )
        used[good].append(g)
    assert np.mean(used[True][100:]) > 3
    assert np.mean(used[False][100:]) < 0.5
    assert policy.choose([0], hint=Hint([0], [0.0])) == [0]


def test_what_was_not_used_is_learnt_from() -> None:
    policy = Goodput()
    for _ in range(3):
        policy.choose([0], hint=Hint([8], [1.0]))
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0, unused=[None]))
    for _ in range(30):
        policy.choose([0], hint=Hint([8], [1.0]))
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0, unused=[True]))
    assert policy.forecast.belief.now([0])[0] @ ALPHAS > 0.9
    assert policy.choose([0], hint=Hint([8], [1.0])) != [0]


def test_a_draft_is_stopped_where_its_next_token_is_a_guess_in_the_dark() -> None:
    policy = Goodput()
    for _ in range(200):
        (g,) = policy.choose([0])
        if g == 0:
            policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0))
            continue
        drawn = 0
        confidences = [0.95, 0.95, 0.05, 0.05]
        while drawn < min(g, 4) and not policy.enough([confidences[drawn]]):
            drawn += 1
        steps = drawn + (drawn < min(g, 4))
        kept = min(drawn, 2)  # the sure ones are right, the others wrong
        policy.observe(
            StepOutcome([0], [drawn], [kept], drawn, Load(1), 1.0 + 0.2 * steps, 0.2 * steps, steps)
        )
    policy.choose([0])
    assert not policy.enough([0.95])
    assert not policy.enough([0.95])
    assert policy.enough([0.05])


def test_short_steps_are_not_asked_about() -> None:
    policy = Goodput()
    for seconds, asks in ((1e-3, False), (1e-1, True)):
        for _ in range(60):
            (g,) = policy.choose([0])
            policy.observe(StepOutcome([0], [g], [g], g, Load(1), 1.0 + g * seconds, g * seconds, g))
        policy.choose([0])
        assert policy.asks is asks


@pytest.mark.parametrize(("alpha", "c"), [(0.3, 0.05), (0.6, 0.05), (0.9, 0.02)])
def test_lengths_that_take_long_to_make_ready_are_made_when_they_would_pay(alpha: float, c: float) -> None:
    best = max(expected(alpha, flat, 1, c, g) for g in range(17))
    for seed in SEEDS:
        world = World(lambda t, row: alpha, flat, 1, c, 0.1 * c, seed=seed, making=40.0).run(Goodput(), 2000)
        early = [g for g, t in world.made.items() if t < 2 * YOUNG]
        assert 0 in early
        assert len(world.made) <= len(early) + 3
        good = [expected(alpha, flat, 1, c, g) for g in world.lengths[2 * YOUNG :]]
        assert np.mean(good) >= 0.95 * best


@pytest.mark.parametrize(("kink", "share"), [(12, 0.95), (8, 0.9)])
@pytest.mark.parametrize("ready", [[0], [0, 1, 2, 3, 5, 8, 12, 16], [2, 7], []])
def test_lengths_that_others_made_ready_are_like_all(ready: list[int], kink: int, share: float) -> None:
    """Another policy was there before, or a drafter that has a length of its own. From some length on passes
    take much longer; the best one before 8, which is 7, is none of those that are tried."""

    def cost(batch: int, g: int) -> float:
        return 1.0 + 0.05 * g + 0.5 * (g >= kink)

    best = max(expected(0.85, cost, 1, 0, g) for g in range(17))
    for seed in SEEDS:
        made = dict.fromkeys(ready, -1)
        world = World(lambda t, row: 0.85 if t < 1000 else 0.02, cost, 1, seed=seed, making=40.0, made=made)
        policy = Goodput()
        world.run(policy, 1000)
        assert np.mean([expected(0.85, cost, 1, 0, g) for g in world.lengths[500:]]) >= share * best
        world.run(policy, 1000)
        assert np.mean([expected(0.02, cost, 1, 0, g) for g in world.lengths[1100:]]) >= 0.97


def test_longer_ones_are_made_ready_where_the_first_one_does_not_pay() -> None:
    """A pass over more than one token takes twice as long, however many there are."""

    def cost(batch: int, g: int) -> float:
        return 1.0 if g == 0 else 1.95 + 0.03 * g

    best = max(expected(0.7, cost, 1, 0, g) for g in range(17))
    for seed in SEEDS:
        world = World(lambda t, row: 0.7, cost, 1, seed=seed, making=40.0).run(Goodput(), 1500)
        assert np.mean([expected(0.7, cost, 1, 0, g) for g in world.lengths[500:]]) >= 0.9 * best


def test_longer_ones_are_made_ready_however_late_they_pay() -> None:
    def cost(batch: int, g: int) -> float:
        return 1.0 if g == 0 else 2.4 + 0.02 * g

    best, found = max(expected(0.8, cost, 1, 0, g) for g in range(17)), list[float]()
    for seed in range(12):  # in some, luck decides when it is found out
        world = World(lambda t, row: 0.05 if t < 400 else 0.8, cost, 1, seed=seed, making=40.0)
        lengths = world.run(Goodput(), 2000).lengths[1200:]
        found.append(float(np.mean([expected(0.8, cost, 1, 0, g) for g in lengths])))
        assert seed not in SEEDS or found[-1] >= 0.9 * best
    assert np.mean(found) >= 0.9 * best


def test_nothing_is_made_ready_again_for_a_drafter_that_cannot_help() -> None:
    """Each text has a way of sampling of its own, for which nothing is ready."""
    policy, made = Goodput(), 0
    for seed in range(20):
        world = World(lambda t, row: 0.02, flat, 1, 0.05, 0.005, seed=seed, making=40.0).run(policy, 60)
        made += len([g for g in world.made if g])
    assert made <= 3


def test_what_lengths_would_save_is_added_up_whichever_rows_are_there() -> None:
    made: dict[bool, list[int]] = {}
    for steady in (True, False):
        policy, ready = Goodput(), {0, 2}
        made[steady] = []
        for t in range(1200):
            rows = range(16) if steady else range(1 + t % 16)
            load = Load(16, ready=frozenset(ready))
            g = max(policy.choose(rows, load=load))
            if g not in ready:
                made[steady].append(t)
            seconds, making = (flat(16, g), 0.0) if g in ready else (None, 100.0)
            ready.add(g)
            policy.observe(
                StepOutcome(rows, [g] * len(rows), [g] * len(rows), g, load, seconds, making=making)
            )
    assert len(made[True]) > 2
    assert made[False] == pytest.approx(made[True], abs=40)


@pytest.mark.parametrize(("alpha", "c"), [(0.02, 0.05), (0.6, 0.9)])
def test_what_cannot_pay_is_made_ready_once(alpha: float, c: float) -> None:
    for seed in SEEDS:
        world = World(lambda t, row: alpha, flat, 8, c, 0.01 * c, seed=seed, making=40.0).run(Goodput(), 3000)
        assert len([g for g in world.made if g]) == 1


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_guesses_at_most_are_no_trouble(most: int) -> None:
    policy = Goodput(most)
    for batch in (1, 4):
        for _ in range(40):
            chosen = policy.choose(range(batch))
            g = max(chosen)
            assert g <= most
            policy.observe(StepOutcome(range(batch), chosen, [0] * batch, g, Load(batch), steep(batch, g)))


def test_tries_that_seem_to_cost_less_than_nothing_are_made() -> None:
    policy = Goodput()
    for seconds in (1.0, 1.0, 1.0):
        policy.choose([0])
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), seconds))
    for _ in range(2):
        policy.forecast.at(Load(1)).note(Load(1), 4, 0.9)  # from before the machine became slower
    policy.probes._blind = 100
    assert policy.choose([0]) != [0]


def test_drafts_that_are_stopped_at_once_are_not_asked_for_ever() -> None:
    """Their steps are paid for, and nothing comes of them."""
    policy, asked = Goodput(), 0
    for t in range(500):
        (g,) = policy.choose([0])
        if t < 100:
            policy.observe(StepOutcome([0], [g], [g], g, Load(1), steep(1, g) + 0.2 * g, 0.2 * g, g))
        else:
            steps = int(g > 0)
            policy.observe(
                StepOutcome([0], [0], [0], 0, Load(1), 1.0 + 0.2 * steps, 0.2 * steps, steps, asked=[0])
            )
            asked += steps
    assert asked < 60


def test_it_is_the_default_and_refuses_nonsense() -> None:
    assert isinstance(Decoder(tiny(), "lookup").policy, Goodput)
    assert repr(Goodput(3)) == "Goodput(3)"
    for wrong in (0, 2.5, True):
        with pytest.raises((ValueError, TypeError), match="max_draft_tokens: got"):
            Goodput(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "reading", "high", "low", "within"),
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
def test_a_draft_that_rested_long_is_taken_up_again(
    step: float, reading: float, high: int, low: int, within: int
) -> None:
    """As in an engine, where it reads 32 tokens at a time, and making that ready takes longer than any. One
    that was never any good has won nothing that it could be tried with."""
    end = high + low
    for seed in SEEDS:
        policy, draw = Goodput(), np.random.default_rng(seed)
        lengths, behind, made, read = list[int](), 0, set[int](), False
        for t in range(end + within):
            pieces = -(-behind // 32)
            load = Load(1, 32 + t, 32 * pieces, frozenset(made))
            (g,) = policy.choose([0], load=load)
            lost = np.flatnonzero(draw.random(g) >= (0.02 if high <= t < end else 0.9))
            kept, making = int(lost[0]) if len(lost) else g, 0.0 if g in made else 20.0
            first = bool(g and behind and not read)
            policy.observe(
                StepOutcome(
                    [0], [g], [kept], g, load, None if making else flat(1, g) + step * g, making=making,
                    catching_up=0.0 if first or not g else reading * pieces, reading_made=27.0 * first,
                )
            )  # fmt: skip
            made, read = made | {g}, read or first
            behind = 0 if g else behind + 1
            lengths.append(g)
        assert np.mean(lengths[end - 50 : end]) < 1
        used = [g for g in lengths[-20:] if g]  # but for a plain pass that is measured anew
        assert len(used) >= 19
        assert min(used) >= 2


def asked(policy: Goodput, share: float, right: Callable[[int], bool], iterations: int) -> list[int | None]:
    """What is used of eight guesses that take so much of a plain pass to ask for; None where nobody asks."""
    used: list[int | None] = []
    for t in range(iterations):
        if policy.idle:
            used.append(None)
            policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0))
            continue
        (g,) = policy.choose([0], hint=Hint([8], [1.0]))
        used.append(g)
        kept, spare = g * right(t), right(t) if g < 8 else None
        policy.observe(StepOutcome([0], [g], [kept], g, Load(1), steep(1, g) + share, share, unused=[spare]))
    return used


@pytest.mark.parametrize(("share", "every"), [(0.005, 1), (0.035, 4), (0.5, 8)])
def test_guesses_that_are_never_used_are_asked_for_as_often_as_that_may_cost(
    share: float, every: int
) -> None:
    used = asked(Goodput(), share, lambda t: False, 400)
    assert None not in used[:2]
    later = [one for one in used[100:] if one is not None]
    assert len(later) == pytest.approx(300 / every, abs=1)
    assert not any(later)


def test_asking_is_granted_some_time_before_anything_is_won() -> None:
    policy, idle = Goodput(), list[bool]()
    for _ in range(100):
        idle.append(policy.idle)
        if not policy.idle:
            policy.choose([0], hint=Hint([0], [0.0]))
        policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.05, 0.0 if idle[-1] else 0.05))
    assert 20 <= idle.index(True) <= 25  # a plain pass; some are not known of yet
    assert 0.1 < np.mean([not one for one in idle[30:]]) < 0.25


def test_a_text_that_begins_to_repeat_is_noticed_though_nobody_asks() -> None:
    used = asked(Goodput(), 0.5, lambda t: t >= 300, 400)
    assert next(t for t, one in enumerate(used) if one) < 300 + 16
    assert None not in used[320:]


def test_guesses_that_win_less_than_asking_for_them_takes_are_seldom_asked_for() -> None:
    """Of every tenth iteration, half of them kept: worth a pass now and then, but not a tenth of each."""
    policy, draw = Goodput(), np.random.default_rng(0)
    seconds, tokens = 0.0, 0
    for t in range(2000):
        if policy.idle:
            g = kept = 0
            policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0))
            seconds += 1.0
        else:
            (g,) = policy.choose([0], hint=Hint([8 if t % 10 == 0 else 0], [1.0]))
            lost = np.flatnonzero(draw.random(g) >= 0.5)
            kept = int(lost[0]) if len(lost) else g
            took = 1 + 0.05 * g + 0.1
            policy.observe(StepOutcome([0], [g], [kept], g, Load(1), took, 0.1, unused=[None]))
            seconds += took
        tokens += kept + 1
    assert tokens / seconds > 0.97


class Slow(LookupDrafter):
    """Takes longer than a pass."""

    asked = 0

    def propose(self, state: State, g: int) -> Draft:
        self.asked += 1
        time.sleep(0.01)
        return super().propose(state, g)


@pytest.mark.parametrize("engine", [False, True])
def test_a_slow_drafter_that_costs_nothing_is_asked_seldom(engine: bool) -> None:
    drafter = Slow(min_ngram=2)
    decoder = Decoder(tiny(), drafter, engine=engine)
    plain = Decoder(tiny())
    options: dict[str, Any] = {"max_new_tokens": 100, "seed": 3, "ignore_eos": True, "temperature": 1.5}
    out = decoder.generate([5, 6, 7], **options)
    assert drafter.asked < 50
    assert out.stats.new_tokens == 100
    greedy: dict[str, Any] = options | {"temperature": 0}
    assert decoder.generate([5, 6, 7], **greedy).token_ids == plain.generate([5, 6, 7], **greedy).token_ids


def test_a_draft_that_reads_slowly_is_taken_up_again_too() -> None:
    """Reading takes a twentieth of a plain pass a token, and the drafts were bad at first."""
    for seed in SEEDS:
        world = World(lambda t, row: 0.05 if t < 80 else 0.9, flat, 1, 0.3, 0.05, seed=seed)
        world.run(Goodput(), 600)
        assert np.mean(np.array(world.lengths[400:]) > 0) > 0.9


def test_a_step_is_not_taken_to_last_as_long_as_the_reading_before_it() -> None:
    costs, load = Costs(4), Load(8, unread=8 * 100)
    costs.note_draft(load, 2, 3.4, 0.0)  # 0.2 for the steps
    assert costs.step(load) == pytest.approx(3.4 / 102)
    costs.note_draft(Load(8), 2, 0.2, 0.0)
    assert costs.step(load) == pytest.approx(0.1)
    costs.note_draft(load, 2, 3.4, 0.0)
    assert costs.step(load) == pytest.approx(0.1)
    assert costs.missed(load) == pytest.approx(3.2)


def test_a_try_that_went_well_is_followed_by_another_if_there_is_enough_for_it() -> None:
    def tries(balance: float, another_text: bool = False) -> int:
        policy, load = Goodput(), Load(1)
        for g in (0, 0, 2, 2, 1, 1):  # it takes twice as long, and nothing is kept
            policy.observe(StepOutcome([0], [g], [0], g, load, 1.0 + (g > 0), 0.0, g))
        policy.probes.went_well, policy.budget.balance = True, balance
        if another_text:
            policy.reset([0])
            policy.forecast.belief.learn([0], [8], [0])
        return max(policy.choose([0], load=load))

    assert tries(balance=20.0) > 0
    assert tries(balance=-1.0) == 0
    assert tries(balance=20.0, another_text=True) == 0


def test_what_a_batch_reads_is_not_judged_by_what_another_read() -> None:
    """On a GPU 16 rows read their tokens as fast as one."""
    costs = Costs(4)
    costs.note_draft(Load(1, unread=32), 0, 0.0, 0.5)
    assert costs.missed(Load(1, unread=64)) == pytest.approx(1.0)
    costs.note_draft(Load(16), 3, 0.3, 0.0)
    assert costs.missed(Load(16, unread=16 * 32)) == pytest.approx(0.2)  # by its steps
    costs.note_draft(Load(64), 3, 0.3, 0.0)
    assert costs.missed(Load(64, unread=64 * 32)) == pytest.approx(0.8)  # many take longer
    costs.note_draft(Load(16, unread=16 * 32), 0, 0.0, 0.6)
    assert costs.missed(Load(16, unread=16 * 64)) == pytest.approx(1.2)
    assert costs.missed(Load(1, unread=32)) == pytest.approx(0.5)


class Idle(Goodput):
    """Thinks, and does nothing."""

    idle = False  # and goes on asking

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        super().choose(rows, load=load, hint=hint)
        return [0] * len(rows)


@pytest.mark.parametrize("engine", [False, True])
def test_copies_are_checked_in_the_shadow(engine: bool) -> None:
    """What is known of a text that repeats, though nothing of it was guessed."""
    policy = Idle()
    decoder = Decoder(tiny(), LookupDrafter(min_ngram=1), num_draft_tokens=policy, engine=engine)
    known = []
    for step in decoder.stream([5, 6] * 12, temperature=0, max_new_tokens=100):
        assert step.num_draft_tokens == 0
        known.append(float(policy.forecast.belief.now([0])[0] @ ALPHAS))
    assert max(known) > 0.9
    assert policy.probes._blind < 90


def test_what_is_thought_of_positions_follows_what_was_learnt() -> None:
    belief = AcceptanceEstimate(4)
    before = belief.reach()
    for _ in range(40):  # the first is always kept, the second never
        belief.time += 1
        belief.learn([0], [2], [1])
    assert (belief.reach()[:, 1] < 0.8 * before[:, 1]).all()


def test_new_rows_are_taken_to_be_like_the_last_ones_and_something_is_left_open() -> None:
    belief, usual = AcceptanceEstimate(4), np.full(len(ALPHAS), 1 / len(ALPHAS))
    for kept in (4, 0, 4):
        belief.time += 1
        belief.learn([0, 1], [4, 4], [kept, kept])
        usual += (1 - (1 - LEARN) ** 2) * (belief.now([0, 1]).mean(0) - usual)
    assert belief.now([7])[0] == pytest.approx(NEW / len(ALPHAS) + (1 - NEW) * usual)
    belief.time += 10_000  # it has jumped, and that it did speaks for something else
    assert belief.now([0])[0] == pytest.approx(OPEN / len(ALPHAS) + (1 - OPEN) * usual)


def test_one_lost_guess_at_a_text_s_beginning_does_not_outweigh_all_texts_before_it() -> None:
    belief, draw = AcceptanceEstimate(4), np.random.default_rng(5)
    for _ in range(200):
        belief.time += 1
        belief.learn([0], [4], [(draw.random(4) < 0.8).cumprod().sum()])
    belief.forget([0])
    belief.learn([0], [4], [0])
    assert 0.65 < float(belief.now([0])[0] @ ALPHAS) < 0.78


def test_each_row_is_believed_what_was_seen_of_it() -> None:
    belief = AcceptanceEstimate(4)
    for _ in range(30):
        belief.time += 1
        belief.learn([0, 1], [4, 4], [4, 0])
    good, bad = belief.now([0, 1]) @ ALPHAS
    assert good > 0.9
    assert bad < 0.1
    policy = Goodput()
    for _ in range(60):
        chosen = max(policy.choose([0, 1]))
        policy.observe(
            StepOutcome([0, 1], [chosen] * 2, [chosen, 0], chosen, Load(2), flat(2, chosen), 0.0, chosen)
        )
    assert max(policy.choose([0], load=Load(2))) > max(policy.choose([1], load=Load(2)))


def test_hints_are_those_of_each_row() -> None:
    policy = Goodput(8)
    for g in (0, 0, 8, 8):
        policy.forecast.at(Load(2)).note(Load(2), g, flat(2, g))
    for _ in range(50):
        policy.forecast.signal.learn(np.array([7, 0]), np.array([True, False]))
    tokens = {
        hint: policy.forecast.plan([0, 1], Load(2), Hint(*hint), sure=True).tokens
        for hint in (((8, 8), (1.0, 0.0)), ((8, 8), (0.0, 1.0)), ((8, 1), (1.0, 0.0)), ((1, 8), (1.0, 0.0)))
    }
    sure_first, sure_last, short_last, short_first = tokens.values()
    assert sure_first == pytest.approx(sure_last)
    assert short_last[8] < sure_first[8]
    assert short_first[8] < short_last[8]  # that was the better one
    assert short_first[2] - short_first[1] < sure_first[2] - sure_first[1]


def test_nothing_is_made_ready_for_more_than_there_is() -> None:
    policy = Goodput()
    for g in (0, 0, 8, 8, 16, 16):
        policy.forecast.at(Load(1)).note(Load(1), g, 1.0)
    policy.forecast.at(Load(1)).note_making(100.0)
    for _ in range(20):
        policy.forecast.belief.learn([0], [8], [8])
    load = Load(1, ready=frozenset({0, 8, 10, 12, 16}))
    assert [policy.choose([0], load=load, hint=Hint([n], [1.0])) for n in (16, 8, 7)] == [[16], [8], [0]]


@pytest.mark.parametrize("hinted", [False, True])
def test_luck_is_booked_of_copies_alone(hinted: bool) -> None:
    """An engine's draft reports no steps of its own."""
    policy = Goodput()
    for g in (0, 0, 2, 2):
        policy.forecast.at(Load(1)).note(Load(1), g, 1.0)
    for _ in range(20):
        policy.forecast.belief.learn([0], [8], [8])
    policy.choose([0], hint=Hint([4], [1.0]) if hinted else None)
    before = policy.budget.balance
    policy.observe(
        StepOutcome([0], [0], [0], 2, Load(1), 1.0, asked=[2])
    )  # it had none: that is believed, too
    gain = policy.budget.balance - before
    assert gain < 0.1 if hinted else gain > 0.5


def test_the_end_of_one_text_among_others_is_no_reason_to_think_again() -> None:
    policy = Goodput()
    policy.choose([0, 1])
    policy.probes._wait = 9
    policy.reset([0])
    assert policy.probes._wait == 9
    policy.choose([0, 1])
    policy.reset([0, 1])
    assert policy.probes._wait == 0


def test_a_first_step_may_take_longer() -> None:
    costs, load = Costs(8), Load(1)
    for steps in (2, 3) * 10:
        costs.note_draft(load, steps, 0.5 + steps, 0.0)
    assert costs.step(load) == pytest.approx(1.0, rel=0.1)
    assert costs.drafts(load)[[0, 2, 3, 6]] == pytest.approx([0.0, 2.5, 3.5, 6.5], rel=0.06)
    warm = Costs(8)
    warm.note_draft(load, 2, 100.0, 0.0)
    for _ in range(3):
        warm.note_draft(load, 1, 1.0, 0.0)
    assert warm.step(load) == pytest.approx(1.0)
    old = Costs(8)
    for steps, seconds in ((2, 20.0), *[(1, 1.0)] * 2, (2, 20.0), *[(1, 1.0)] * 600):
        old.note_draft(load, steps, seconds, 0.0)
    assert old.step(load) < 1.5
    for _ in range(80_000):  # of another batch: what is known of this one does not fade with them
        old.note_draft(Load(8), 3, 3.0, 0.0)
    assert old.step(load) < 1.5
    alike = Costs(8)
    alike.note_draft(load, 2, 3.0, 0.0)
    assert alike.drafts(load)[[0, 1, 4]] == pytest.approx([0.0, 1.5, 6.0])


def test_accidents_count_little_and_changes_soon() -> None:
    mean = Mean()
    for _ in range(30):
        mean.add(1.0)
    mean.add(100.0)
    assert mean.value < 1.05
    mean.add(1.0)
    for _ in range(12):
        mean.add(100.0)
    assert mean.value > 20
    for t in range(5000):  # neither is a change from the other
        mean.add(10.0 if t % 2 else 1.0)
    assert 1 < mean.value < 10


def test_a_policy_that_lacks_something_is_refused_at_once() -> None:
    class Old:
        max_draft_tokens = 3

        def choose(self, rows: Sequence[int]) -> list[int]:
            return [3] * len(rows)

    with pytest.raises(TypeError, match="has no asks; derive it from outpace"):
        Decoder(tiny(), "lookup", num_draft_tokens=Old())  # type: ignore[arg-type]


def test_all_that_a_policy_has_is_asked_for() -> None:
    assert set(POLICY) == {name for name in dir(DraftLengthPolicy) if not name.startswith("_")} | {
        "max_draft_tokens"
    }

"""What was measured wrongly, or long ago, or elsewhere, does not mislead for ever."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from outpace import Goodput
from outpace.policy import Hint, Load, StepOutcome
from outpace.policy.costs import BEYOND, STALE, Costs
from outpace.policy.goodput import REVISIT
from tests.policy.test_goodput import expected
from tests.policy.world import World, flat


def steadily(alpha: float, t: int, row: int) -> float:
    return alpha


def best(alpha: float, step: float) -> float:
    return max(expected(alpha, flat, 1, step, g) for g in range(17))


@pytest.mark.parametrize("when", [(4, 5), (2, 3), tuple(range(300, 340))])
def test_lengths_that_were_measured_on_a_busy_machine_are_measured_again(when: tuple[int, ...]) -> None:
    policy, stalls = Goodput(), dict.fromkeys(when, 3.0)
    World(lambda t, row: 0.95, flat, 1, 0.02, 0.002, stalls=stalls).run(policy, 700)
    world = World(lambda t, row: 0.95, flat, 1, 0.02, 0.002, seed=1).run(policy, 3000)
    assert world.rate >= 0.95 * best(0.95, 0.02)


def test_a_draft_that_was_slow_for_a_while_is_taken_up_again() -> None:
    policy = Goodput()
    for slow, iterations in ((1.0, 400), (5.0, 40)):
        world = World(lambda t, row: 0.9, flat, 1, 0.3 * slow, 0.03 * slow, seed=int(slow))
        world.run(policy, iterations)
    World(lambda t, row: 0.9, flat, 1, 0.3, 0.03, seed=2).run(policy, 2000)
    world = World(lambda t, row: 0.9, flat, 1, 0.3, 0.03, seed=3).run(policy, 1000)
    assert world.rate >= 0.95 * best(0.9, 0.3)


def test_what_was_measured_long_ago_begins_again_with_the_less() -> None:
    costs = Costs(4)
    for _ in range(50):
        costs.note(Load(1), 2, 3.0)
    for _ in range(STALE + 1):
        costs.note(Load(1), 0, 1.0)
    costs.note(Load(1), 2, 1.5)
    assert costs.passes(Load(1))[2] == 1.5
    for _ in range(STALE + 1):
        costs.note(Load(1), 0, 1.0)
    costs.note(Load(1), 2, 9.0)
    assert costs.passes(Load(1))[2] == 1.5


def test_what_is_run_seldom_is_not_taken_for_the_least_that_it_ever_took() -> None:
    costs = Costs(4)
    for seconds in (2.0, 2.0, 0.9, 2.0, 2.0):
        costs.note(Load(1), 2, seconds)
        for _ in range(STALE + 1):
            costs.note(Load(1), 0, 1.0)
    assert costs.passes(Load(1))[2] == 2.0


def test_passes_of_other_batches_make_nothing_old() -> None:
    costs = Costs(4)
    for _ in range(50):
        costs.note(Load(1), 2, 3.0)
    for _ in range(STALE + 1):
        costs.note(Load(64), 0, 1.0)
    assert costs.since(Load(1), 2) == 0
    assert costs.count(Load(1)) == 50
    costs.note(Load(1), 2, 1.5)
    assert costs.passes(Load(1))[2] > 2.5


def test_a_number_of_steps_that_is_no_longer_run_is_forgotten_however_many_there_were() -> None:
    costs = Costs(8)
    for _ in range(1000):
        costs.note(Load(1), 4, 1.0)
        costs.note_draft(Load(1), 4, 4.0, 0.0)
    for _ in range(5):
        costs.note_draft(Load(1), 2, 8.0, 0.0)
    for _ in range(STALE + 1):
        costs.note(Load(1), 0, 1.0)
    for _ in range(900):
        costs.note_draft(Load(1), 4, 4.0, 0.0)
    assert costs.step(Load(1)) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("way", ["", "engine"])
def test_what_was_measured_in_one_way_does_not_hold_for_another(way: str) -> None:
    """A draft in an engine's graph has no seconds of its own; one beside passes of the host has."""
    policy, draw, lengths = Goodput(), np.random.default_rng(0), list[int]()

    def texts(way: str, plain: float, step: float, iterations: int) -> None:
        policy.reset([0])
        lengths.clear()
        for _ in range(iterations):
            load = Load(1, 100, way=way)
            (g,) = policy.choose([0], load=load)
            lost = np.flatnonzero(draw.random(g) >= 0.8)
            kept, inside = int(lost[0]) if len(lost) else g, way == "engine"
            whole, draft = plain * (1 + 0.01 * g) + step * g, 0.0 if inside else step * g
            policy.observe(
                StepOutcome([0], [g], [kept], g, load, whole, draft, 0 if inside else g, asked=[g])
            )
            lengths.append(g)

    texts("engine", 8e-3, 6e-4, 300)
    texts("", 25e-3, 8e-3, 200)
    texts(way, *((8e-3, 6e-4) if way else (25e-3, 8e-3)), 300)
    assert np.mean(np.array(lengths) > 0) > 0.9


def test_no_more_is_guessed_than_a_text_has_use_for() -> None:
    policy = Goodput()
    world = World(lambda t, row: 0.9, flat, 2, 0.02)
    world.run(policy, 300)
    assert policy.choose([0, 1], load=Load(2, 100)) > [4, 4]
    assert policy.choose([0, 1], load=Load(2, 100, room=(0, 0))) == [0, 0]
    assert policy.choose([0, 1], load=Load(2, 100, room=(-1, 3))) == [0, 3]
    assert policy.choose([0, 1], load=Load(2, 100, room=(1, 3))) in ([1, 2], [1, 3])


def test_a_length_that_is_ready_serves_the_last_tokens_and_none_is_made_for_them() -> None:
    policy, ready = Goodput(), frozenset({0, 4, 16})
    for _ in range(6):
        for g in (0, 4, 16):
            policy.observe(StepOutcome([0], [g], [g], g, Load(1, ready=ready, padded=True), 1 + 0.01 * g))
    assert policy.choose([0], load=Load(1, ready=ready, padded=True)) == [16]
    assert policy.choose([0], load=Load(1, ready=ready, padded=True, room=(3,))) == [4]
    assert policy.choose([0], load=Load(1, ready=ready, padded=True, room=(0,))) == [0]


def test_no_length_is_made_ready_for_a_text_s_end() -> None:
    """Guesses of the host are as many as there are; nothing pays, and tries are due."""
    policy, ready, chosen = Goodput(), frozenset({0, 2}), list[int]()
    for t in range(2000):
        load = Load(1, ready=ready, room=(99 if t < 1000 else 1,))
        (g,) = policy.choose([0], load=load)
        policy.observe(StepOutcome([0], [g], [0], g, load, 1 + 0.01 * g))
        chosen.append(g)
    assert set(chosen) == {0, 2}
    assert chosen.index(2) < 1000
    assert not any(chosen[1000:])


@pytest.mark.parametrize(("padded", "ready"), [(False, {0, 4}), (True, {0, 16}), (True, {0, 4, 16})])
def test_none_is_made_ready_for_it_where_guesses_are_good(padded: bool, ready: set[int]) -> None:
    policy, lengths = Goodput(), frozenset(ready)
    for _ in range(6):
        for g in ready:
            load = Load(1, ready=lengths, padded=padded, room=(99,))
            policy.observe(StepOutcome([0], [g], [g], g, load, 1 + 0.06 * g))
    for room in (3, 2, 1):
        for _ in range(200):
            load = Load(1, ready=lengths, padded=padded, room=(room,))
            assert policy.choose([0], load=load)[0] in ready
            policy.observe(StepOutcome([0], [0], [0], 0, load, 1.0))


def test_guesses_beyond_a_texts_end_are_not_booked_as_won() -> None:
    policy = Goodput()
    for _ in range(6):
        for g in (0, 4):
            policy.observe(StepOutcome([0], [g], [g], g, Load(1), 1 + 0.06 * g))
    policy.budget.balance = 0.0
    policy.observe(StepOutcome([0], [4], [4], 4, Load(1, room=(1,), padded=True), 1.5))
    assert 0 < policy.budget.balance < 0.6
    for room in (0, -1):  # it may have ended by then
        policy.budget.balance = 0.0
        policy.observe(StepOutcome([0], [4], [4], 4, Load(1, room=(room,), padded=True), 1.5))
        assert policy.budget.balance == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize(("alpha", "step", "miss"), [(0.8, 0.9, 0.09), (0.02, 0.3, 0.05)])
def test_a_text_that_was_not_read_is_not_read_at_any_price(alpha: float, step: float, miss: float) -> None:
    for iterations in (1000, 4000):
        world = World(lambda t, row: alpha, flat, 1, step, miss).run(Goodput(), iterations)
        assert world.rate >= 0.98


def test_long_prompts_are_read_by_a_bad_draft_once() -> None:
    policy = Goodput()
    world = World(lambda t, row: 0.02, flat, 1, 0.3, 0.3 / 16, prompt=5000)
    for _ in range(40):
        world.run(policy, 100)
    assert np.count_nonzero(world.lengths) <= 10
    lost = world.seconds - world.tokens
    assert lost <= 8 + 0.0075 * 4000 + 1.1 * 5000 * 0.3 / 16  # the account's, and the first try's


@pytest.mark.parametrize("step", [0.1, 0.3])
def test_few_tokens_that_were_read_for_nothing_do_not_make_long_prompts_look_free(step: float) -> None:
    for seed in range(3):
        policy = Goodput()
        short = World(lambda t, row: 0.02, flat, 1, step, step / 32, 32, prompt=20, seed=seed)
        longer = World(lambda t, row: 0.02, flat, 1, step, step / 32, 32, prompt=5000, seed=seed)
        for world, texts in ((short, 10), (longer, 40)):
            for _ in range(texts):
                world.run(policy, 100)
        assert longer.rate >= 0.98


def test_a_reading_that_took_no_time_weighs_as_little_as_it_read() -> None:
    costs = Costs(4)
    for _ in range(9):
        costs.note_draft(Load(1), 2, 0.2, 0.0)
    costs.note_draft(Load(1, unread=20), 2, 0.199, 0.0)
    costs.note_draft(Load(1, unread=5000), 2, 5.2, 0.0)
    assert costs.missed(Load(1, unread=5000)) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("stall", [20.0, 200.0])
def test_a_stall_at_the_first_pass_of_a_longer_text_is_an_accident(stall: float) -> None:
    for alpha, step in ((0.3, 0.5), (0.6, 0.9)):
        policy = Goodput()
        kept = partial(steadily, alpha)
        short = World(kept, flat, 1, step, 0.001, prompt=50)
        for _ in range(6):
            short.run(policy, 100)
        longer = World(kept, flat, 1, step, 0.001, prompt=4000, stalls={0: stall}, seed=3)
        assert longer.run(policy, 1000).rate >= 0.97


def test_a_far_text_takes_what_two_passes_say() -> None:
    costs = Costs(4)
    for _ in range(20):
        costs.note(Load(1, 100), 0, 1.0)
    costs.note(Load(1, 9000), 0, 3.1)
    assert costs.plain(Load(1, 9000)) == pytest.approx(1.0)
    costs.note(Load(1, 9001), 0, 3.0)
    assert costs.plain(Load(1, 9000)) == pytest.approx(3.0, rel=0.01)
    assert costs.plain(Load(1, 100)) == pytest.approx(1.0, rel=0.1)


def test_a_plain_pass_is_measured_where_a_text_makes_it_much_longer() -> None:
    costs = Costs(4)
    for context in range(100, 400):
        costs.note(Load(1, context), 0, 1 + 1e-3 * context)
    furthest = (1 + 1e-3 * 399) * (1 + BEYOND)
    assert not costs.beyond(Load(1, round((furthest - 1) * 1e3 * 0.95)))
    assert costs.beyond(Load(1, round((furthest - 1) * 1e3 * 1.05)))
    costs.note(Load(1, 2000), 0, 3.0)
    assert not costs.beyond(Load(1, 2000))


def test_nothing_is_guessed_until_it_is() -> None:
    policy = Goodput()
    for context in range(100, 400):
        for g in (0, 4):
            policy.observe(
                StepOutcome([0], [g], [g], g, Load(1, context), (1 + 0.01 * g) * (1 + 1e-3 * context))
            )
    assert policy.choose([0], load=Load(1, 400)) > [0]
    assert policy.choose([0], load=Load(1, 3000)) == [0]
    policy.observe(StepOutcome([0], [0], [0], 0, Load(1, 3000), 4.0))
    policy.observe(StepOutcome([0], [0], [0], 0, Load(1, 3001), 4.0))
    assert policy.choose([0], load=Load(1, 3002)) > [0]


def test_lengths_that_are_nearly_as_good_are_run_now_and_then_whatever_others_are_like() -> None:
    for seed in range(3):
        policy = Goodput()
        World(lambda t, row: 0.97, flat, 1, 0.1, 0.005, seed=seed).run(policy, 300)
        World(lambda t, row: 0.7, flat, 1, 0.1, 0.005, seed=seed + 10).run(policy, 2300)
        costs = policy.forecast.at(Load(1))
        assert max(costs.since(Load(1), g) for g in (2, 3, 4, 5, 6)) <= 2 * REVISIT


@pytest.mark.parametrize("there", [3.0, 0.0])
def test_a_length_that_is_thought_to_lose_is_run_again_if_that_can_be_spent(there: float) -> None:
    policy, draw, chosen = Goodput(), np.random.default_rng(0), list[int]()

    def run(g: int) -> None:
        lost = np.flatnonzero(draw.random(g) >= 0.7)
        kept = int(lost[0]) if len(lost) else g
        policy.observe(StepOutcome([0], [g], [kept], g, Load(1), {0: 1.0, 2: 1.02}.get(g, 5.0)))

    for g in 5 * [0, 2, 8]:
        run(g)
    for _ in range(2 * STALE):
        policy.budget.balance = there + 0.1
        chosen += policy.choose([0], load=Load(1))
        run(chosen[-1])
    assert (8 in chosen) == (there > 0)


def test_attention_that_takes_longer_for_more_tokens_does_not_make_it_lose() -> None:
    """As on a CPU: after long texts all lengths take longer by the same share."""

    def cost(batch: int, g: int) -> float:
        return 1.0 if g == 0 else 1.75 + 0.09 * g

    policy = Goodput()
    for prompt in (30, 30, 30, 8000):
        world = World(lambda t, row: 0.45, cost, 1, 0.05, slope=1e-4, prompt=prompt, seed=prompt)
        world.run(policy, 250)
    assert world.tokens / world.seconds * np.mean(1 + 1e-4 * (8000 + np.arange(250))) >= 0.97


def test_few_tokens_that_were_missed_say_nothing_of_what_reading_takes() -> None:
    costs, load = Costs(4), Load(1, unread=1)
    for _ in range(9):
        costs.note_draft(Load(1), 2, 0.2, 0.0)
        costs.note_draft(load, 2, 0.25, 0.0)  # noise
    assert costs.missed(Load(1, unread=100)) == pytest.approx(100 * 0.1 / 16)
    for _ in range(9):
        costs.note_draft(Load(1, unread=200), 2, 0.4, 0.0)
    assert costs.missed(Load(1, unread=100)) == pytest.approx(0.1)


def test_few_tokens_say_something_where_reading_them_is_timed_by_itself() -> None:
    costs = Costs(4)
    costs.note_draft(Load(2, unread=8), 0, 0.0, 0.4)
    assert costs.missed(Load(2, unread=16)) == pytest.approx(0.8)


def test_passes_take_some_time_whatever_smaller_batches_were_like() -> None:
    costs = Costs(4)
    for _ in range(4):
        costs.note(Load(8, 30000), 0, 1.1)
        costs.note(Load(8, 30000), 4, 1.0)
    for context in range(29000, 30000, 10):
        costs.note(Load(64, context), 0, 1e-4 * context)
    found = costs.passes(Load(64, 100))
    assert (found > 0).all()
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("wait", [0.0, 0.4])
def test_a_device_that_waits_for_guesses_loses_that(wait: float) -> None:
    """Before guesses and after them; so of those that are tried now and then, twice. They are booked with
    what they are believed to bring, none of which comes."""
    policy, slots = Goodput(), [0]
    seconds, believed, proposals, last = 0.0, 0.0, 0, 0
    for t in range(1500):
        (g,) = policy.choose(slots, load=Load(1, t + 1))
        waited = wait if g or last else 0.0
        done = StepOutcome(slots, [g], [0], g, Load(1, t + 1), 1 + 0.3 * g, 0.1 * g, g, waited=waited)
        policy.observe(done)
        believed += policy.forecast.keeps(done)
        seconds, proposals, last = seconds + 1 + 0.3 * g + waited, proposals + (g > 0), g
    assert proposals > 5
    assert policy.forecast.at(Load(1)).wait(Load(1)) == wait
    assert seconds - believed <= 1500 + 8 + 0.0075 * 1500 + 1


def test_waiting_is_no_part_of_a_step() -> None:
    costs = Costs(16)
    costs.note_draft(Load(1), 2, 0.2, 0.0)
    costs.note_draft(Load(1), 2, 0.2, 0.0)
    before = costs.drafts(Load(1))
    costs.note_wait(Load(1), 0.5)
    assert costs.drafts(Load(1))[0] == 0
    assert costs.drafts(Load(1))[1:] == pytest.approx(before[1:] + 0.5)
    assert costs.step(Load(1)) == pytest.approx(0.1)


def test_a_decoder_that_was_asked_for_single_tokens_is_not_taken_for_a_bad_one() -> None:
    """They leave no room for guesses; nothing is known of them, and a length has to be made ready."""
    policy = Goodput()
    policy.observe(StepOutcome([0], [0], [0], 0, Load(1, ready=frozenset()), None, making=0.3))
    for _ in range(40):
        policy.reset([0])
        for context in (10, 11):
            load = Load(1, context, ready=frozenset({0}), room=(0,))
            assert policy.choose([0], load=load) == [0]
            policy.observe(StepOutcome([0], [0], [0], 0, load, 0.008))
    world = World(lambda t, row: 1.0, lambda batch, g: 0.008 * flat(batch, g), making=0.3, made={0: 0})
    lengths = world.run(policy, 100).lengths
    assert next(t for t, g in enumerate(lengths) if g) < 60


@pytest.mark.parametrize("waited", [0.0, 0.5])
def test_guesses_that_win_less_than_the_wait_for_them_are_seldom_asked_for(waited: float) -> None:
    """Of a drafter on the host that costs nothing else."""
    policy, slots = Goodput(), [0]
    asked = 0
    for t in range(600):
        load = Load(1, t + 1)
        if policy.idle:
            policy.observe(StepOutcome(slots, [0], [0], 0, load, 1.0))
            continue
        asked += 1
        (g,) = policy.choose(slots, load=load, hint=Hint([2], [0.9]))
        seconds = ((1 + g) / 1.15 if g else 1.0) + 0.01
        policy.observe(StepOutcome(slots, [g], [g], g, load, seconds, 0.01, waited=waited, unused=[None]))
    assert (asked > 500) == (waited == 0.0)

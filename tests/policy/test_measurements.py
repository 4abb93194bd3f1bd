"""Wrong or old measurements, or those of other conditions, do not mislead the policy for ever."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from outpace import Goodput
from outpace.bench.simulation import Simulation, flat
from outpace.policy import Load, StepOutcome
from tests.policy.test_goodput import expected_rate


def constant(alpha: float, t: int, slot: int) -> float:
    return alpha


def best_rate(alpha: float, draft_step: float) -> float:
    return max(expected_rate(alpha, flat, 1, draft_step, g) for g in range(17))


@pytest.mark.parametrize("when", [(4, 5), (2, 3), tuple(range(300, 340))])
def test_g_measured_on_a_busy_machine_is_measured_again(when: tuple[int, ...]) -> None:
    policy, stalls = Goodput(), dict.fromkeys(when, 3.0)
    Simulation(lambda t, slot: 0.95, flat, 1, 0.02, 0.002, stalls=stalls).run(policy, 700)
    simulation = Simulation(lambda t, slot: 0.95, flat, 1, 0.02, 0.002, seed=1).run(policy, 3000)
    assert simulation.rate >= 0.95 * best_rate(0.95, 0.02)


def test_drafting_resumes_after_the_draft_model_was_slow_for_a_while() -> None:
    policy = Goodput()
    for slow, steps in ((1.0, 400), (5.0, 40)):
        simulation = Simulation(lambda t, slot: 0.9, flat, 1, 0.3 * slow, 0.03 * slow, seed=int(slow))
        simulation.run(policy, steps)
    Simulation(lambda t, slot: 0.9, flat, 1, 0.3, 0.03, seed=2).run(policy, 2000)
    simulation = Simulation(lambda t, slot: 0.9, flat, 1, 0.3, 0.03, seed=3).run(policy, 1000)
    assert simulation.rate >= 0.95 * best_rate(0.9, 0.3)


@pytest.mark.parametrize("executor", ["", "engine"])
def test_measurements_of_one_executor_do_not_hold_for_the_other(executor: str) -> None:
    """In the graph executor the draft time is part of the pass; in the eager one it is measured by itself."""
    policy, rng, chosen = Goodput(), np.random.default_rng(0), list[int]()

    def generate(executor: str, baseline: float, draft_step: float, steps: int) -> None:
        policy.reset([0])
        chosen.clear()
        for _ in range(steps):
            load = Load(1, 100, executor=executor)
            (g,) = policy.choose([0], load=load)
            rejected = np.flatnonzero(rng.random(g) >= 0.8)
            accepted = int(rejected[0]) if len(rejected) else g
            seconds = baseline * (1 + 0.01 * g) + draft_step * g
            policy.observe(StepOutcome([0], [g], [accepted], g, load, seconds))
            chosen.append(g)

    generate("engine", 8e-3, 6e-4, 300)
    generate("", 25e-3, 8e-3, 200)
    generate(executor, *((8e-3, 6e-4) if executor else (25e-3, 8e-3)), 300)
    assert np.mean(np.array(chosen) > 0) > 0.9


def test_choice_is_limited_to_the_remaining_draft_tokens() -> None:
    policy = Goodput()
    simulation = Simulation(lambda t, slot: 0.9, flat, 2, 0.02)
    simulation.run(policy, 300)
    assert policy.choose([0, 1], load=Load(2, 100)) > [4, 4]
    assert policy.choose([0, 1], load=Load(2, 100, remaining_draft_tokens=(0, 0))) == [0, 0]
    assert policy.choose([0, 1], load=Load(2, 100, remaining_draft_tokens=(-1, 3))) == [0, 3]
    assert policy.choose([0, 1], load=Load(2, 100, remaining_draft_tokens=(1, 3))) in ([1, 2], [1, 3])


def test_last_tokens_of_a_sequence_use_a_captured_g() -> None:
    policy, load = Goodput(), Load(1, captured=frozenset({0, 4, 16}), padded_drafts=True)
    for _ in range(6):
        for g in (0, 4, 16):
            policy.observe(StepOutcome([0], [g], [g], g, load, 1 + 0.01 * g))
    assert policy.choose([0], load=load) == [16]
    assert policy.choose([0], load=replace(load, remaining_draft_tokens=(3,))) == [4]
    assert policy.choose([0], load=replace(load, remaining_draft_tokens=(0,))) == [0]


def test_no_g_is_captured_for_probes_at_the_end_of_a_sequence() -> None:
    """Drafts are not padded, no g pays, and probes are due."""
    policy, captured, chosen = Goodput(), frozenset({0, 2}), list[int]()
    before = Load(1, captured=frozenset({2}))
    policy.observe(StepOutcome([0], [0], [0], 0, before, None, capture_seconds=40.0))
    for t in range(2000):
        load = Load(1, captured=captured, remaining_draft_tokens=(99 if t < 1000 else 1,))
        (g,) = policy.choose([0], load=load)
        policy.observe(StepOutcome([0], [g], [0], g, load, 1 + 0.01 * g))
        chosen.append(g)
    assert set(chosen) <= {0, 1, 2}
    assert chosen.index(2) < 1000
    assert not any(chosen[1000:])


@pytest.mark.parametrize(("padded", "captured"), [(False, {0, 4}), (True, {0, 16}), (True, {0, 4, 16})])
def test_no_g_is_captured_at_the_end_of_a_sequence_if_draft_tokens_are_accepted(
    padded: bool, captured: set[int]
) -> None:
    policy = Goodput()
    for _ in range(6):
        for g in captured:
            load = Load(1, captured=frozenset(captured), padded_drafts=padded, remaining_draft_tokens=(99,))
            policy.observe(StepOutcome([0], [g], [g], g, load, 1 + 0.06 * g))
    for remaining in (3, 2, 1):
        for _ in range(200):
            load = Load(
                1, captured=frozenset(captured), padded_drafts=padded, remaining_draft_tokens=(remaining,)
            )
            assert policy.choose([0], load=load)[0] in captured
            policy.observe(StepOutcome([0], [0], [0], 0, load, 1.0))


@pytest.mark.parametrize(("alpha", "draft_step", "catch_up"), [(0.8, 0.9, 0.09), (0.02, 0.3, 0.05)])
def test_expensive_catching_up_costs_little_in_the_long_run(
    alpha: float, draft_step: float, catch_up: float
) -> None:
    for steps in (1000, 4000):
        simulation = Simulation(lambda t, slot: alpha, flat, 1, draft_step, catch_up).run(Goodput(), steps)
        assert simulation.rate >= 0.98


def test_bad_draft_model_seldom_reads_long_prompts() -> None:
    policy = Goodput()
    simulation = Simulation(lambda t, slot: 0.02, flat, 1, 0.3, 0.3 / 16, prompt=5000)
    for _ in range(40):
        simulation.run(policy, 100)
    assert np.count_nonzero(simulation.chosen) <= 10
    lost = simulation.seconds - simulation.tokens
    assert lost <= 8 + 0.0075 * 4000 + 1.1 * 5000 * 0.3 / 16  # of the budget, and of the first probe


@pytest.mark.parametrize(("alpha", "tokens", "sequences"), [(0.0, 60, 30), (0.0, 60, 150), (0.8, 25, 60)])
def test_catching_up_is_not_weighed_against_tokens_that_never_come(
    alpha: float, tokens: int, sequences: int
) -> None:
    """Sequences may have 448 new tokens, and end long before. Their prompts have 4000."""
    policy = Goodput()
    simulation = Simulation(
        lambda t, slot: alpha, flat, 1, 0.1, 0.01, prompt=4000, max_new_tokens=448, seed=sequences
    )
    for _ in range(sequences):
        simulation.run(policy, tokens)
    assert simulation.rate >= 0.95


@pytest.mark.parametrize("draft_step", [0.1, 0.3])
def test_free_catching_up_on_few_tokens_does_not_make_long_prompts_look_free(draft_step: float) -> None:
    for seed in range(3):
        policy = Goodput()
        short = Simulation(
            lambda t, slot: 0.02, flat, 1, draft_step, draft_step / 32, 32, prompt=20, seed=seed
        )
        longer = Simulation(
            lambda t, slot: 0.02, flat, 1, draft_step, draft_step / 32, 32, prompt=5000, seed=seed
        )
        for simulation, sequences in ((short, 10), (longer, 40)):
            for _ in range(sequences):
                simulation.run(policy, 100)
        assert longer.rate >= 0.98


def test_slower_attention_in_long_contexts_does_not_cause_losses() -> None:
    """As on a CPU: in long contexts the passes of all g take longer by the same fraction."""

    def cost(batch: int, g: int) -> float:
        return 1.0 if g == 0 else 1.75 + 0.09 * g

    policy = Goodput()
    for prompt in (30, 30, 30, 8000):
        simulation = Simulation(lambda t, slot: 0.45, cost, 1, 0.05, slope=1e-4, prompt=prompt, seed=prompt)
        simulation.run(policy, 250)
    assert simulation.tokens / simulation.seconds * np.mean(1 + 1e-4 * (8000 + np.arange(250))) >= 0.97


def test_requests_of_single_tokens_do_not_delay_later_speculation() -> None:
    """They leave no draft tokens to use, so nothing is known of drafts, and a capture is needed."""
    policy = Goodput()
    policy.observe(StepOutcome([0], [0], [0], 0, Load(1, captured=frozenset()), None, capture_seconds=0.3))
    for _ in range(40):
        policy.reset([0])
        for context in (10, 11):
            load = Load(1, context, captured=frozenset({0}), remaining_draft_tokens=(0,))
            assert policy.choose([0], load=load) == [0]
            policy.observe(StepOutcome([0], [0], [0], 0, load, 0.008))
    simulation = Simulation(
        lambda t, slot: 1.0, lambda batch, g: 0.008 * flat(batch, g), capture=0.3, captured={0: 0}
    )
    chosen = simulation.run(policy, 100).chosen
    assert next(t for t, g in enumerate(chosen) if g) < 60


@pytest.mark.parametrize("idle", [0.0, 0.5])
def test_free_drafter_proposes_seldom_if_idle_time_exceeds_its_gain(idle: float) -> None:
    """The drafter runs on the host and costs little else."""
    policy, slots = Goodput(), [0]
    proposals = 0
    for t in range(600):
        load = Load(1, t + 1)
        if policy.idle:
            policy.observe(StepOutcome(slots, [0], [0], 0, load, 1.0))
            continue
        proposals += 1
        (g,) = policy.choose(slots, load=load, proposed=[2])
        seconds = (1 + g) / 1.15 if g else 1.0
        policy.observe(StepOutcome(slots, [g], [g], g, load, seconds, proposal_seconds=0.01 + idle))
    assert (proposals > 500) == (idle == 0.0)


def test_stall_in_a_short_catch_up_does_not_make_long_prompts_look_expensive() -> None:
    policy = Goodput()
    Simulation(lambda t, slot: 0.8, flat, 1, 0.05, 0.0005, stalls={300: 4.0}).run(policy, 600)
    simulation = Simulation(lambda t, slot: 0.8, flat, 1, 0.05, 0.0005, prompt=2000, seed=1)
    for _ in range(5):
        simulation.run(policy, 100)
    assert simulation.rate >= 0.9 * best_rate(0.8, 0.05)


@pytest.mark.parametrize("seconds", [3.0, 30.0, 300.0])
def test_one_slow_proposal_does_not_stop_a_free_drafter(seconds: float) -> None:
    policy, proposals = Goodput(), 0
    for t in range(400):
        if policy.idle:
            policy.observe(StepOutcome([0], [0], [0], 0, Load(1), 1.0))
            continue
        proposals += 1
        (g,) = policy.choose([0], proposed=[0 if t == 20 else 4])
        proposal_seconds = seconds if t == 20 else 0.001
        done = StepOutcome([0], [g], [g], g, Load(1), 1.0 + 0.02 * g, proposal_seconds=proposal_seconds)
        policy.observe(done)
    assert proposals > 380


def test_slower_draft_steps_are_noticed_while_speculation_runs() -> None:
    policy = Goodput()
    Simulation(lambda t, slot: 0.6, flat, 1, 0.1, 0.001).run(policy, 1000)
    slower = Simulation(lambda t, slot: 0.6, flat, 1, 1.0, 0.01, seed=1).run(policy, 2000)
    assert slower.rate >= 0.85


def test_drafts_are_tried_again_with_new_captures_after_low_acceptance() -> None:
    policy = Goodput()
    Simulation(lambda t, slot: 0.8 if t < 300 else 0.03, flat, 1, 0.1, capture=40.0).run(policy, 1500)
    simulation = Simulation(lambda t, slot: 0.9, flat, 1, 0.1, seed=1, capture=40.0).run(policy, 4000)
    assert simulation.rate >= 1.5


def test_long_drafts_are_reached_where_they_are_allowed() -> None:
    policy = Goodput(40)
    chosen = Simulation(lambda t, slot: 1.0, flat, 1).run(policy, 300).chosen
    assert max(chosen) == 40


def test_an_uncaptured_baseline_is_not_captured_to_measure_it_again() -> None:
    policy, everything = Goodput(), Load(1, captured=frozenset({0, 2, 4}))
    for g in (0, 0, 2, 2, 4, 4):
        policy.observe(StepOutcome([0], [g], [g], g, everything, 1 + 0.05 * g))
    captured = {2, 4}  # as for a sequence with other sampling parameters
    for _ in range(600):
        load = Load(1, captured=frozenset(captured))
        (g,) = policy.choose([0], load=load)
        assert g > 0
        seconds, capture = (1 + 0.05 * g, 0.0) if g in captured else (None, 40.0)
        captured.add(g)
        policy.observe(StepOutcome([0], [g], [g], g, load, seconds, capture_seconds=capture))


def test_encoder_seconds_before_the_baseline_is_known_are_not_those_of_a_draft() -> None:
    """The first requests set their own number, and the draft model encodes a source for each."""
    policy, long = Goodput(), Load(1, catch_up_tokens=3000)
    for _ in range(2):
        policy.observe(StepOutcome([0], [2], [2], 2, long, 20.0, forced=True))
    for g in (0, 0, 2, 2):
        policy.observe(StepOutcome([0], [g], [g], g, Load(1), 1 + 0.1 * g))
    assert policy.choose([0]) != [0]


def test_captures_of_catch_ups_do_not_make_those_of_steps_look_cheap() -> None:
    captured: dict[float, int] = {}  # captures, by the seconds of a first one of a catch-up alone
    for first in (0.0, 0.5):
        policy, graphs = Goodput(), {0, 2}
        if first:
            load = Load(1, captured=frozenset(graphs))
            policy.observe(StepOutcome([0], [2], [2], 2, load, None, capture_seconds=first))
        for t in range(150):
            load = Load(1, captured=frozenset(graphs), remaining_draft_tokens=(150 - t,))
            (g,) = policy.choose([0], load=load)
            capture = 0.0 if g in graphs else 60.0
            graphs.add(g)
            seconds = None if capture else flat(1, g)
            policy.observe(StepOutcome([0], [g], [g], g, load, seconds, capture_seconds=capture))
        captured[first] = len(graphs)
    assert captured[0.5] == captured[0.0]


def test_a_policy_that_only_saw_forced_steps_describes_itself_and_can_be_copied() -> None:
    policy = Goodput()
    for g in (2, 2, 4, 4):
        policy.observe(StepOutcome([0], [g], [g], g, Load(1), 1.0, forced=True))
    assert pickle.loads(pickle.dumps(policy)).describe() == "Goodput(16)"

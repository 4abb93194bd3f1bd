"""A race drops slow candidates and ends in time, by a simulated clock."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.bench.runs import Cell, Run
from outpace.sampling import SamplingParams
from outpace.tune import race
from outpace.tune.budget import Budget
from outpace.tune.candidate import Candidate, baseline
from outpace.tune.decision import recommend
from outpace.tune.race import Race, Record

BASELINE = baseline("float32")
TEXT_SECONDS = 2.0  # of the baseline


class World:
    """A simulated clock, and the speedup of each candidate."""

    def __init__(self, **speeds: float) -> None:
        self.now, self.runs = 0.0, list[Cell]()
        self.speeds = {"none": 1.0, **speeds}

    def clock(self) -> float:
        return self.now

    def generate(self, cell: Cell, group: int) -> float:
        noise = 1 + 0.01 * ((3 * group + len(self.runs)) % 5)
        seconds = TEXT_SECONDS / self.speeds[cell.draft.split()[0]] * noise
        self.now += seconds
        self.runs.append(cell)
        return seconds


class FakeDecoder:
    uses_graphs = False
    drafter = None


def run_race(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, prompts: int = 20
) -> tuple[Record, list[Candidate]]:
    class FakeSweep:
        def __init__(
            self, decoders: Any, samplings: Any, draft_lengths: Any, prompts: Any, **rest: Any
        ) -> None:
            self.groups = [[i] for i in range(len(prompts))]

        def warm_up(self, cell: Cell, short: bool = False) -> None:
            world.now += TEXT_SECONDS

        def run(self, cell: Cell, group: int, repeat: int) -> Run:
            seconds = world.generate(cell, group)
            return Run(cell, group, texts=[(20, seconds)], seconds=seconds)

    monkeypatch.setattr(race, "Sweep", FakeSweep)
    candidates = [Candidate(name, "auto", "token", "float32") for name in world.speeds if name != "none"]
    record, budget = Record(), Budget(seconds, world.clock)
    decoder: Any = FakeDecoder()
    contest = Race(
        dict.fromkeys(candidates, decoder), (BASELINE, decoder), [[1]] * prompts, SamplingParams(),
        max_new_tokens=20, seed=0, text_seconds=TEXT_SECONDS, record=record,
    )  # fmt: skip
    for _ in contest.rounds(budget.left):
        pass
    return record, candidates


def test_a_race_ends_in_time_and_finds_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=0.9, b=1.3, c=1.1, d=1.6, e=0.5)
    record, candidates = run_race(world, monkeypatch, 120)
    assert world.now <= 120
    assert recommend(record.rates, record.baseline_rates, BASELINE).candidate == candidates[3]
    counts = [len(record.rates.get(candidate, {})) for candidate in candidates]
    assert counts[3] == max(counts) > counts[4] > 0
    assert "slower half" in record.dropped[candidates[4]]


def test_a_surely_slower_candidate_is_dropped_and_a_clear_result_ends_the_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(a=1.5, b=0.5)
    record, candidates = run_race(world, monkeypatch, 10000)
    assert record.dropped == {candidates[1]: "slower than the baseline"}
    assert record.rounds == race.SETTLED_PROMPTS
    assert world.now < 100


def test_a_tie_ends_after_the_most_repeats_of_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    record, candidates = run_race(World(a=1.5, b=1.5), monkeypatch, 10000, prompts=5)
    assert record.rounds == race.MAX_REPEATS * 5
    assert set(record.rates[candidates[0]]) == {
        (i, repeat) for i in range(5) for repeat in range(race.MAX_REPEATS)
    }


def test_with_little_time_only_the_most_promising_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=1.2, b=1.6, c=1.1)
    record, candidates = run_race(world, monkeypatch, 20)
    assert world.now <= 20
    assert list(record.rates) == [candidates[0], candidates[1]]
    assert record.dropped[candidates[2]] == "no time to measure it: others are more promising"


def test_without_time_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=1.2)
    record, candidates = run_race(world, monkeypatch, 1)
    assert (world.now, record.rounds) == (0.0, 0)
    assert record.dropped[candidates[0]] == "no time to measure it"


def test_each_round_starts_with_another_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=1.2, b=1.21)
    run_race(world, monkeypatch, 10000, prompts=3)
    order = [one.draft.split()[0] for one in world.runs[:9]]
    assert order == ["none", "a", "b", "a", "b", "none", "b", "none", "a"]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_budget_must_be_positive_and_finite(seconds: float) -> None:
    with pytest.raises(ValueError, match="budget: got"):
        Budget(seconds)


def test_a_budget_counts_down_to_each_share() -> None:
    world = World()
    budget = Budget(100, world.clock)
    world.now = 30
    assert (budget.spent, budget.left(), budget.left(0.2)) == (30, 70, -10)

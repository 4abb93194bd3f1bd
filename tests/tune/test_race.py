"""Those that fall behind drop out, and it ends in time: by a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.bench.runs import Cell, Run
from outpace.sampling import SamplingParams
from outpace.tune import race
from outpace.tune.budget import Budget
from outpace.tune.decision import choose
from outpace.tune.race import Race, Record
from outpace.tune.way import Setting, plainly

PLAIN = plainly("float32")
TEXT = 2.0  # seconds of a plain one


class World:
    """A clock, and how fast each way is."""

    def __init__(self, **speeds: float) -> None:
        self.now, self.runs = 0.0, list[Cell]()
        self.speeds = {"none": 1.0, **speeds}

    def clock(self) -> float:
        return self.now

    def write(self, cell: Cell, group: int) -> float:
        took = TEXT / self.speeds[cell.draft.split()[0]] * (1 + 0.01 * ((3 * group + len(self.runs)) % 5))
        self.now += took
        self.runs.append(cell)
        return took


class Decoderlike:
    engines = None
    drafter = None


def raced(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, prompts: int = 20
) -> tuple[Record, list[Setting]]:
    class Fake:
        def __init__(self, decoders: Any, samplings: Any, lengths: Any, prompts: Any, **rest: Any) -> None:
            self.groups = [[i] for i in range(len(prompts))]

        def warm(self, cell: Cell, short: bool = False) -> None:
            world.now += TEXT

        def run(self, cell: Cell, group: int, repeat: int) -> Run:
            took = world.write(cell, group)
            return Run(cell, group, texts=[(20, took)], seconds=took)

    monkeypatch.setattr(race, "Sweep", Fake)
    ways = [Setting(name, "auto", "token", "float32") for name in world.speeds if name != "none"]
    record, budget = Record(), Budget(seconds, world.clock)
    decoder: Any = Decoderlike()
    made = Race(
        dict.fromkeys(ways, decoder), (PLAIN, decoder), [[1]] * prompts, SamplingParams(),
        tokens=20, seed=0, text=TEXT, record=record,
    )  # fmt: skip
    for _ in made.rounds(budget.left):
        pass
    return record, ways


def test_it_ends_in_time_with_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=0.9, b=1.3, c=1.1, d=1.6, e=0.5)
    record, ways = raced(world, monkeypatch, 120)
    assert world.now <= 120
    assert choose(record.rates, record.yardsticks, PLAIN).way == ways[3]
    counts = [len(record.rates.get(way, {})) for way in ways]
    assert counts[3] == max(counts) > counts[4] > 0
    assert "slower half" in record.dropped[ways[4]]


def test_what_is_surely_slower_leaves_and_what_is_clear_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=1.5, b=0.5)
    record, ways = raced(world, monkeypatch, 10000)
    assert record.dropped == {ways[1]: "slower than plain decoding"}
    assert record.rounds == race.SETTLED
    assert world.now < 100


def test_a_tie_is_measured_with_every_prompt_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    record, ways = raced(World(a=1.5, b=1.5), monkeypatch, 10000, prompts=5)
    assert record.rounds == race.TURNS * 5
    assert set(record.rates[ways[0]]) == {(i, turn) for i in range(5) for turn in range(race.TURNS)}


def test_with_little_time_only_the_most_promising_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=1.2, b=1.6, c=1.1)
    record, ways = raced(world, monkeypatch, 20)
    assert world.now <= 20
    assert list(record.rates) == [ways[0], ways[1]]
    assert record.dropped[ways[2]] == "no time to measure it: others promise more"


def test_without_time_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=1.2)
    record, ways = raced(world, monkeypatch, 1)
    assert (world.now, record.rounds) == (0.0, 0)
    assert record.dropped[ways[0]] == "no time to measure it"


def test_everyone_takes_turns_in_coming_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a=1.2, b=1.21)
    raced(world, monkeypatch, 10000, prompts=3)
    first = [one.draft.split()[0] for one in world.runs[:9]]
    assert first == ["none", "a", "b", "a", "b", "none", "b", "none", "a"]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_budget_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="budget: got"):
        Budget(seconds)


def test_a_budget_counts_down_by_shares() -> None:
    world = World()
    budget = Budget(100, world.clock)
    world.now = 30
    assert (budget.spent, budget.left(), budget.left(0.2)) == (30, 70, -10)

"""Stage by stage, with small models and the real clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.bench.cost import Pass
from outpace.bench.prompts import Asked
from outpace.bench.results import Results, load
from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.draft.ngram import NGramDrafter
from outpace.sampling import SamplingParams
from outpace.tune import tuning
from outpace.tune.budget import Budget
from outpace.tune.costs import Costs, PrecisionCosts
from outpace.tune.decision import Choice
from outpace.tune.replay import Replay
from outpace.tune.tuning import TunePlan, Tuning
from outpace.tune.way import Setting
from tests.tiny import V, trained

PERIOD = [5, 9, 17, 30, 2, 41]


@pytest.fixture(scope="module")
def target() -> Any:
    """It goes on with a text that repeats, which a lookup knows how to copy."""
    return trained(PERIOD * 40, V, steps=60)


def side(target: Any) -> PrecisionCosts:
    plain = Decoder(target)
    drafts = {
        "lookup": Decoder(plain.scorer, LookupDrafter(min_ngram=1)),
        "wrong": Decoder(plain.scorer, NGramDrafter.fit([60, 59], 1, V)),
    }
    return PrecisionCosts("float32", plain, drafts)


def asked(count: int) -> list[Asked]:
    return [Asked((PERIOD * 4)[i % 6 : 12 + i % 7], "all") for i in range(count)]


def made(target: Any, path: Path, seconds: float, **plan: Any) -> Tuning:
    settings = TunePlan(SamplingParams(temperature=0.0), tokens=32, **{"batches": (1, 2), **plan})
    results = Results(path, "tune", {})
    return Tuning([side(target)], asked(16), settings, Budget(seconds), results, fit=True)


def test_the_draft_that_is_right_is_chosen_within_the_time(target: Any, tmp_path: Path) -> None:
    path, begun = tmp_path / "tune.json", time.monotonic()
    found = made(target, path, 12.0)
    assert len(found.held) == len(found.prompts) == 8
    found.run()
    assert time.monotonic() - begun <= 12.0
    way = found.findings.choice.way
    assert way.draft in ("lookup", "ngram")
    content = load(path, ("tune",))
    assert content["spent_seconds"] <= 12
    assert content["chosen"] in content["candidates"]
    assert content["chosen"]["verified"] > 1 < content["chosen"]["interval"][0]
    by_draft = {one["draft"]: one for one in content["candidates"] if one["length"] == "auto"}
    assert set(by_draft) == {"lookup", "wrong", "ngram"}
    assert by_draft["wrong"]["why"].startswith("cannot pay")
    assert by_draft["wrong"]["verified"] is None
    assert {one["draft"]: one["alpha"] > 0.9 for one in content["drafts"]} == {
        "lookup": True, "wrong": False, "ngram": True,
    }  # fmt: skip
    assert [one["batch"] for one in content["candidates"] if one["batch"] > 1] == [2]
    assert content["max_batch"] in (1, 2)
    assert content["verdict"].startswith(f"Draft with {way.draft}, g = ")


def test_the_table_is_of_prompts_that_are_not_measured_with(target: Any, tmp_path: Path) -> None:
    found = made(target, tmp_path / "tune.json", 30.0)
    measured, held = ({id(one) for one in some} for some in (found.prompts, found.held))
    assert not measured & held
    few = Tuning(
        [side(target)], asked(7), TunePlan(SamplingParams()), Budget(9), Results(None, "tune", {}), fit=True
    )
    assert (len(few.held), len(few.prompts)) == (0, 7)
    (why,) = few.findings.untried.values()
    assert why == "7 prompts are too few to hold some back; it takes 8"


def test_sampled_texts_try_the_other_rule(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RACED", 0.7)
    found = made(target, tmp_path / "tune.json", 12.0, batches=())
    found.plan = TunePlan(SamplingParams(temperature=0.5), tokens=32, batches=())
    del found.sides[0].drafts["lookup"]
    found.findings.known = [one for one in found.findings.known if one.draft != "lookup"]
    found.run()
    assert found.findings.choice.way.draft == "ngram"
    (block,) = [one for one in found.findings.candidates() if one.rule == "block"]
    assert (block.draft, block.length) == ("ngram", found.findings.choice.way.length)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_race_leaves_time_for_larger_batches(target: Any, temperature: float) -> None:
    plan, ends = TunePlan(SamplingParams(temperature=temperature)), []
    found = Tuning([side(target)], asked(8), plan, Budget(9), Results(None, "tune", {}))
    found.time()
    found._race = lambda ways, share: ends.append(share)  # type: ignore[method-assign]
    found.race()
    assert ends == [tuning.RACED]
    assert tuning.RACED < tuning.JUDGED < 1


def test_no_time_at_all_is_said(target: Any, tmp_path: Path) -> None:
    now = iter(range(0, 100000, 50))
    found = made(target, tmp_path / "tune.json", 1.0)
    found.budget = Budget(1.0, lambda: float(next(now)))
    found.run()
    assert found.findings.verdict().startswith(
        "Whether it pays is not known: there was no time to measure whole texts in 1 s; about "
    )
    assert load(tmp_path / "tune.json")["chosen"] is None


def test_the_time_that_would_do_is_enough(target: Any, tmp_path: Path) -> None:
    short = made(target, tmp_path / "tune.json", 1e-6)
    short.run()
    assert short.findings.unknown() is not None
    found = made(target, tmp_path / "tune.json", 2 * short.enough() + 1)
    found.run()
    assert found.findings.unknown() is None


def test_drafts_that_guess_nothing_are_left_out(target: Any, tmp_path: Path) -> None:
    """Prompts in which nothing comes twice, and texts too short for it."""
    found = made(target, tmp_path / "tune.json", 10.0)
    found.sides[0].drafts = {"lookup": Decoder(found.sides[0].plain.scorer, LookupDrafter(9, 9))}
    found.held, found.prompts = [], [Asked([1], "all") for _ in range(5)]
    found.tokens = 8
    found.time()
    found.foresee()
    assert "drafted nothing" in found.findings.dropped.values()


def test_a_long_choice_is_looked_at_with_more_rows_at_its_own_length(target: Any, tmp_path: Path) -> None:
    found = made(target, tmp_path / "tune.json", 600.0)
    found.time()
    found.findings.beta["lookup"] = [np.ones(64), np.ones(64)]
    way = Setting("lookup", "12", "token", "float32")
    found.findings.add(way)
    found.findings.choice = Choice(way, {})
    found.crowd()
    (one,) = found.findings.crowds
    assert (one.length, one.batch) == ("12", 2)
    assert {each.n for each in found.costs.passes["float32", 2]} == {1, 3, 6, 13}
    iterations = found.costs.iterations(found.sides[0], "lookup", 1.0, 2)
    replay = Replay(found.findings.beta["lookup"], iterations, iterations[0], 2)
    assert one.expected == replay.fixed(12)[0] != replay.fixed(5)[0]


def test_passes_are_bounded_by_those_that_were_timed() -> None:
    costs = Costs(SamplingParams())
    costs.passes["float32", 1] = [Pass(1, 1, 10.0), Pass(1, 3, 14.0), Pass(1, 9, 30.0)]
    assert costs.longest("float32", (1,)) == pytest.approx(0.010)
    assert costs.longest("float32", (1, 2, 3)) == pytest.approx(0.010 + 0.014 + 0.014)
    assert costs.longest("float32", (6,)) == pytest.approx(0.028)  # twice three
    assert costs.longest("float32", (17,)) == pytest.approx(0.060)


def test_no_length_of_a_draft_that_cannot_pay_is_raced(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that of a single length is known less well."""
    found = made(target, tmp_path / "tune.json", 30.0)
    found.time()
    found.costs.time_step(found.sides[0], "lookup")
    found.findings.beta["lookup"] = [np.zeros(32), np.zeros(32)]
    monkeypatch.setattr(Replay, "chosen", lambda self: (0.9, (0.89, 0.91)))
    monkeypatch.setattr(Replay, "fixed", lambda self, g: (0.8, (0.4, 1.2)))
    found._foresee(found.sides[0], "lookup")
    ways = [way for way in found.findings.known if way.draft == "lookup"]
    assert len(ways) == 2
    assert set(ways) <= set(found.findings.dropped)

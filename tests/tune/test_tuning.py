"""All stages of a tuning, with small models and the real clock."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.bench.cost import Pass
from outpace.bench.prompts import Prompt
from outpace.bench.results import Results, load
from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.draft.ngram import NGramDrafter
from outpace.sampling import SamplingParams
from outpace.tune import tuning
from outpace.tune.budget import Budget
from outpace.tune.candidate import Candidate
from outpace.tune.costs import DecoderSet, StepCosts
from outpace.tune.decision import Recommendation
from outpace.tune.replay import Replay
from outpace.tune.tuning import TunePlan, Tuning
from tests.tiny import V, trained

PERIOD = [5, 9, 17, 30, 2, 41]


@pytest.fixture(scope="module")
def target() -> Any:
    """Return a model that repeats a period, so that prompt lookup is right."""
    return trained(PERIOD * 40, V, steps=60)


def decoder_set(target: Any) -> DecoderSet:
    baseline = Decoder(target)
    by_draft = {
        "lookup": Decoder(baseline.scorer, LookupDrafter()),
        "wrong": Decoder(baseline.scorer, NGramDrafter.fit([60, 59], 1, V)),
    }
    return DecoderSet("float32", baseline, by_draft)


def prompts(count: int) -> list[Prompt]:
    return [Prompt((PERIOD * 4)[i % 6 : 12 + i % 7], "all") for i in range(count)]


def make_tuning(target: Any, path: Path, seconds: float, **plan: Any) -> Tuning:
    settings = TunePlan(SamplingParams(temperature=0.0), max_new_tokens=32, **{"batches": (1, 2), **plan})
    results = Results(path, "tune", {})
    budget = Budget(seconds, time.process_time)  # other programs on the machine do not use it up
    return Tuning([decoder_set(target)], prompts(16), settings, budget, results, fit_ngram=True)


def test_the_fastest_draft_is_chosen(target: Any, tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    tuned = make_tuning(target, path, 9.0, batches=(1,))
    assert len(tuned.ngram_prompts) == len(tuned.prompts) == 8
    tuned.run()
    tuned.plan, tuned.budget = replace(tuned.plan, batches=(1, 2)), Budget(60.0)  # enough on a busy machine
    tuned.expect_larger_batches()
    tuned.save()
    chosen = tuned.findings.recommendation.candidate
    assert chosen.draft in ("lookup", "ngram")
    content = load(path, ("tune",))
    assert content["chosen"] in content["candidates"]
    assert content["chosen"]["verified"] > 1 < content["chosen"]["interval"][0]
    by_draft = {one["draft"]: one for one in content["candidates"] if one["num_draft_tokens"] == "auto"}
    assert set(by_draft) == {"lookup", "wrong", "ngram"}
    assert (by_draft["wrong"]["verified"] or 0) < content["chosen"]["verified"]
    assert {one["draft"]: one["alpha"] > 0.9 for one in content["drafts"]} == {
        "lookup": True, "wrong": False, "ngram": True,
    }  # fmt: skip
    assert [one["batch"] for one in content["candidates"] if one["batch"] > 1] == [2]
    assert content["max_batch"] in (1, 2)
    assert content["verdict"].startswith(f"Draft with {chosen.draft}, g = ")


def test_the_ngram_table_is_fitted_to_prompts_that_nothing_is_measured_with(
    target: Any, tmp_path: Path
) -> None:
    tuned = make_tuning(target, tmp_path / "tune.json", 30.0)
    measured, fitted = ({id(one) for one in some} for some in (tuned.prompts, tuned.ngram_prompts))
    assert not measured & fitted
    few = Tuning(
        [decoder_set(target)],
        prompts(7),
        TunePlan(SamplingParams()),
        Budget(9),
        Results(None, "tune", {}),
        fit_ngram=True,
    )
    assert (len(few.ngram_prompts), len(few.prompts)) == (0, 7)
    (reason,) = few.findings.skipped.values()
    assert reason == "7 prompts are too few to hold some back; it takes 8"


def test_with_sampling_the_block_rule_is_measured_too(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RACE_END", 0.7)
    tuned = make_tuning(target, tmp_path / "tune.json", 12.0, batches=())
    tuned.plan = TunePlan(SamplingParams(temperature=0.5), max_new_tokens=32, batches=())
    del tuned.decoder_sets[0].by_draft["lookup"]
    findings = tuned.findings
    findings.candidates = [one for one in findings.candidates if one.draft != "lookup"]
    tuned.run()
    assert findings.recommendation.candidate.draft == "ngram"
    (block,) = [one for one in findings.results() if one.rule == "block"]
    assert (block.draft, block.num_draft_tokens) == (
        "ngram",
        findings.recommendation.candidate.num_draft_tokens,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_race_leaves_time_for_larger_batches(target: Any, temperature: float) -> None:
    plan, shares = TunePlan(SamplingParams(temperature=temperature)), []
    tuned = Tuning([decoder_set(target)], prompts(8), plan, Budget(9), Results(None, "tune", {}))
    tuned.time_target()
    tuned._race = lambda candidates, share: shares.append(share)  # type: ignore[method-assign]
    tuned.race()
    assert shares == [tuning.RACE_END]
    assert tuning.RACE_END < tuning.RULE_END < 1


def test_without_time_the_result_is_unknown(target: Any, tmp_path: Path) -> None:
    now = iter(range(0, 100000, 50))
    tuned = make_tuning(target, tmp_path / "tune.json", 1.0)
    tuned.budget = Budget(1.0, lambda: float(next(now)))
    tuned.run()
    assert tuned.findings.verdict().startswith(
        "Whether it pays is not known: there was no time to measure whole texts in 1 s; about "
    )
    assert load(tmp_path / "tune.json")["chosen"] is None


def test_the_recommended_budget_is_enough(target: Any, tmp_path: Path) -> None:
    short = make_tuning(target, tmp_path / "tune.json", 1e-6)
    short.run()
    assert short.findings.undecided_reason() is not None
    tuned = make_tuning(target, tmp_path / "tune.json", 2 * short.sufficient_budget() + 1)
    tuned.run()
    assert tuned.findings.undecided_reason() is None


def test_a_draft_that_proposes_nothing_is_dropped(target: Any, tmp_path: Path) -> None:
    """Nothing repeats in these prompts and short texts, so prompt lookup finds no match."""
    tuned = make_tuning(target, tmp_path / "tune.json", 10.0)
    decoders = tuned.decoder_sets[0]
    decoders.by_draft = {"lookup": Decoder(decoders.baseline.scorer, LookupDrafter(9, 9))}
    tuned.ngram_prompts, tuned.prompts = [], [Prompt([1], "all") for _ in range(5)]
    tuned.max_new_tokens = 8
    tuned.time_target()
    tuned.measure_acceptance()
    assert "drafted nothing" in tuned.findings.dropped.values()


def test_larger_batches_are_timed_at_the_chosen_number_of_draft_tokens(target: Any, tmp_path: Path) -> None:
    tuned = make_tuning(target, tmp_path / "tune.json", 600.0)
    tuned.time_target()
    tuned.findings.beta["lookup"] = [np.ones(64), np.ones(64)]
    chosen = Candidate("lookup", "12", "token", "float32")
    tuned.findings.add(chosen)
    tuned.findings.recommendation = Recommendation(chosen, {})
    tuned.expect_larger_batches()
    (result,) = tuned.findings.larger_batches
    assert (result.num_draft_tokens, result.batch) == ("12", 2)
    assert {each.n for each in tuned.costs.passes["float32", 2]} == {1, 3, 6, 13}
    step_seconds = tuned.costs.step_seconds(tuned.decoder_sets[0], "lookup", 1.0, 2)
    replay = Replay(tuned.findings.beta["lookup"], step_seconds, step_seconds[0], 2)
    assert result.expected == replay.fixed(12)[0] != replay.fixed(5)[0]


def test_the_time_of_passes_is_bounded_by_timed_passes() -> None:
    costs = StepCosts(SamplingParams())
    costs.passes["float32", 1] = [Pass(1, 1, 10.0), Pass(1, 3, 14.0), Pass(1, 9, 30.0)]
    assert costs.upper_bound("float32", (1,)) == pytest.approx(0.010)
    assert costs.upper_bound("float32", (1, 2, 3)) == pytest.approx(0.010 + 0.014 + 0.014)
    assert costs.upper_bound("float32", (6,)) == pytest.approx(0.028)  # two passes over 3 tokens
    assert costs.upper_bound("float32", (17,)) == pytest.approx(0.060)


def test_no_candidate_of_a_draft_that_cannot_pay_is_raced(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval of a fixed number is wider here, but the draft cannot pay even per text."""
    tuned = make_tuning(target, tmp_path / "tune.json", 30.0)
    tuned.time_target()
    tuned.costs.time_drafting(tuned.decoder_sets[0], "lookup")
    tuned.findings.beta["lookup"] = [np.zeros(32), np.zeros(32)]
    monkeypatch.setattr(Replay, "best_per_text", lambda self: (0.9, (0.89, 0.91)))
    monkeypatch.setattr(Replay, "fixed", lambda self, g: (0.8, (0.4, 1.2)))
    tuned._expect(tuned.decoder_sets[0], "lookup")
    candidates = [one for one in tuned.findings.candidates if one.draft == "lookup"]
    assert len(candidates) == 2
    assert set(candidates) <= set(tuned.findings.dropped)

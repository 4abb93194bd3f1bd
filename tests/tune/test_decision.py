"""The right candidate is chosen from measurements, with a reason for each."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.bench.spread import Rate
from outpace.tune.candidate import Candidate, baseline
from outpace.tune.decision import Recommendation, better_half, compare, recommend, verdict

BASELINE = baseline("float32")
LOOKUP, FIXED = Candidate("lookup", "auto", "token", "float32"), Candidate("lookup", "4", "token", "float32")
TABLE, MODEL = (
    Candidate("ngram", "auto", "token", "float32"),
    Candidate("org/small", "auto", "token", "float32"),
)
Rounds = dict[tuple[int, int], Rate]


def rounds(speed: float, prompts: int = 8, spread: float = 0.01, seed: int = 0) -> Rounds:
    """Return rates of rounds: 10 tokens in about 1 / speed seconds each."""
    noise = np.random.default_rng(seed).normal(1, spread, prompts)
    return {(i, 0): (10.0, one / speed) for i, one in enumerate(noise.tolist())}


def decide(**speeds: Rounds) -> Recommendation:
    candidates = {"lookup": LOOKUP, "fixed": FIXED, "table": TABLE, "model": MODEL}
    rates = {candidates[name]: one for name, one in speeds.items()}
    return recommend(rates, {candidate: rounds(1.0, seed=1) for candidate in rates}, BASELINE)


def test_the_fastest_that_is_surely_faster_is_chosen() -> None:
    found = decide(lookup=rounds(1.2), model=rounds(1.8, seed=2), table=rounds(0.7, seed=3))
    assert found.candidate == MODEL
    assert found.reasons == {
        MODEL: "the fastest",
        LOOKUP: "slower than org/small, g = auto",
        TABLE: "slower than the baseline",
    }


def test_nothing_is_recommended_that_is_not_surely_faster() -> None:
    found = decide(lookup=rounds(1.1, spread=0.4), model=rounds(0.98, seed=2))
    assert found.candidate == BASELINE
    assert found.reasons[LOOKUP] == "not surely faster than the baseline"


def test_of_candidates_that_tie_the_simplest_is_chosen() -> None:
    found = decide(
        fixed=rounds(1.51), lookup=rounds(1.5, seed=2), model=rounds(1.49, seed=3), table=rounds(1.5)
    )
    assert found.candidate == LOOKUP
    assert found.reasons[FIXED] == "about as fast as lookup, g = auto, which is simpler"


def test_a_large_but_unsure_difference_is_not_a_tie() -> None:
    found = decide(lookup=rounds(1.5, spread=0.1), model=rounds(1.7, spread=0.2, seed=2))
    assert compare(rounds(1.5, spread=0.1), rounds(1.7, spread=0.2, seed=2)).surely_slower is False  # type: ignore[union-attr]
    assert found.candidate == MODEL


def test_too_few_prompts_recommend_the_baseline() -> None:
    found = decide(lookup=rounds(2.0, prompts=3))
    assert found.candidate == BASELINE
    assert found.reasons[LOOKUP] == "3 prompts are too few to be sure"
    assert decide(lookup=rounds(2.0, prompts=1)).reasons[LOOKUP] == "1 prompt is too few to be sure"
    sentence = verdict(found, {LOOKUP: compare(rounds(2.0, prompts=3), rounds(1.0))}, BASELINE)  # type: ignore[dict-item]
    assert sentence.startswith("Do not speculate yet: the fastest candidate, lookup, g = auto, is 2.0")
    assert sentence.endswith("and 3 prompts are too few to be sure.")


def test_a_dropped_candidate_is_compared_on_the_prompts_of_both() -> None:
    """The first four prompts are easy for both. The model is faster there, and goes on with harder ones."""
    easy = {key: (10.0, seconds / 3) for key, (_, seconds) in rounds(1.0, 4).items()}
    model = {key: (10.0, seconds / 3.5) for key, (_, seconds) in rounds(1.0, 4).items()}
    model |= {(i, 0): (10.0, 1 / 1.2) for i in range(4, 20)}
    reference = rounds(1.0, 20, seed=1)
    found = recommend({LOOKUP: easy, MODEL: model}, {LOOKUP: reference, MODEL: reference}, BASELINE)
    assert found.candidate == MODEL


def test_a_prompt_of_two_rounds_counts_once() -> None:
    twice = rounds(1.5, 5) | {(i, 1): rate for (i, _), rate in rounds(1.5, 5, seed=2).items()}
    found = compare(twice, twice)
    assert found is not None
    assert (found.prompts, found.ratio) == (5, 1.0)
    assert compare(rounds(1.0, 2), {}) is None


def test_without_measurements_the_baseline_is_chosen() -> None:
    assert recommend({}, {}, BASELINE) == Recommendation(BASELINE, {})


def test_the_verdict_has_speed_interval_and_prompts() -> None:
    found = decide(lookup=rounds(1.5))
    speedup = compare(rounds(1.5), rounds(1.0, seed=1))
    assert speedup is not None
    low, high = speedup.interval or (0, 0)
    assert verdict(found, {LOOKUP: speedup}, BASELINE) == (
        f"Draft with lookup, g = auto: {speedup.ratio:.2f} ({low:.2f} to {high:.2f}) times as fast as the "
        "baseline, measured with 8 prompts."
    )


def test_another_precision_without_speculation_may_be_chosen() -> None:
    other = baseline("bfloat16")
    speedup = compare(rounds(1.4), rounds(1.0, seed=1))
    assert speedup is not None
    found = recommend(
        {other: rounds(1.4), LOOKUP: rounds(1.39, seed=2)},
        dict.fromkeys((other, LOOKUP), rounds(1.0)),
        BASELINE,
    )
    assert found.candidate == other
    assert found.reasons[LOOKUP] == "about as fast as the baseline in bfloat16, which is simpler"
    assert verdict(found, {other: speedup}, BASELINE).startswith(
        "Do not speculate, but compute in bfloat16: 1.4"
    )
    unsure = verdict(Recommendation(BASELINE, {}), {other: speedup}, BASELINE)
    assert "the fastest candidate, the baseline in bfloat16, is 1.4" in unsure


def test_the_same_draft_in_two_precisions_is_two_candidates() -> None:
    other = Candidate("lookup", "auto", "token", "bfloat16")
    found = recommend(
        {LOOKUP: rounds(1.4), other: rounds(1.41, seed=2)},
        dict.fromkeys((other, LOOKUP), rounds(1.0)),
        BASELINE,
    )
    assert found.candidate == other
    assert found.reasons[LOOKUP] == "about as fast as lookup, g = auto, in bfloat16"  # and no simpler
    speedup = compare(rounds(1.41), rounds(1.0, seed=1))
    assert speedup is not None
    assert verdict(found, {other: speedup}, BASELINE).startswith(
        "Draft with lookup, g = auto, in bfloat16: 1.4"
    )


@pytest.mark.parametrize(("count", "remaining"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_the_faster_half_remains(count: int, remaining: int) -> None:
    candidates = [LOOKUP, FIXED, TABLE, MODEL][:count]
    rates = {candidate: rounds(1 + 0.1 * i) for i, candidate in enumerate(candidates)}
    baseline_rates = {candidate: rounds(1.0) for candidate in candidates}
    assert better_half(candidates, rates, baseline_rates) == candidates[count - remaining :]

"""Of what was measured, the right way is taken, and it is said why."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.bench.spread import Rate
from outpace.tune.decision import Choice, better_half, choose, compare, verdict
from outpace.tune.way import Setting, plainly

PLAIN = plainly("float32")
LOOKUP, FIXED = Setting("lookup", "auto", "token", "float32"), Setting("lookup", "4", "token", "float32")
TABLE, MODEL = Setting("ngram", "auto", "token", "float32"), Setting("org/small", "auto", "token", "float32")
Turns = dict[tuple[int, int], Rate]


def turns(speed: float, prompts: int = 8, spread: float = 0.01, seed: int = 0) -> Turns:
    """So many times as fast as a second for 10 tokens, give or take."""
    noise = np.random.default_rng(seed).normal(1, spread, prompts)
    return {(i, 0): (10.0, one / speed) for i, one in enumerate(noise.tolist())}


def decided(**speeds: Turns) -> Choice:
    ways = {"lookup": LOOKUP, "fixed": FIXED, "table": TABLE, "model": MODEL}
    rates = {ways[name]: one for name, one in speeds.items()}
    return choose(rates, {way: turns(1.0, seed=1) for way in rates}, PLAIN)


def test_the_fastest_that_is_surely_faster_is_chosen() -> None:
    found = decided(lookup=turns(1.2), model=turns(1.8, seed=2), table=turns(0.7, seed=3))
    assert found.way == MODEL
    assert found.why == {
        MODEL: "the fastest",
        LOOKUP: "slower than org/small, g = auto",
        TABLE: "slower than plain decoding",
    }


def test_nothing_is_recommended_that_is_not_surely_faster() -> None:
    found = decided(lookup=turns(1.1, spread=0.4), model=turns(0.98, seed=2))
    assert found.way == PLAIN
    assert found.why[LOOKUP] == "not surely faster than plain decoding"


def test_a_tie_goes_to_the_simpler() -> None:
    found = decided(fixed=turns(1.51), lookup=turns(1.5, seed=2), model=turns(1.49, seed=3), table=turns(1.5))
    assert found.way == LOOKUP
    assert found.why[FIXED] == "no faster to speak of than lookup, g = auto, which is simpler"


def test_a_difference_that_is_seen_but_not_sure_is_no_tie() -> None:
    found = decided(lookup=turns(1.5, spread=0.1), model=turns(1.7, spread=0.2, seed=2))
    assert compare(turns(1.5, spread=0.1), turns(1.7, spread=0.2, seed=2)).surely_slower is False  # type: ignore[union-attr]
    assert found.way == MODEL


def test_few_prompts_are_not_enough() -> None:
    found = decided(lookup=turns(2.0, prompts=3))
    assert found.way == PLAIN
    assert found.why[LOOKUP] == "3 prompts are too few to be sure"
    assert decided(lookup=turns(2.0, prompts=1)).why[LOOKUP] == "1 prompt is too few to be sure"
    said = verdict(found, {LOOKUP: compare(turns(2.0, prompts=3), turns(1.0))}, PLAIN)  # type: ignore[dict-item]
    assert said.startswith("Do not speculate yet: the best that was measured, lookup, g = auto, is 2.0")
    assert said.endswith("and 3 prompts are too few to be sure.")


def test_those_that_dropped_out_on_easy_prompts_are_compared_where_both_wrote() -> None:
    """Of the first four prompts both made much; the model, which went on, was faster there."""
    easy = {turn: (10.0, seconds / 3) for turn, (_, seconds) in turns(1.0, 4).items()}
    model = {turn: (10.0, seconds / 3.5) for turn, (_, seconds) in turns(1.0, 4).items()}
    model |= {(i, 0): (10.0, 1 / 1.2) for i in range(4, 20)}
    plain = turns(1.0, 20, seed=1)
    found = choose({LOOKUP: easy, MODEL: model}, {LOOKUP: plain, MODEL: plain}, PLAIN)
    assert found.way == MODEL


def test_a_prompt_that_came_twice_counts_once() -> None:
    twice = turns(1.5, 5) | {(i, 1): rate for (i, _), rate in turns(1.5, 5, seed=2).items()}
    found = compare(twice, twice)
    assert found is not None
    assert (found.prompts, found.speed) == (5, 1.0)
    assert compare(turns(1.0, 2), {}) is None


def test_nothing_measured_is_plain_decoding() -> None:
    assert choose({}, {}, PLAIN) == Choice(PLAIN, {})


def test_the_verdict_has_speed_interval_and_prompts() -> None:
    found = decided(lookup=turns(1.5))
    seen = compare(turns(1.5), turns(1.0, seed=1))
    assert seen is not None
    low, high = seen.interval or (0, 0)
    assert verdict(found, {LOOKUP: seen}, PLAIN) == (
        f"Draft with lookup, g = auto: {seen.speed:.2f} ({low:.2f} to {high:.2f}) times as fast as plain "
        "decoding, measured with 8 prompts."
    )


def test_another_precision_alone_may_be_the_best() -> None:
    other = plainly("bfloat16")
    seen = compare(turns(1.4), turns(1.0, seed=1))
    assert seen is not None
    found = choose(
        {other: turns(1.4), LOOKUP: turns(1.39, seed=2)}, dict.fromkeys((other, LOOKUP), turns(1.0)), PLAIN
    )
    assert found.way == other
    assert found.why[LOOKUP] == "no faster to speak of than plain decoding in bfloat16, which is simpler"
    assert verdict(found, {other: seen}, PLAIN).startswith("Do not speculate, but compute in bfloat16: 1.4")
    unsure = verdict(Choice(PLAIN, {}), {other: seen}, PLAIN)
    assert "the best that was measured, plain decoding in bfloat16, is 1.4" in unsure


def test_the_same_draft_in_two_precisions_is_told_apart() -> None:
    other = Setting("lookup", "auto", "token", "bfloat16")
    found = choose(
        {LOOKUP: turns(1.4), other: turns(1.41, seed=2)}, dict.fromkeys((other, LOOKUP), turns(1.0)), PLAIN
    )
    assert found.way == other
    assert found.why[LOOKUP] == "no faster to speak of than lookup, g = auto, in bfloat16"  # nor simpler
    seen = compare(turns(1.41), turns(1.0, seed=1))
    assert seen is not None
    assert verdict(found, {other: seen}, PLAIN).startswith("Draft with lookup, g = auto, in bfloat16: 1.4")


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_the_better_half_is_kept(count: int, kept: int) -> None:
    ways = [LOOKUP, FIXED, TABLE, MODEL][:count]
    rates = {way: turns(1 + 0.1 * i) for i, way in enumerate(ways)}
    assert better_half(ways, rates, {way: turns(1.0) for way in ways}) == ways[count - kept :]

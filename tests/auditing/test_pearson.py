"""Counts against exact probabilities: p-values, the stated power, and the stated rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from outpace.auditing.pearson import (
    CERTAINTY,
    LOOK_AGAIN,
    LOOKS,
    MISSES,
    SPENT,
    SUSPICIOUS,
    Floats,
    corrected,
    decide,
    expected,
    looks,
    merge,
    p_value,
    power,
    samples_for,
)

ALARM = 1e-4
DELTA = 0.05
AUDITS = 300
# Of AUDITS, misses that a certainty of 99 % leaves but once in a thousand runs of such a test.
MOST_MISSES = 9


def chances(seed: int = 0, prompts: int = 1) -> Floats:
    """Sequences of three tokens out of three, from 1 % to 10 % likely; and one that is impossible."""
    likely = np.clip(np.random.default_rng(seed).dirichlet(np.full(27, 3.0), prompts), 0.01, None)
    return np.concatenate((likely / likely.sum(1, keepdims=True), np.zeros((prompts, 1))), axis=1)


def halves(p: Floats) -> Floats:
    """Misplace DELTA in the least favourable way: every probability is wrong by about the same factor."""
    order = np.random.default_rng(1).permutation(27)
    up = np.zeros(28, dtype=bool)
    up[order[np.cumsum(p[order]) <= 0.5]] = True
    q: Floats = p * np.where(up, 1 + DELTA / p[up].sum(), 1 - DELTA / p[~up].sum())
    return q


def between_two(p: Floats) -> Floats:
    """Misplace DELTA between the two likeliest outcomes."""
    first, second = np.argsort(p)[-2:]
    q = p.copy()
    q[first], q[second] = q[first] + DELTA, q[second] - DELTA
    return q


def from_all_to_one(p: Floats) -> Floats:
    """Misplace DELTA from all outcomes to the rarest."""
    q = p * (1 - DELTA)
    rarest = int(np.argmin(p[:-1]))
    q[rarest] += 1 - q.sum()
    return q


def test_p_values_are_those_of_the_definition() -> None:
    # χ² = (60-50)²/50 + (40-50)²/50 = 4 with one degree of freedom
    assert p_value([60, 40], [0.5, 0.5], least=5) == pytest.approx(0.0455, abs=1e-4)
    assert p_value([60, 40, 1], [0.5, 0.5, 0.0], least=5) == 0
    with pytest.raises(ValueError, match="too few draws"):
        p_value([1, 2], [0.5, 0.5], least=5)


@pytest.mark.parametrize("misplaced", [halves, between_two, from_all_to_one])
def test_a_misplacement_of_the_stated_size_is_found_with_the_stated_certainty(
    misplaced: Callable[[Floats], Floats],
) -> None:
    rng, p = np.random.default_rng(5), chances()
    samples = samples_for(DELTA, p, ALARM)
    q = misplaced(p[0])
    assert 0.5 * np.abs(q - p[0]).sum() == pytest.approx(DELTA, rel=0.05)
    decisions = [decide(lambda i, n: rng.multinomial(n, q), p, samples, ALARM) for _ in range(AUDITS)]
    assert sum(not one.different for one in decisions) <= MOST_MISSES


def test_a_misplacement_on_every_prompt_is_found_by_all_together() -> None:
    rng, p = np.random.default_rng(6), chances(prompts=4)
    samples = samples_for(DELTA, p, ALARM)
    assert samples < samples_for(DELTA, p[:1], ALARM) / 2
    q = [halves(one) for one in p]
    decisions = [decide(lambda i, n: rng.multinomial(n, q[i]), p, samples, ALARM) for _ in range(AUDITS)]
    assert sum(not one.different for one in decisions) <= MOST_MISSES


def test_half_the_samples_miss_what_all_would_have_found() -> None:
    rng, p = np.random.default_rng(7), chances()
    q, samples = halves(p[0]), samples_for(DELTA, p, ALARM) // 2
    decisions = [decide(lambda i, n: rng.multinomial(n, q), p, samples, ALARM) for _ in range(200)]
    assert sum(not one.different for one in decisions) > 20
    assert power(p, samples, ALARM).on_every > 1.3 * DELTA


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_correct_sampler_is_looked_at_again_as_often_as_stated_and_hardly_ever_found_different(
    prompts: int,
) -> None:
    rng, p = np.random.default_rng(8), chances(prompts=prompts)
    samples = samples_for(DELTA, p, ALARM)
    decisions = [decide(lambda i, n: rng.multinomial(n, p[i]), p, samples, ALARM) for _ in range(2 * AUDITS)]
    again = np.mean([one.samples == looks(samples)[2] for one in decisions])
    sigma = math.sqrt(LOOK_AGAIN / len(decisions))
    assert again < LOOK_AGAIN + 3.5 * sigma
    assert prompts > 1 or again > LOOK_AGAIN - 3.5 * sigma
    assert sum(one.p_value < SUSPICIOUS for one in decisions) <= 5
    assert not any(one.different for one in decisions)


def test_p_values_of_correct_samplers_are_uniform_far_into_the_tail() -> None:
    """At the first look, where the fewest samples are expected of an outcome."""
    rng, p = np.random.default_rng(9), chances()
    draws = looks(samples_for(DELTA, p, ALARM))[0]
    bins = merge(p[0] * draws, expected(ALARM))
    hoped = np.array([p[0][one].sum() * draws for one in bins])
    assert len(hoped) > 10
    counts = rng.multinomial(draws, hoped / draws, size=300_000)
    order = np.argsort(((counts - hoped) ** 2 / hoped).sum(1))
    assert (
        0.3e-4 < p_value(counts[order[-31]], hoped / draws, expected(ALARM)) < 3e-4
    )  # 30 of 300,000 lie beyond


def test_probability_that_moves_within_a_bin_counts_as_unseen() -> None:
    rare = np.array([[0.5, 0.48, *[0.001] * 20, 0.0]])
    joined = np.array([[0.5, 0.48, 0.02, 0.0]])
    seen = power(joined, 1000, ALARM).on_every
    assert power(rare, 1000, ALARM).on_every == pytest.approx(seen + 0.019, abs=1e-3)
    assert power(np.array([[1.0, 0.0]]), 1000, ALARM).on_every == 1


@pytest.mark.parametrize("p", [(0.5, 0.4985, 0.0015), (0.947, 0.052, 0.001)])
def test_a_move_from_a_frequent_outcome_to_one_that_was_merged_with_it_is_found_as_stated(
    p: tuple[float, ...],
) -> None:
    exact = np.array([p])
    few = power(exact, 2600, ALARM).on_every
    assert few > p[1]  # nothing of what moves between the two is seen
    samples = samples_for(DELTA, exact, ALARM)
    assert samples * p[2] >= expected(ALARM) / LOOKS[1]
    rng, q = np.random.default_rng(10), np.array([p[0], p[1] - DELTA, p[2] + DELTA])
    decisions = [decide(lambda i, n: rng.multinomial(n, q), exact, samples, ALARM) for _ in range(AUDITS)]
    assert sum(not one.different for one in decisions) <= MOST_MISSES


def test_too_few_samples_for_the_second_look_find_nothing_and_say_so() -> None:
    thirds = np.full((1, 3), 1 / 3)
    assert power(thirds, 58, ALARM).on_every == power(thirds, 58, ALARM).on_one[0] == 1
    assert power(thirds, 400, ALARM).on_every < 0.5


def test_a_misplacement_on_one_of_several_prompts_is_found_as_stated() -> None:
    rng, p = np.random.default_rng(11), np.full((5, 4), 0.25)
    samples = 2000
    stated = power(p, samples, ALARM).on_one[2]
    assert stated > power(p, samples, ALARM).on_every
    q = p.copy()
    q[2] += stated * np.array([0.5, 0.5, -0.5, -0.5])
    decisions = [decide(lambda i, n: rng.multinomial(n, q[i]), p, samples, ALARM) for _ in range(AUDITS)]
    assert sum(not one.different for one in decisions) <= MOST_MISSES


def test_a_p_value_is_corrected_for_the_number_of_prompts() -> None:
    p = np.full((50, 2), 0.5)
    counts = np.full((50, 2), 100)
    counts[7] = 140, 60
    found, each = corrected(counts, p, ALARM)
    alone = p_value(counts[7], p[7], 5)
    assert each[7] == pytest.approx(alone)
    assert found == pytest.approx(2 * 50 * alone)
    assert corrected(counts[7:8], p[7:8], ALARM)[0] == pytest.approx(alone)


@pytest.mark.parametrize("look", range(3))
def test_a_look_spends_its_own_share_of_the_alarm_alone(look: int) -> None:
    """A p-value between that share and the whole is no difference; a smaller one is."""
    p, samples = np.array([[0.5, 0.5]]), 8000
    total = looks(samples)[look]

    def away(level: float) -> int:
        return next(k for k in range(total // 2, total) if p_value([k, total - k], p, 5) < level)

    def found(k: int) -> bool:
        """Counts that are even up to this look, and at it have k of the first outcome."""
        drawn, first = 0, 0

        def draw(i: int, n: int) -> list[int]:
            nonlocal drawn, first
            drawn += n
            if drawn == total:
                new = k - first
            elif drawn > total:
                new = n // 2
            else:  # unsettled, so that the third look is made
                new = math.ceil(0.5 * drawn + math.sqrt(drawn)) - first
            first += new
            return [new, n - new]

        return decide(draw, p, samples, ALARM).different

    assert not found(away(ALARM))
    assert p_value([away(ALARM), total - away(ALARM)], p, 5) > SPENT[look] * ALARM
    assert found(away(SPENT[look] * ALARM))


@pytest.mark.parametrize("alarm", [1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("look_where_it_is_rarest", range(3))
def test_false_alarms_over_all_looks_are_no_more_than_stated(
    look_where_it_is_rarest: int, alarm: float
) -> None:
    """By enumeration of two outcomes, where the approximation is worst: one expects as little as it may."""
    logs = np.array([math.lgamma(k + 1) for k in range(40_001)])
    for total in (100, 400, 2000, 20_000):
        rare = 1.01 * expected(alarm) / total
        if rare > 0.5:
            continue
        samples = round(total / LOOKS[look_where_it_is_rarest])
        chance = 0.0
        for look, n in enumerate(looks(samples)):
            if n * rare < expected(alarm) or n > 40_000:
                continue
            k = np.arange(n + 1)
            mass = np.exp(logs[n] - logs[k] - logs[n - k] + k * math.log(rare) + (n - k) * math.log1p(-rare))
            z = np.abs(k - n * rare) / math.sqrt(n * rare * (1 - rare))
            tails = np.array([math.erfc(one / math.sqrt(2)) for one in z])
            chance += float(mass[tails < SPENT[look] * alarm].sum())
        assert 0 < chance <= alarm, (total, chance)


def test_what_a_correct_sampler_may_have_by_rounding_raises_no_alarm() -> None:
    rng, p = np.random.default_rng(12), chances()
    q = p[0] * np.where(np.arange(28) % 2, 1.06, 0.94)
    q /= q.sum()
    away = np.array([((q - p[0]) ** 2 / np.where(p[0], p[0], 1)).sum()])
    samples = samples_for(DELTA, p, ALARM)

    def different(rounding: Floats | None) -> int:
        return sum(
            decide(lambda i, n: rng.multinomial(n, q), p, samples, ALARM, rounding).different
            for _ in range(AUDITS)
        )

    assert different(None) > 20
    assert different(away) == 0
    assert power(p, samples, ALARM, away).on_every > power(p, samples, ALARM).on_every


def test_more_samples_than_can_be_drawn_are_refused() -> None:
    with pytest.raises(ValueError, match="misplacement: got 1e-05; more than 10,000,000 samples"):
        samples_for(1e-5, chances(), ALARM)


def test_the_certainty_is_what_the_looks_leave() -> None:
    assert 1 - sum(MISSES) == pytest.approx(CERTAINTY)

"""Counts against exact probabilities: p-values, the stated power, and the stated rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from outpace.pearson import (
    CERTAINTY,
    EXPECTED,
    LOOK_AGAIN,
    MISSES,
    SPENT,
    SUSPICIOUS,
    Floats,
    decide,
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
    assert p_value([60, 40], [0.5, 0.5], expected=5) == pytest.approx(0.0455, abs=1e-4)
    assert p_value([60, 40, 1], [0.5, 0.5, 0.0], expected=5) == 0
    with pytest.raises(ValueError, match="too few draws"):
        p_value([1, 2], [0.5, 0.5], expected=5)


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
    hoped = merge(p[0] * draws, p[0] * draws, EXPECTED)[1]
    assert len(hoped) > 10
    counts = rng.multinomial(draws, hoped / draws, size=300_000)
    order = np.argsort(((counts - hoped) ** 2 / hoped).sum(1))
    assert 0.3e-4 < p_value(counts[order[-31]], hoped / draws, EXPECTED) < 3e-4  # 30 of 300,000 lie beyond


def test_probability_that_moves_between_merged_outcomes_counts_as_unseen() -> None:
    rare = np.array([[0.5, 0.48, *[0.001] * 20, 0.0]])
    joined = np.array([[0.5, 0.48, 0.02, 0.0]])
    seen = power(joined, 1000, ALARM).on_every
    assert power(rare, 1000, ALARM).on_every == pytest.approx(seen + 0.02, abs=1e-3)
    assert power(np.array([[1.0, 0.0]]), 1000, ALARM).on_every == 1


def test_more_samples_than_can_be_drawn_are_refused() -> None:
    with pytest.raises(ValueError, match="misplacement: got 1e-05; more than 10,000,000 samples"):
        samples_for(1e-5, chances(), ALARM)


def test_the_certainty_is_what_the_looks_leave() -> None:
    assert 1 - sum(MISSES) == pytest.approx(CERTAINTY)
    assert sum(SPENT) == pytest.approx(1)

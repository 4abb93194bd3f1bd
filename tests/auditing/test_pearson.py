"""Pearson's test: p-values, the stated power, and the stated rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from outpace.auditing.pearson import (
    ALARM_SHARES,
    CERTAINTY,
    LOOK_AGAIN,
    LOOKS,
    MISSES,
    SUSPICIOUS,
    Floats,
    corrected,
    decide,
    looks,
    merge,
    min_expected_count,
    p_value,
    power,
    samples_for,
)

ALARM = 1e-4
DELTA = 0.05
AUDITS = 300
# With a certainty of 99 %, more misses than this in AUDITS happen once in a thousand runs of the test.
MAX_MISSES = 9


def probabilities(seed: int = 0, prompts: int = 1) -> Floats:
    """Return probabilities of 27 outcomes, about 1 % to 10 % each, and of an impossible one."""
    likely = np.clip(np.random.default_rng(seed).dirichlet(np.full(27, 3.0), prompts), 0.01, None)
    return np.concatenate((likely / likely.sum(1, keepdims=True), np.zeros((prompts, 1))), axis=1)


def halves(p: Floats) -> Floats:
    """Misplace DELTA as is hardest to detect: all probabilities are wrong by about the same factor."""
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


def test_p_value_matches_the_definition_of_chi_squared() -> None:
    # χ² = (60-50)²/50 + (40-50)²/50 = 4 with one degree of freedom
    assert p_value([60, 40], [0.5, 0.5], min_count=5) == pytest.approx(0.0455, abs=1e-4)
    assert p_value([60, 40, 1], [0.5, 0.5, 0.0], min_count=5) == 0
    with pytest.raises(ValueError, match="too few samples"):
        p_value([1, 2], [0.5, 0.5], min_count=5)


@pytest.mark.parametrize("misplaced", [halves, between_two, from_all_to_one])
def test_a_misplacement_of_the_stated_size_is_found_with_the_stated_certainty(
    misplaced: Callable[[Floats], Floats],
) -> None:
    rng, p = np.random.default_rng(5), probabilities()
    samples = samples_for(DELTA, p, ALARM)
    q = misplaced(p[0])
    assert 0.5 * np.abs(q - p[0]).sum() == pytest.approx(DELTA, rel=0.05)
    decisions = [decide(lambda i, n: rng.multinomial(n, q), p, samples, ALARM) for _ in range(AUDITS)]
    assert sum(not one.different for one in decisions) <= MAX_MISSES


def test_a_misplacement_on_every_prompt_needs_fewer_samples_per_prompt() -> None:
    rng, p = np.random.default_rng(6), probabilities(prompts=4)
    samples = samples_for(DELTA, p, ALARM)
    assert samples < samples_for(DELTA, p[:1], ALARM) / 2
    q = [halves(one) for one in p]
    decisions = [decide(lambda i, n: rng.multinomial(n, q[i]), p, samples, ALARM) for _ in range(AUDITS)]
    assert sum(not one.different for one in decisions) <= MAX_MISSES


def test_half_the_samples_miss_the_misplacement_more_often() -> None:
    rng, p = np.random.default_rng(7), probabilities()
    q, samples = halves(p[0]), samples_for(DELTA, p, ALARM) // 2
    decisions = [decide(lambda i, n: rng.multinomial(n, q), p, samples, ALARM) for _ in range(200)]
    assert sum(not one.different for one in decisions) > 20
    assert power(p, samples, ALARM).on_every > 1.3 * DELTA


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_correct_sampler_gets_a_third_look_as_often_as_stated_and_no_alarm(
    prompts: int,
) -> None:
    rng, p = np.random.default_rng(8), probabilities(prompts=prompts)
    samples = samples_for(DELTA, p, ALARM)
    decisions = [decide(lambda i, n: rng.multinomial(n, p[i]), p, samples, ALARM) for _ in range(2 * AUDITS)]
    again = np.mean([one.samples == looks(samples)[2] for one in decisions])
    sigma = math.sqrt(LOOK_AGAIN / len(decisions))
    assert again < LOOK_AGAIN + 3.5 * sigma
    assert prompts > 1 or again > LOOK_AGAIN - 3.5 * sigma
    assert sum(one.p_value < SUSPICIOUS for one in decisions) <= 5
    assert not any(one.different for one in decisions)


def test_p_values_of_correct_samplers_are_uniform_far_into_the_tail() -> None:
    """Test the first look, where the expected counts are smallest."""
    rng, p = np.random.default_rng(9), probabilities()
    samples = looks(samples_for(DELTA, p, ALARM))[0]
    bins = merge(p[0] * samples, min_expected_count(ALARM))
    expected = np.array([p[0][one].sum() * samples for one in bins])
    assert len(expected) > 10
    counts = rng.multinomial(samples, expected / samples, size=300_000)
    order = np.argsort(((counts - expected) ** 2 / expected).sum(1))
    assert (
        0.3e-4 < p_value(counts[order[-31]], expected / samples, min_expected_count(ALARM)) < 3e-4
    )  # 30 of 300,000 lie beyond


def test_probability_that_moves_within_a_bin_is_counted_as_undetectable() -> None:
    rare = np.array([[0.5, 0.48, *[0.001] * 20, 0.0]])
    joined = np.array([[0.5, 0.48, 0.02, 0.0]])
    seen = power(joined, 1000, ALARM).on_every
    assert power(rare, 1000, ALARM).on_every == pytest.approx(seen + 0.019, abs=1e-3)
    assert power(np.array([[1.0, 0.0]]), 1000, ALARM).on_every == 1


@pytest.mark.parametrize("p", [(0.5, 0.4985, 0.0015), (0.947, 0.052, 0.001)])
def test_a_move_between_two_outcomes_of_one_bin_is_found_with_the_stated_samples(
    p: tuple[float, ...],
) -> None:
    exact = np.array([p])
    few = power(exact, 2600, ALARM).on_every
    assert few > p[1]  # a move between the two stays within a bin
    samples = samples_for(DELTA, exact, ALARM)
    assert samples * p[2] >= min_expected_count(ALARM) / LOOKS[1]
    rng, q = np.random.default_rng(10), np.array([p[0], p[1] - DELTA, p[2] + DELTA])
    decisions = [decide(lambda i, n: rng.multinomial(n, q), exact, samples, ALARM) for _ in range(AUDITS)]
    assert sum(not one.different for one in decisions) <= MAX_MISSES


def test_with_too_few_samples_no_misplacement_is_detectable() -> None:
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
    assert sum(not one.different for one in decisions) <= MAX_MISSES


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
def test_each_look_raises_an_alarm_below_its_own_share_of_the_alarm(look: int) -> None:
    p, samples = np.array([[0.5, 0.5]]), 8000
    total = looks(samples)[look]

    def count_below(level: float) -> int:
        """Return the smallest count of the first outcome with a p-value below the level."""
        return next(k for k in range(total // 2, total) if p_value([k, total - k], p, 5) < level)

    def found(k: int) -> bool:
        """Return the decision for k samples of the first outcome at this look."""
        sampled, first = 0, 0

        def sample(i: int, n: int) -> list[int]:
            nonlocal sampled, first
            sampled += n
            if sampled == total:
                new = k - first
            elif sampled > total:
                new = n // 2
            else:  # a p-value that leads to the third look
                new = math.ceil(0.5 * sampled + math.sqrt(sampled)) - first
            first += new
            return [new, n - new]

        return decide(sample, p, samples, ALARM).different

    k = count_below(ALARM)
    assert not found(k)
    assert p_value([k, total - k], p, 5) > ALARM_SHARES[look] * ALARM
    assert found(count_below(ALARM_SHARES[look] * ALARM))


@pytest.mark.parametrize("alarm", [1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("look_of_smallest_count", range(3))
def test_false_alarms_over_all_looks_are_no_more_than_stated(
    look_of_smallest_count: int, alarm: float
) -> None:
    """Enumerate two outcomes, one with the smallest expected count: there the approximation is worst."""
    logs = np.array([math.lgamma(k + 1) for k in range(40_001)])
    for total in (100, 400, 2000, 20_000):
        rare = 1.01 * min_expected_count(alarm) / total
        if rare > 0.5:
            continue
        samples = round(total / LOOKS[look_of_smallest_count])
        chance = 0.0
        for look, n in enumerate(looks(samples)):
            if n * rare < min_expected_count(alarm) or n > 40_000:
                continue
            k = np.arange(n + 1)
            mass = np.exp(logs[n] - logs[k] - logs[n - k] + k * math.log(rare) + (n - k) * math.log1p(-rare))
            z = np.abs(k - n * rare) / math.sqrt(n * rare * (1 - rare))
            tails = np.array([math.erfc(one / math.sqrt(2)) for one in z])
            chance += float(mass[tails < ALARM_SHARES[look] * alarm].sum())
        assert 0 < chance <= alarm, (total, chance)


def test_a_divergence_within_the_rounding_tolerance_raises_no_alarm() -> None:
    rng, p = np.random.default_rng(12), probabilities()
    q = p[0] * np.where(np.arange(28) % 2, 1.06, 0.94)
    q /= q.sum()
    divergence = np.array([((q - p[0]) ** 2 / np.where(p[0], p[0], 1)).sum()])
    samples = samples_for(DELTA, p, ALARM)

    def different(rounding: Floats | None) -> int:
        return sum(
            decide(lambda i, n: rng.multinomial(n, q), p, samples, ALARM, rounding).different
            for _ in range(AUDITS)
        )

    assert different(None) > 20
    assert different(divergence) == 0
    assert power(p, samples, ALARM, divergence).on_every > power(p, samples, ALARM).on_every


def test_a_misplacement_that_needs_too_many_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="misplacement: got 1e-05; more than 10,000,000 samples"):
        samples_for(1e-5, probabilities(), ALARM)


def test_misses_of_all_looks_sum_to_the_stated_certainty() -> None:
    assert 1 - sum(MISSES) == pytest.approx(CERTAINTY)

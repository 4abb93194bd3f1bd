"""The formulas give the figures of the papers, and match enumeration where that is possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outpace.bench import theory

# Leviathan et al. 2023, table 1: α, γ, operations, speed, with c = ĉ = 0
TABLE_1 = [
    (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86),
]  # fmt: skip
# Table 4: γ, α, c, EXP; the last three follow only within the rounding of α and c
TABLE_4 = [
    (7, 0.75, 0.02, 3.2), (7, 0.8, 0.04, 3.3), (7, 0.82, 0.11, 2.5), (7, 0.62, 0.02, 2.3),
    (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0), (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0), (3, 0.56, 0.11, 1.6),
]  # fmt: skip
ROUNDED = 3


@pytest.mark.parametrize(("alpha", "g", "operations", "speed"), TABLE_1)
def test_table_1_of_the_paper_is_reproduced(alpha: float, g: int, operations: float, speed: float) -> None:
    assert round(theory.operations(alpha, g), 2) == operations
    assert round(theory.speedup(alpha, g), 2) == speed


@pytest.mark.parametrize(("g", "alpha", "c", "expected"), TABLE_4)
def test_table_4_of_the_paper_is_reproduced_within_its_rounding(
    g: int, alpha: float, c: float, expected: float
) -> None:
    if (g, alpha, c, expected) in TABLE_4[-ROUNDED:]:
        assert round(theory.speedup(alpha + 0.004, g, c - 0.004), 1) == expected
        assert round(theory.speedup(alpha, g, c), 1) != expected
    else:
        assert round(theory.speedup(alpha, g, c), 1) == expected


def test_table_5_speedups_are_above_those_of_its_rounded_acceptance_rates() -> None:
    """The paper prints 2.5, 3.1, 3.6 and 5, computed from values with more digits."""
    found = [theory.speedup(a, theory.best_length(a, 0.015), 0.015) for a in (0.62, 0.71, 0.76, 0.84)]
    assert [round(one, 2) for one in found] == [2.33, 2.94, 3.45, 4.79]


def test_expected_tokens_match_a_sum_over_all_outcomes() -> None:
    for alpha, g in itertools.product((0.0, 0.3, 0.9, 1.0), (0, 1, 5)):
        each = [(alpha**n * (1 - alpha if n < g else 1), n + 1) for n in range(g + 1)]
        assert theory.expected_tokens(alpha, g) == pytest.approx(
            sum(share * tokens for share, tokens in each)
        )


def test_arrays_broadcast() -> None:
    alpha, g = np.array([0.0, 0.5, 1.0])[:, None], np.arange(4)
    found = theory.speedup(alpha, g, 0.1)
    assert found.shape == (3, 4)
    assert found[1, 2] == theory.speedup(0.5, 2, 0.1)
    assert theory.operations(alpha, g).shape == (3, 4)
    assert theory.oracle_speedup(alpha, 0.1).shape == (3, 1)


def test_best_g_has_the_largest_speedup_and_is_0_where_no_draft_pays() -> None:
    for alpha, c in itertools.product((0.0, 0.2, 0.5, 0.8, 0.95), (0.0, 0.01, 0.1, 0.5, 0.9)):
        best = theory.best_length(alpha, c, most=60)
        assert theory.speedup(alpha, best, c) == pytest.approx(theory.speedup(alpha, np.arange(61), c).max())
        assert (best == 0) == (alpha <= c)
        if alpha > c:  # corollary 3.9
            assert theory.speedup(alpha, best, c) >= theory.least_speedup(alpha, c) - 1e-12
            assert theory.least_speedup(alpha, c) == pytest.approx(theory.speedup(alpha, 1, c))
        assert theory.oracle_speedup(alpha, c) >= theory.speedup(alpha, best, c) - 1e-12
    assert theory.best_length(0.8, 0.0, most=7) == 7
    alphas, cs = np.array([[0.0], [0.6], [0.9]]), np.array([0.02, 0.3])
    found = theory.best_length(alphas, cs)
    assert found.tolist() == [[theory.best_length(a, c) for c in cs] for a in alphas[:, 0]]
    # Section 3.5: an oracle of draft lengths is up to about 60 % faster.
    alphas = np.linspace(0.5, 0.9, 41)
    for c in (0.01, 0.02, 0.05, 0.1):
        fixed = theory.speedup(alphas, theory.best_length(alphas, c), c)
        gain = (theory.oracle_speedup(alphas, c) / fixed).max()
        assert 1.2 < gain < 1.65
    assert math.isinf(theory.oracle_speedup(1.0, 0.0))


def test_needed_alpha_gives_the_requested_speedup() -> None:
    assert theory.needed_alpha(0.2) == pytest.approx(0.2)
    assert theory.speedup(theory.needed_alpha(0.05, 2.0, 4), 4, 0.05) == pytest.approx(2.0)
    assert math.isnan(theory.needed_alpha(0.5, 2.0, 4))
    assert theory.needed_alpha(0.0, 1.0, 3) == pytest.approx(0)


def test_acceptance_rate_is_the_overlap_of_distributions() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(7), 50), rng.dirichlet(np.ones(7), 50)
    beta = theory.acceptance(p, q)
    # E over x sampled from q of min(1, p/q)
    assert np.allclose(beta, (q * np.minimum(1, p / q)).sum(-1))
    assert np.allclose(beta, 1 - theory.divergence(p, q))
    assert (theory.rejection_acceptance(p, q) <= beta + 1e-12).all()  # A.2 accepts fewer
    assert np.allclose(theory.rejection_acceptance(p, p), 1)
    lenient = theory.acceptance(p, q, 0.5)
    assert (lenient >= beta).all()
    assert np.allclose(lenient, (q * np.minimum(1, p / (0.5 * q))).sum(-1))
    assert theory.rejection_acceptance([1.0, 0.0], [0.5, 0.5]) == 0.5
    assert theory.acceptance([1.0, 0.0], [0.0, 1.0]) == 0.0


def test_invalid_arguments_are_refused() -> None:
    cases: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: theory.expected_tokens(1.2, 3), "alpha"),
        (lambda: theory.expected_tokens(float("nan"), 3), "alpha"),
        (lambda: theory.expected_tokens(0.5, 2.5), "g"),
        (lambda: theory.expected_tokens(0.5, -1), "g"),
        (lambda: theory.speedup(0.5, 2, -0.1), "c"),
        (lambda: theory.best_length(0.5, 0.1, -3), "most"),
        (lambda: theory.acceptance([0.5, 0.6], [0.5, 0.5]), "p"),
        (lambda: theory.acceptance([0.5, 0.5], [0.5, 0.5], 0.0), "lenience"),
    )
    for wrong, said in cases:
        with pytest.raises(ValueError, match=f"^{said}: "):
            wrong()


def test_measured_speedup_equals_theorem_3_8_only_if_pass_times_do_not_depend_on_g() -> None:
    g = np.arange(8)
    flat = theory.measured_speedup(theory.expected_tokens(0.8, g), g, 0.5, 10.0, 10.0)
    np.testing.assert_allclose(flat, theory.speedup(0.8, g, 0.05))
    # 2 tokens in 4·1 + 16 units, where the baseline takes 10 for one
    assert theory.measured_speedup(2.0, 4, 1.0, 16.0, 10.0) == 1.0
    with pytest.raises(ValueError, match="step: got -1"):
        theory.measured_speedup(2.0, 4, -1.0, 16.0, 10.0)


def test_accepted_probabilities_are_consistent_with_expected_tokens() -> None:
    np.testing.assert_allclose(theory.accepted_probabilities(0.5, 3), [0.5, 0.25, 0.125, 0.125])
    for alpha, g in itertools.product((0.0, 0.3, 1.0), (0, 4)):
        shares = theory.accepted_probabilities(alpha, g)
        assert shares.sum() == pytest.approx(1)
        assert (shares * np.arange(1, g + 2)).sum() == pytest.approx(theory.expected_tokens(alpha, g))

"""Promises of the rules, proven on enumerated outcomes: no sampling, and no tolerance but rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.statistical import enumeration as exact
from tests.statistical.enumeration import Endings, Floats

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st

EXACT: dict[str, Endings] = {
    "token": exact.token(),
    "block": exact.block,
    "match": exact.match,
    "rejection": exact.rejection,
}


def trees(seed: int, V: int, g: int, sharpness: float, zeros: float) -> tuple[list[Floats], list[Floats]]:
    """Return random distributions of target and draft.

    Some entries are impossible, and some draft distributions equal the target's.
    """
    rng = np.random.default_rng(seed)

    def tree() -> list[Floats]:
        levels = []
        for i in range(g + 1):
            weights = np.exp(sharpness * rng.normal(size=(V**i, V)))
            weights *= rng.random(weights.shape) >= zeros
            weights[np.arange(V**i), rng.integers(V, size=V**i)] += 1e-3
            levels.append(weights / weights.sum(-1, keepdims=True))
        return levels

    p, q = tree(), tree()
    same = rng.random() < 0.3
    return p, [p[i].copy() if same and i % 2 else q[i] for i in range(g + 1)]


models = st.builds(
    trees,
    st.integers(0, 10**6),
    st.integers(2, 4),
    st.just(3),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.sampled_from([0.0, 0.4]),
)
lengths = st.integers(0, 3)


@pytest.mark.parametrize("rule", EXACT)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(models, lengths)
def test_exact_rules_leave_the_targets_distribution(
    rule: str, pair: tuple[list[Floats], list[Floats]], g: int
) -> None:
    p, q = pair
    outcome = exact.joint(p, q, g, EXACT[rule])
    np.testing.assert_allclose(exact.completed(outcome, p, g), exact.text(p, g + 1), atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models)
def test_token_accepts_the_sum_of_minima(pair: tuple[list[Floats], list[Floats]]) -> None:
    p, q = pair
    V = p[0].shape[1]
    outcome = exact.joint(p, q, 1, EXACT["token"])
    assert exact.kept(outcome, V, 1) == pytest.approx(np.minimum(p[0], q[0]).sum(), abs=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models, lengths)
def test_block_never_accepts_fewer_and_rejection_never_more_than_token(
    pair: tuple[list[Floats], list[Floats]], g: int
) -> None:
    p, q = pair
    V = p[0].shape[1]
    by_rule = {rule: exact.kept(exact.joint(p, q, g, EXACT[rule]), V, g) for rule in EXACT}
    assert by_rule["block"] >= by_rule["token"] - 1e-12
    assert by_rule["rejection"] <= by_rule["token"] + 1e-12
    assert by_rule["match"] <= by_rule["token"] + 1e-12


def test_block_accepts_more_where_it_can() -> None:
    p, q = trees(1, 3, 3, 1.0, 0.0)
    token, block = (exact.kept(exact.joint(p, q, 3, EXACT[rule]), 3, 3) for rule in ("token", "block"))
    assert block > token + 0.01


@pytest.mark.parametrize("lenience", [0.9, 0.5, 0.1])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(models)
def test_lenience_bounds_the_probability_of_every_token(
    lenience: float, pair: tuple[list[Floats], list[Floats]]
) -> None:
    p, q = pair
    V = p[0].shape[1]
    outcome = exact.joint(p, q, 1, exact.token(lenience))
    first = exact.completed(outcome, p, 1).reshape(V, V).sum(1)
    assert (first <= p[0][0] / lenience + 1e-12).all()
    accepted = exact.kept(outcome, V, 1)
    assert accepted == pytest.approx(np.minimum(p[0] / lenience, q[0]).sum(), abs=1e-12)  # Leviathan A.5

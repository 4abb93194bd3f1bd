"""Every rule, vocabulary, draft length, sampling, draft kind: the joint distribution at a million draws a
cell."""

from __future__ import annotations

import pytest
import torch

from outpace.sampling import Sampling
from tests.statistical.checks import Case, check_joint, check_text

pytestmark = pytest.mark.statistical

EXACT = ("token", "block", "match")
APPROXIMATE = "sigmoid(-2, 2)"
SIZES = ((2, 1), (3, 2), (4, 3))
SAMPLINGS = (  # of the target, of the draft
    (Sampling(), Sampling()),
    (Sampling(temperature=0.7, top_k=2), Sampling(temperature=0.7, top_k=2)),
    (Sampling(top_p=0.8), Sampling(temperature=1.3, min_p=0.1)),
    (Sampling(temperature=0), Sampling()),
)
PLAIN = SAMPLINGS[0]

GRID = [
    Case(rule, V, g, *sampling, draft=draft, ragged=ragged)
    for V, g in SIZES
    for sampling in SAMPLINGS
    for draft in ("soft", "point")
    for ragged in (False, True)
    for rule in EXACT
]
BESIDE = [
    Case(rule, 3, 2, *sampling, draft=draft, ragged=True)
    for sampling in SAMPLINGS
    for draft in ("soft", "point")
    for rule in ("rejection", APPROXIMATE)
]
LENIENT = [
    Case("token", V, g, *PLAIN, draft=draft, lenience=lenience)
    for V, g in SIZES
    for draft in ("soft", "point")
    for lenience in (0.5, 0.1)
]
WIDE = [Case(rule, 12, 1, *PLAIN) for rule in EXACT]
GUMBEL = [Case(rule, V, g, *PLAIN, draft="gumbel") for V, g in SIZES for rule in ("token", "block")]
DTYPES = [
    Case(rule, 3, 2, *PLAIN, dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float64)
    for rule in EXACT
]


@pytest.mark.parametrize("case", [*GRID, *BESIDE, *LENIENT, *WIDE, *GUMBEL, *DTYPES], ids=str)
def test_kept_tokens_and_next_token_have_their_exact_joint_distribution(case: Case) -> None:
    check_joint(case)


@pytest.mark.parametrize("rule", [*EXACT, "rejection"])
def test_texts_of_several_iterations_are_the_targets(rule: str) -> None:
    check_text(rule)


def test_match_stays_exact_when_the_drafter_uses_the_targets_noise() -> None:
    check_text("match", draft="target noise")

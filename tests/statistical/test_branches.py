"""Cascades and trees stay exact because levels and siblings have noise of their own.

Both are simulated for one token with the library's verification and noise. The same simulation with the noise
of a chain is biased, and the check finds that.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outpace.sampling import random
from outpace.sampling.random import Stream
from outpace.verification import eager
from outpace.verification.block import Block
from outpace.verification.rules import parse
from tests import tiers
from tests.statistical import chisquare

pytestmark = pytest.mark.statistical

SEQUENCES = tiers.sized(200_000, 1_000_000)
TARGET = torch.tensor([0.2, 0.5, 0.3]).log()
MIDDLE = torch.tensor([0.4, 0.3, 0.3]).log()
DRAFT = torch.tensor([0.6, 0.2, 0.2]).log()


def keys() -> tuple[Tensor, Tensor]:
    """Return a seed and a position for each sequence."""
    seed = torch.arange(SEQUENCES)
    return seed, 5 + seed % 3


def verified(tokens: Tensor, q: Tensor, p: Tensor, level: int) -> Tensor:
    """Return the first token after verification of one draft token per sequence."""
    seed, start = keys()
    draft, target = q.expand(SEQUENCES, 1, 3), p.expand(SEQUENCES, 2, 3)
    block = Block(tokens[:, None], draft, target, None, seed, start, level=level)
    verdict = eager.verify(block, parse("token"))
    return torch.where(verdict.accepted == 1, tokens, verdict.next_token)


def cascade(inner_level: int) -> Tensor:
    """Return first tokens of a cascade: a draft model, verified by a middle one, verified by the target."""
    seed, start = keys()
    logits = DRAFT.expand(SEQUENCES, 3)
    tokens = eager.sample(logits, seed, start, 0, None, level=inner_level).tokens
    return verified(verified(tokens, DRAFT, MIDDLE, inner_level), MIDDLE, TARGET, 0)


def tree(second_node: int) -> Tensor:
    """Return first tokens of a tree: the second sibling is verified against the residual of the first."""
    seed, start = keys()
    p, q = TARGET.exp().double(), DRAFT.exp().double()
    logits = DRAFT.expand(SEQUENCES, 3)
    siblings = [eager.sample(logits, seed, start, 0, None, node=node).tokens for node in (0, second_node)]
    found = torch.full((SEQUENCES,), -1)
    for token, node in zip(siblings, (0, second_node), strict=True):
        accept, residual = random.accept_and_residual(seed, start, start, node=node)
        takes = (found < 0) & (accept * q[token] <= p[token])
        found = torch.where(takes, token, found)
        p = (p - q).clamp(min=0)
        p = p / p.sum()
    last = random.sample(p.expand(SEQUENCES, 3), residual)
    return torch.where(found < 0, last, found)


def check(tokens: Tensor, what: str) -> None:
    chisquare.agrees(tokens.bincount(minlength=3).tolist(), TARGET.double().softmax(-1).tolist(), what)


def test_a_cascade_has_the_targets_distribution() -> None:
    check(cascade(inner_level=1), "cascade")


def test_a_cascade_whose_levels_share_noise_is_biased_and_found() -> None:
    with pytest.raises(AssertionError, match="p-value"):
        check(cascade(inner_level=0), "cascade")


def test_siblings_of_a_tree_have_the_targets_distribution() -> None:
    check(tree(second_node=1), "tree")


def test_siblings_that_share_noise_are_copies_and_found() -> None:
    with pytest.raises(AssertionError, match="p-value"):
        check(tree(second_node=0), "tree")


def test_draft_noise_of_siblings_is_independent() -> None:
    """Two siblings have each pair of tokens as often as independent draws."""
    seed, start = keys()
    one, other = (
        random.race(DRAFT.expand(SEQUENCES, 3), random.gumbel(seed, start, 3, Stream.DRAFT, start, node=node))
        for node in (0, 1)
    )
    q = DRAFT.double().softmax(-1)
    pairs = (q[:, None] * q).flatten().tolist()
    chisquare.agrees((one * 3 + other).bincount(minlength=9).tolist(), pairs, "pairs of siblings")

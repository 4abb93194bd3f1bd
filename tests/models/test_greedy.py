"""Greedy decoding with a fused model; on the CPU the work of its graphs runs directly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outpace.models.causal import CausalScorer
from outpace.models.fused_scorer import FusedScorer
from outpace.models.greedy import FEW
from outpace.models.scorer import Scorer
from tests.tiny import V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30]]


@pytest.fixture
def scorer() -> FusedScorer:
    scorer = FusedScorer(tiny())
    scorer.has_kernels = True  # only graphs of such scorers know a slot
    return scorer


def continued(scorer: Scorer, slots: Sequence[int], tokens: list[list[int]], count: int) -> list[list[int]]:
    found = scorer.greedy(slots, tokens, count)
    assert found[..., 1].all(), "all logits are finite"
    return found[..., 0].tolist()


def test_tokens_are_those_that_transformers_generates(scorer: FusedScorer) -> None:
    """Slots are in any order, and the first pass has more tokens than a graph serves."""
    slots = [4, 0, 2]
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        scorer.cache.open(slot, prompt[:1])
    found = continued(scorer, slots, PROMPTS, 12)
    assert len(PROMPTS[1]) > FEW
    assert found == [greedy(tiny(), prompt, 12) for prompt in PROMPTS]
    assert [scorer.cache.length(slot) for slot in slots] == [len(prompt) + 11 for prompt in PROMPTS]


@pytest.mark.parametrize("count", [1, 5])
def test_rejected_tokens_are_replaced_after_a_rollback(scorer: FusedScorer, count: int) -> None:
    reference = CausalScorer(tiny())
    for one in (scorer, reference):
        for slot in range(3):
            one.cache.open(slot, [1])
    torch.manual_seed(0)
    for round_number in range(8):
        slots = [[0], [2, 1], [0, 1, 2]][round_number % 3]
        tokens = [torch.randint(V, (int(n),)).tolist() for n in torch.randint(1, 12, (len(slots),))]
        lengths = [scorer.cache.length(slot) for slot in slots]
        assert continued(scorer, slots, tokens, count) == continued(reference, slots, tokens, count)
        for slot, length, new in zip(slots, lengths, tokens, strict=True):
            for one in (scorer, reference):
                one.cache.truncate(slot, length + len(new))


def test_logits_that_are_not_finite_are_reported(scorer: FusedScorer) -> None:
    scorer.base.get_input_embeddings().weight.data[3] = torch.nan
    for slot in range(2):
        scorer.cache.open(slot, [1])
    found = scorer.greedy([0, 1], [[1, 2], [3]], 2)
    assert found[:, :, 1].tolist() == [[1, 1], [0, 0]]


def test_a_moved_kv_cache_is_read_where_it_is(scorer: FusedScorer) -> None:
    """The table grows with the slots, and graphs read its old memory no more."""
    expected = [greedy(tiny(), prompt, 6) for prompt in PROMPTS]
    for slot in (0, 80):
        scorer.cache.open(slot, [1])
        assert continued(scorer, [slot], PROMPTS[:1], 6) == expected[:1]
    scorer.reset([0, 80])
    scorer.release()
    scorer.cache.open(1, [1])
    assert continued(scorer, [1], PROMPTS[1:2], 6) == expected[1:2]

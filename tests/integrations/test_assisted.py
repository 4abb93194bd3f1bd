"""Transformers' assisted generation with the verification of outpace."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from outpace.integrations import assisted
from outpace.integrations.assisted import generation
from outpace.integrations.transformers import patch, patched, unpatch
from tests import tiers
from tests.statistical import chisquare
from tests.tiny import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pair() -> tuple[Any, Any]:
    target, draft = tiny(seed=0).to(DEVICE), tiny(seed=1).to(DEVICE)
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    draft.generation_config.update(
        num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return target, draft


def generated(target: Any, draft: Any, seed: int = 0, **options: Any) -> list[int]:
    torch.manual_seed(seed)
    ids = torch.tensor([[3, 1, 4, 1, 5]], device=DEVICE)
    out = target.generate(ids, assistant_model=draft, do_sample=True, top_k=0, max_new_tokens=12, **options)
    tokens: list[int] = out[0, 5:].tolist()
    return tokens


def test_patch_makes_generate_verify_with_outpace_and_unpatch_restores_transformers() -> None:
    target, draft = pair()
    transformers_sampling = generation._speculative_sampling
    unpatched_tokens = generated(target, draft)
    patch()
    patch()
    try:
        patched_tokens = generated(target, draft)
        assert generated(target, draft) == patched_tokens  # PyTorch's generator gives the seed
        assert generated(target, draft, seed=1) != patched_tokens
    finally:
        unpatch()
    assert generation._speculative_sampling is transformers_sampling
    assert patched_tokens != unpatched_tokens  # the two take their random numbers in another order
    assert generated(target, draft) == unpatched_tokens
    assert len(patched_tokens) == 12


def test_patched_restores_transformers_verification_after_an_error() -> None:
    transformers_sampling = generation._speculative_sampling

    def fails() -> None:
        with patched():
            assert generation._speculative_sampling is assisted.speculative_sampling
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert generation._speculative_sampling is transformers_sampling


def test_drafts_of_the_target_itself_are_always_accepted() -> None:
    target, _ = pair()
    _, draft = pair()
    draft.load_state_dict(target.state_dict())
    passes = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    with patched():
        generated(target, draft)
    hook.remove()
    assert len(passes) == 3  # 12 tokens, four per forward pass


def test_kernels_generate_the_same_tokens_as_the_eager_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    target, draft = pair()
    package = importlib.import_module("outpace.verification.entry")
    with patched():
        monkeypatch.setattr(package, "_fused", lambda *_: False)
        expected = generated(target, draft)
        monkeypatch.setattr(package, "_fused", lambda *_: True)  # on a CPU, Triton's interpreter
        assert generated(target, draft) == expected


@pytest.mark.statistical
def test_new_tokens_follow_the_target_distribution() -> None:
    V, g, samples = 4, 2, tiers.sized(2000, 4000)
    p, q = torch.randn(g + 1, V).double(), torch.randn(g, V).double()
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(samples):
        drafts = q.softmax(-1).multinomial(1).T
        tokens, n = assisted.speculative_sampling(drafts, q[None], g, p[None])
        sequence = tokens[0].tolist()
        assert len(sequence) == int(n) + 1
        while len(sequence) < g + 1:  # tokens of later forward passes of the target
            sequence.append(int(p[len(sequence)].softmax(-1).multinomial(1)))
        counts[tuple(sequence)] += 1
    sequences = list(itertools.product(range(V), repeat=g + 1))
    probabilities = [
        float(torch.stack([p[i].softmax(-1)[token] for i, token in enumerate(sequence)]).prod())
        for sequence in sequences
    ]
    observed = [counts[sequence] for sequence in sequences]
    chisquare.agrees(observed, probabilities, "patched", expected=chisquare.SOME)


def test_a_draft_that_ends_the_sequence_gets_no_bonus_token() -> None:
    logits = torch.zeros(1, 3, 4)
    drafts = torch.tensor([[0, 1]])
    tokens, n = assisted.speculative_sampling(drafts, logits[:, :2], 2, logits, is_done_candidate=True)
    assert tokens.tolist() == [[0, 1]]
    assert int(n) == 1


def test_unusable_logits_raise_an_error() -> None:
    logits = torch.full((1, 2, 4), torch.nan)
    with pytest.raises(ValueError, match="unusable"):
        assisted.speculative_sampling(torch.tensor([[1]]), logits[:, :1], 1, logits)

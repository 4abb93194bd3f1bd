"""Transformers' own assisted generation with our verifier in it."""

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


def test_generate_verifies_by_our_rule_and_unpatch_gives_its_own_back() -> None:
    target, draft = pair()
    theirs = generation._speculative_sampling
    before = generated(target, draft)
    patch()
    patch()
    try:
        ours = generated(target, draft)
        assert generated(target, draft) == ours  # PyTorch's seed is the seed
        assert generated(target, draft, seed=1) != ours
    finally:
        unpatch()
    assert generation._speculative_sampling is theirs
    assert ours != before  # the noise is another
    assert generated(target, draft) == before
    assert len(ours) == 12


def test_for_a_while_only_even_if_it_fails() -> None:
    theirs = generation._speculative_sampling

    def fails() -> None:
        with patched():
            assert generation._speculative_sampling is assisted.speculative_sampling
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert generation._speculative_sampling is theirs


def test_a_draft_that_is_the_target_is_always_kept() -> None:
    target, _ = pair()
    _, draft = pair()
    draft.load_state_dict(target.state_dict())
    passes = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    with patched():
        generated(target, draft)
    hook.remove()
    assert len(passes) == 3  # 12 tokens, four a pass


def test_the_kernels_write_the_same_text_as_the_eager_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    target, draft = pair()
    package = importlib.import_module("outpace.verification.entry")
    with patched():
        monkeypatch.setattr(package, "_fused", lambda *_: False)
        expected = generated(target, draft)
        monkeypatch.setattr(package, "_fused", lambda *_: True)  # on a CPU, Triton's interpreter
        assert generated(target, draft) == expected


@pytest.mark.statistical
def test_what_it_wins_is_distributed_as_the_target() -> None:
    V, g, draws = 4, 2, 4000
    p, q = torch.randn(g + 1, V).double(), torch.randn(g, V).double()
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        drafts = q.softmax(-1).multinomial(1).T
        won, n = assisted.speculative_sampling(drafts, q[None], g, p[None])
        text = won[0].tolist()
        assert len(text) == int(n) + 1
        while len(text) < g + 1:  # what later passes of the target would add
            text.append(int(p[len(text)].softmax(-1).multinomial(1)))
        counts[tuple(text)] += 1
    texts = list(itertools.product(range(V), repeat=g + 1))
    chances = [float(torch.stack([p[i].softmax(-1)[x] for i, x in enumerate(text)]).prod()) for text in texts]
    chisquare.agrees([counts[text] for text in texts], chances, "patched", expected=chisquare.SOME)


def test_a_text_that_the_drafts_end_is_ended() -> None:
    logits = torch.zeros(1, 3, 4)
    drafts = torch.tensor([[0, 1]])
    won, n = assisted.speculative_sampling(drafts, logits[:, :2], 2, logits, is_done_candidate=True)
    assert won.tolist() == [[0, 1]]
    assert int(n) == 1


def test_unusable_logits_raise() -> None:
    logits = torch.full((1, 2, 4), torch.nan)
    with pytest.raises(ValueError, match="unusable"):
        assisted.speculative_sampling(torch.tensor([[1]]), logits[:, :1], 1, logits)

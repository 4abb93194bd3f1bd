"""Each drafter proposes the tokens that it documents, and reports their distribution."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outpace
from outpace import LookupDrafter, ModelDrafter, NGramDrafter, RandomDrafter, SamplingParams
from outpace.draft import lookup
from outpace.draft.base import Draft, DraftSampler, State, check_draft
from outpace.draft.ngram import NGrams
from tests.tiny import V, byte_tokenizer, greedy, tiny

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st


def state(
    *texts: list[int], sampling: SamplingParams | None = None, g: int = 8, seed: int = 1, **changes: Any
) -> State:
    rows = list(range(len(texts)))
    return State(
        changes.pop("rows", rows),
        texts,
        [1] * len(texts),
        [sampling or SamplingParams()] * len(texts),
        torch.tensor([seed + row for row in rows]),
        [g] * len(texts),
        changes.pop("vocab_size", V),
        torch.device("cpu"),
        **changes,
    )


def expected_lookup(text: list[int], g: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Return the draft tokens that prompt lookup must propose, found by an exhaustive search."""
    for size in range(max_ngram, min_ngram - 1, -1):
        ending = text[len(text) - size :]
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) >= size and text[end - size : end] == ending:
                continuation = text[end:]
                return [continuation[i % len(continuation)] for i in range(1 if size == 1 < max_ngram else g)]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_lookup_copies_after_the_latest_longest_match(
    text: list[int], cut: int, max_ngram: int, min_ngram: int
) -> None:
    min_ngram = min(min_ngram, max_ngram)
    drafter = LookupDrafter(max_ngram, min_ngram)
    for length in (min(cut, len(text)), len(text)):  # the text grows under the same drafter
        draft = drafter.propose(state(text[:length], g=5), 5)
        expected = expected_lookup(text[:length], 5, max_ngram, min_ngram)
        assert draft.logits is None
        assert draft.lengths == [len(expected)]
        assert draft.tokens[0].tolist() == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_lookup_on_tensors_equals_the_lookup_drafter(
    texts: list[list[int]], max_ngram: int, min_ngram: int
) -> None:
    min_ngram = min(min_ngram, max_ngram)
    token_ids = torch.randint(4, (len(texts), 42))  # entries past a text are garbage
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    tokens, counts = lookup.lookup_draft(token_ids, lengths, 5, min_ngram, max_ngram)
    found = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
    assert found == [expected_lookup(text, 5, max_ngram, min_ngram) for text in texts]


def test_lookup_keeps_sequences_apart_and_forgets_on_reset() -> None:
    drafter = LookupDrafter()
    one, other = [1, 2, 3, 1, 2], [7, 8, 9, 9, 7, 8]
    draft = drafter.propose(state(one, other, g=2), 2)
    assert draft.tokens.tolist() == [[3, 1], [9, 9]]
    drafter.reset([0])
    assert drafter.propose(state([5, 6, 1, 2], other, g=2), 2).lengths == [0, 2]


class CountedText(list[int]):
    """A text that counts the tokens read from it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found


def test_lookup_reads_few_tokens_of_a_long_context_again() -> None:
    text = CountedText(torch.randint(50000, (2048,)).tolist())
    drafter = LookupDrafter()
    drafter.propose(state(text, vocab_size=50000), 8)
    for i in range(20):
        text.extend(list(text)[100 * i : 100 * i + 3])
        text.read = 0
        assert drafter.propose(state(text, vocab_size=50000), 8).lengths == [8]
        assert text.read < 50


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=3),
    st.integers(1, 4),
    st.lists(st.integers(0, 4), max_size=5),
)
def test_ngram_counts_what_followed_the_longest_known_context(
    texts: list[list[int]], n: int, context: list[int]
) -> None:
    if not any(texts):
        with pytest.raises(ValueError, match="there is nothing to count"):
            NGramDrafter.fit(texts, n, 5)
        return
    drafter = NGramDrafter.fit(texts, n, 5)
    tokens, counts = drafter.counts(context)
    for size in range(min(n - 1, len(context)), -1, -1):
        ending = context[len(context) - size :]
        followers = Counter(
            text[i + size] for text in texts for i in range(len(text) - size) if text[i : i + size] == ending
        )
        if followers:
            break
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == followers
    padded = torch.tensor([[0] * n + context, [0] * len(context) + [4] * n])
    ngrams = NGrams.on(torch.device("cpu"), drafter.orders, 5)
    rows, lengths = padded[:, padded.shape[1] - n + 1 :], torch.tensor([len(context), n])
    node = ngrams.node(rows, lengths)  # the second row's context was never seen
    logits, continued, last = ngrams.logits(node)
    for ngram, token in zip(continued[0].tolist(), last[0].tolist(), strict=True):
        if token in followers:  # drafting goes on from the n-gram, and does not look up the longer context
            longer = torch.cat((padded[:1], torch.tensor([[token]])), dim=1)[:, padded.shape[1] - n + 2 :]
            looked_up = ngrams.node(longer, lengths[:1] + 1)
            assert torch.equal(ngrams.logits(ngrams.after[ngram][None])[0], ngrams.logits(looked_up)[0])
    found = {int(token): round(float(logits[0, token].exp())) for token in logits[0].isfinite().nonzero()}
    assert found == followers
    single = torch.tensor([float(sum(text.count(token) for text in texts)) for token in range(5)])
    torch.testing.assert_close(logits[1], single.log())


def test_ngram_drafter_reports_the_distribution_it_sampled_from() -> None:
    drafter = NGramDrafter.fit([0, 1, 0, 2, 0, 1, 0, 1, 3], 2, 5)
    draft = drafter.propose(state([0], vocab_size=5), 3)
    assert draft.logits is not None
    torch.testing.assert_close(draft.logits[0, 0].softmax(-1), torch.tensor([0, 3, 1, 0, 0]) / 4)
    first = int(draft.tokens[0, 0])
    expected = {1: torch.tensor([2, 0, 0, 1, 0]) / 3, 2: torch.tensor([1.0, 0, 0, 0, 0])}[first]
    torch.testing.assert_close(draft.logits[0, 1].softmax(-1), expected)
    greedy_draft = drafter.propose(state([0], vocab_size=5, sampling=SamplingParams(temperature=0)), 1)
    assert greedy_draft.tokens.tolist() == [[1]]


@pytest.mark.parametrize("engine", [True, False])
def test_a_draft_ends_where_no_counted_token_is_allowed(engine: bool) -> None:
    drafter = NGramDrafter.fit([0, 1, 2, 0, 1, 2], 2, V)
    allowed = SamplingParams(allowed_token_ids=[40, 41])
    decoder = outpace.Decoder(tiny(), drafter, num_draft_tokens=outpace.Fixed(3), engine=engine)
    alone = outpace.Decoder(tiny(), rule="match")
    for seed in (3, None):
        outs = decoder.generate([[0, 1], [5]], [allowed, SamplingParams()], max_new_tokens=8, seed=seed)
        assert set(outs[0].token_ids) <= {40, 41}
        assert outs[0].finish_reason == "length"
        assert outs[0].stats.draft_tokens == 0
        assert outs[1].stats.draft_tokens > 0
    expected = alone.generate([0, 1], allowed, max_new_tokens=8, seed=3)
    found = decoder.generate([0, 1], allowed, max_new_tokens=8, seed=3)
    assert found.token_ids == expected.token_ids


def test_ngram_survives_saving_and_refuses_other_files(tmp_path: Path) -> None:
    drafter = NGramDrafter.fit(torch.randint(V, (500,)), 3, V)
    drafter.save(tmp_path / "draft.safetensors")
    again = NGramDrafter.load(tmp_path / "draft.safetensors")
    assert (again.n, again.vocab_size) == (3, V)
    for saved, loaded in zip(drafter.orders, again.orders, strict=True):
        np.testing.assert_array_equal(saved[0], loaded[0])
        np.testing.assert_array_equal(saved[1], loaded[1])
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no n-gram drafter"):
        NGramDrafter.load(tmp_path / "model.safetensors")


def test_ngram_reads_text_files(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    (tmp_path / "a.txt").write_text("hello hello help", encoding="utf-8")
    (tmp_path / "b.txt").write_text("helm", encoding="utf-8")
    drafter = NGramDrafter.fit_files([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, 4)
    tokens, counts = drafter.counts(tokenizer("hel").input_ids)
    seen = {
        tokenizer.decode([token]): count
        for token, count in zip(tokens.tolist(), counts.tolist(), strict=True)
    }
    assert seen == {"l": 2, "p": 1, "m": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 0, 5), "n: got 0"),
        (([1, 7], 2, 5), r"token_ids: got 1\.\.7; with vocab_size 5 they must be in 0\.\.4"),
        (([1.5, 2.5], 2, 5), "token_ids: got list"),
        (([], 2, 5), "token_ids: got none"),
    ],
)
def test_ngram_errors_name_the_wrong_argument(arguments: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        NGramDrafter.fit(*arguments)


def test_random_drafter_samples_allowed_tokens_uniformly() -> None:
    allowed = SamplingParams(logit_bias=dict.fromkeys(range(3, V), -torch.inf))
    draft = RandomDrafter(V).propose(state([1], sampling=allowed), 4)
    assert draft.logits is not None
    torch.testing.assert_close(draft.logits[0, 2].softmax(-1)[:4], torch.tensor([1, 1, 1, 0]) / 3)
    assert set(draft.tokens[0].tolist()) <= {0, 1, 2}


def test_model_drafter_proposes_its_greedy_text_after_any_acceptance() -> None:
    model = tiny()
    drafter = ModelDrafter(model)
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6]]
    texts = [list(prompt) for prompt in prompts]
    greedy_params = SamplingParams(temperature=0)
    for accepted in ([0, 4], [4, 4], [2, 0], [4, 1]):
        draft = drafter.propose(state(*texts, sampling=greedy_params), 4)
        assert draft.logits is None
        for row in (0, 1):
            assert draft.tokens[row].tolist() == greedy(model, texts[row], 4)
            # The accepted draft tokens, then a token that the target sampled
            texts[row] += [*draft.tokens[row, : accepted[row]].tolist(), 9]
        drafter.commit(torch.tensor(accepted), torch.tensor([9, 9]))
        for text in texts:
            text += [3, 1]  # tokens that came without drafting
    drafter.reset([0])
    draft = drafter.propose(state([8, 8], texts[1], sampling=greedy_params), 4)  # a new row beside an old one
    assert draft.tokens.tolist() == [greedy(model, [8, 8], 4), greedy(model, texts[1], 4)]


def test_model_drafter_reports_the_distribution_it_sampled_from() -> None:
    model, text = tiny(), [5, 6, 7]
    sampling = SamplingParams(temperature=0.7, repetition_penalty=1.5)
    draft = ModelDrafter(model).propose(state(text, sampling=sampling), 3)
    assert draft.logits is not None
    drafted = draft.tokens[0].tolist()
    with torch.inference_mode():
        raw = model(input_ids=torch.tensor([[*text, *drafted]])).logits[:, 2:5]
    prefix = outpace.Prefix(torch.tensor([text]), None, torch.tensor([1]))
    expected = outpace.sampling.adjust(raw, sampling, prefix, draft.tokens)
    torch.testing.assert_close(draft.logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [{"max_ngram": 0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}])
def test_lookup_errors_name_the_wrong_argument(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="_ngram: got"):
        LookupDrafter(**bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_draft_tokens_are_sampled_in_float32_and_logits_are_reported(dtype: torch.dtype) -> None:
    raw_logits = torch.randn(1, V, dtype=torch.float64).to(dtype)
    torch.set_default_dtype(torch.bfloat16)
    try:
        sampler = DraftSampler(state([1, 2, 3], g=2), 2)
        token = sampler.sample_next(raw_logits)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = DraftSampler(state([1, 2, 3], g=2), 2).sample_next(raw_logits.float())
    assert torch.equal(token, expected)
    logits = sampler.draft().logits
    assert logits is not None
    assert torch.equal(logits[:, 0].float(), raw_logits.float())
    assert logits.dtype == (torch.float32 if dtype is torch.float64 else dtype)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.9),
        SamplingParams(repetition_penalty=1.2),
    ],
)
def test_sampling_through_verification_gives_the_same_texts(
    monkeypatch: pytest.MonkeyPatch, rule: str, sampling: SamplingParams
) -> None:
    """On a GPU `verification.sample` samples the tokens; here its CPU implementation does."""

    def texts() -> list[Any]:
        decoder = outpace.Decoder(tiny(), tiny(seed=1), rule=rule, num_draft_tokens=outpace.Fixed(3))
        return [
            decoder.generate(prompts, sampling, seed=3, max_new_tokens=20)
            for prompts in ([[5, 6, 7]], [[5, 6, 7], [9, 8], [30]])
        ]

    expected = [[out.token_ids for out in outs] for outs in texts()]
    monkeypatch.setattr("outpace.draft.base.has_kernel", lambda device: True)
    assert [[out.token_ids for out in outs] for outs in texts()] == expected


def test_chosen_tokens_may_stay_on_the_host_and_are_checked_there() -> None:
    device, chosen = torch.device("meta"), Draft.chosen([[1, 2], [3]])
    check_draft(chosen, LookupDrafter(), 2, V, device)
    with pytest.raises(ValueError, match=rf"draft\.tokens: got ids 0\.\.{V}; they must be in 0\.\.{V - 1}"):
        check_draft(Draft.chosen([[V], []]), LookupDrafter(), 2, V, device)
    with pytest.raises(ValueError, match=r"draft\.tokens: got a tensor on cpu; it must be on meta"):
        check_draft(dataclasses.replace(chosen, logits=torch.zeros(2, 2, V)), LookupDrafter(), 2, V, device)

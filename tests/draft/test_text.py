"""A draft model with another tokenizer is accepted often, and never changes the output."""

from __future__ import annotations

import copy
import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import Decoder, Fixed, SamplingParams, TextDrafter
from outpace.draft.base import State
from outpace.draft.retokenizer import TAIL, Retokenizer, TokenizerAdapter
from outpace.models.causal import CausalScorer
from outpace.models.scorer import Scorer
from outpace.policy import StepOutcome
from tests import tiers
from tests.statistical import test_decoder as matrix
from tests.tiny import byte_tokenizer, letter_tokenizer, tiny, tiny_seq2seq, trained, trained_tokenizer

TEXT = (
    "Le café est à côté de la forêt, où l'été dure. 東京の春は短い。 "
    "Wer früh übt, der hört später auf, 🐢🐇 und 12345 ist weniger als 67890. "
)
KINDS = {"bytes": ("bytes", 300), "words": ("bytes", 400), "pieces": ("pieces", 350)}
PAIRS = list(itertools.product(KINDS, repeat=2))
GREEDY = SamplingParams(temperature=0)
PROMPTS = ["Le café est", "東京の", "Wer früh übt, der", "12345 ist"]


@lru_cache
def tokenizer(name: str) -> Any:
    kind, size = KINDS[name]
    return trained_tokenizer(kind, TEXT, size)


@lru_cache
def trained_model(name: str) -> Any:
    """Return a model that has memorized the text in its own tokens."""
    ids = tokenizer(name)(TEXT * 6).input_ids
    return trained(ids, len(tokenizer(name)), max_position_embeddings=512)


def decoder(target: str, draft: str, model: Any = None, **options: Any) -> Decoder:
    drafter = TextDrafter(model or trained_model(draft), tokenizer(draft), tokenizer(target))
    return Decoder(trained_model(target), drafter, tokenizer(target), **options)


@pytest.mark.parametrize(("target", "draft"), tiers.sized(PAIRS[::4], PAIRS))
def test_greedy_texts_equal_the_baseline_and_most_draft_tokens_are_accepted(target: str, draft: str) -> None:
    baseline = Decoder(trained_model(target), None, tokenizer(target))
    expected = baseline.generate(PROMPTS, GREEDY, max_new_tokens=32)
    outs = decoder(target, draft, num_draft_tokens=4).generate(
        PROMPTS, GREEDY, max_new_tokens=32, batch_size=3
    )
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    drafted, accepted = (
        sum(getattr(out.stats, name) for out in outs) for name in ("draft_tokens", "accepted_tokens")
    )
    print(f"{target} by {draft}: {accepted} of {drafted} accepted")
    # A draft model of whole words was not trained on the word parts that a finer target's text may end with.
    acceptance_rate, accepted_share = (
        (0.9, 0.6) if target == draft else (0.3, 0.3) if draft == "words" else (0.6, 0.5)
    )
    assert accepted > acceptance_rate * drafted
    assert accepted > accepted_share * sum(out.stats.new_tokens for out in outs)


@pytest.mark.parametrize(("target", "draft"), [("bytes", "pieces"), ("pieces", "words"), ("words", "bytes")])
def test_match_gives_the_text_of_decoding_without_speculation(target: str, draft: str) -> None:
    sampling = SamplingParams(temperature=1.5)
    baseline = Decoder(trained_model(target), None, tokenizer(target), rule="match")
    expected = baseline.generate(PROMPTS, sampling, seed=3, max_new_tokens=50)
    outs = decoder(target, draft, rule="match").generate(PROMPTS, sampling, seed=3, max_new_tokens=50)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert 0 < sum(out.stats.accepted_tokens for out in outs) < sum(out.stats.draft_tokens for out in outs)


@pytest.mark.parametrize("draft", KINDS)
def test_outputs_that_are_not_valid_text_are_decoded_exactly(draft: str) -> None:
    """Most outputs of a target of random bytes are not valid text."""
    model, target_tokenizer = tiny(vocab_size=261), byte_tokenizer()
    prompts = [[100, 101, 200], [50], [60, 61, 62, 63]]
    expected = Decoder(model).generate(prompts, GREEDY, max_new_tokens=40)
    drafter = TextDrafter(tiny(seed=1, vocab_size=len(tokenizer(draft))), tokenizer(draft), target_tokenizer)
    outs = Decoder(model, drafter, num_draft_tokens=3).generate(prompts, GREEDY, max_new_tokens=40)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]


def test_the_text_cell_of_the_statistical_matrix_accepts_and_rejects() -> None:
    outs = (
        matrix.Cell("text", policy="f 3").decoder().generate(matrix.PROMPT, n=300, seed=1, max_new_tokens=5)
    )
    drafted, accepted = (
        sum(getattr(out.stats, name) for out in outs) for name in ("draft_tokens", "accepted_tokens")
    )
    assert 0.1 * drafted < accepted < 0.9 * drafted
    assert drafted > 300


@pytest.mark.parametrize("draft", KINDS)
def test_the_draft_model_processes_each_token_about_once(draft: str) -> None:
    tokens_per_pass = []
    model, target = trained_model(draft), next(name for name in KINDS if name != draft)
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens_per_pass.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        prompt = TEXT * 2
        out = decoder(target, draft, num_draft_tokens=3).generate(prompt, GREEDY, max_new_tokens=100)
    finally:
        hook.remove()
    assert tokens_per_pass[0] <= len(tokenizer(draft)(prompt).input_ids) + 2, (
        "the prompt, and the first new token"
    )
    ratio = len(tokenizer(draft)(out.text).input_ids) / len(out.token_ids)
    assert sum(tokens_per_pass[1:]) < 3 * (3 + 1 + 1) * ratio * out.stats.target_passes, (
        "draft tokens, and the tokens that replaced them"
    )
    assert max(tokens_per_pass[1:]) < 30


def test_an_incomplete_last_target_token_is_dropped_unless_the_text_ends() -> None:
    target, draft = (
        TokenizerAdapter("target", tokenizer("words")),
        TokenizerAdapter("draft", tokenizer("bytes")),
    )
    drafter = TextDrafter(tiny(vocab_size=300), tokenizer("bytes"), tokenizer("words"))
    text = target.encode("Le café est")
    retokenizer = drafter._retokenize(0, text)
    proposal = draft.encode(" à côté d")
    assert drafter._target_tokens(retokenizer, text, proposal, 400) == target.encode(" à côté")
    ended = [*proposal, tokenizer("bytes").eos_token_id, *proposal]
    whole = [*target.encode(" à côté d"), tokenizer("words").eos_token_id]
    assert drafter._target_tokens(retokenizer, text, ended, 400) == whole
    assert drafter._target_tokens(retokenizer, text, ended, vocab_size=target.encode(" à")[0]) == []


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_incremental_retokenization_equals_encoding_the_whole_text(target: str, draft: str) -> None:
    target_adapter, draft_adapter = (
        TokenizerAdapter("target", tokenizer(target)),
        TokenizerAdapter("draft", tokenizer(draft)),
    )
    retokenizer = Retokenizer(target_adapter, draft_adapter, {})
    ids = target_adapter.encode(TEXT * 3)
    for end in range(1, len(ids) + 1):
        retokenizer.update(ids[:end])
        if end % 3 == 0:  # optional
            retokenizer.freeze()
        decoded = draft_adapter.decode(retokenizer.ids[len(draft_adapter.start) :])
        assert (TEXT * 3).startswith(decoded), "an incomplete character waits"
    assert len(retokenizer._tail) < 3 * TAIL
    whole = draft_adapter.encode(target_adapter.decode(ids))
    assert retokenizer.num_read == len(ids)
    assert retokenizer.ids == [*draft_adapter.start, *whole]


@pytest.mark.parametrize("text", [TEXT * 4, "Donaudampfschifffahrt" * 8 + " fuhr " + "東京の春は短い" * 8])
@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_frozen_at_every_step_has_the_tokens_of_the_whole_text(kind: str, text: str) -> None:
    adapter = TokenizerAdapter("tokenizer", tokenizer(kind))
    retokenizer = Retokenizer(adapter, adapter, {})
    ids = adapter.encode(text)
    for end in range(1, len(ids) + 1):
        retokenizer.update(ids[:end])
        retokenizer.freeze()
    assert retokenizer.ids == [*adapter.start, *ids]
    assert len(retokenizer._tail) < len(text) / 2


def test_characters_that_are_bytes_in_both_vocabularies_are_read_at_once() -> None:
    """A window that begins within a character is nothing but replacements."""
    target, draft = (TokenizerAdapter(name, tokenizer(name)) for name in ("pieces", "bytes"))
    retokenizer = Retokenizer(target, draft, {})
    ids = target.encode("สวัสดีครับ" * 6)
    for end in range(1, len(ids) + 1):
        retokenizer.update(ids[:end])
        retokenizer.freeze()
        assert end - retokenizer.num_read <= 3, "at most an incomplete character waits"
    assert draft.decode(retokenizer.ids[retokenizer.origin :]).strip() == "สวัสดีครับ" * 6


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_encoded_as_a_call_of_the_tokenizer_does_whatever_the_last_call_set(kind: str) -> None:
    own = copy.deepcopy(tokenizer(kind))
    own.pad_token = own.convert_ids_to_tokens(0)
    adapter, expected = TokenizerAdapter("tokenizer", own), own(TEXT, add_special_tokens=False).input_ids
    calls: list[dict[str, Any]] = [
        {}, {"truncation": True, "max_length": 3}, {"padding": "max_length", "max_length": 500}
    ]  # fmt: skip
    for options in calls:
        own("a" * 9, **options)
        assert adapter.encode(TEXT) == expected
    own.split_special_tokens = True
    name = own.convert_ids_to_tokens(min(own.all_special_ids))
    assert adapter.encode(name) == own(name, add_special_tokens=False).input_ids


def test_special_tokens_are_mapped_by_name_or_dropped() -> None:
    target, draft = (TokenizerAdapter(name, tokenizer(name)) for name in ("bytes", "pieces"))
    special_map = target.special_tokens_in(draft)
    end, turn = (tokenizer("bytes").convert_tokens_to_ids(one) for one in ("<|end|>", "<|turn|>"))
    assert special_map == {
        end: tokenizer("pieces").eos_token_id,
        turn: tokenizer("pieces").convert_tokens_to_ids("<|turn|>"),
    }
    assert draft.special_tokens_in(target).get(tokenizer("pieces").bos_token_id) is None
    retokenizer = Retokenizer(target, draft, special_map)
    retokenizer.update([turn, *target.encode("Le café"), end, *target.encode("東京"), target.encode("春")[0]])
    names = tokenizer("pieces").convert_ids_to_tokens(retokenizer.ids)
    assert names[:2] == ["<s>", "<|turn|>"]
    assert "".join(names[2:]).replace("▁", " ").split("</s>") == [" Le café", " 東京"]
    reverse = Retokenizer(draft, target, draft.special_tokens_in(target))
    reverse.update(tokenizer("pieces")("Le café").input_ids)
    assert target.decode(reverse.ids) == "Le café"


@pytest.mark.parametrize(("target", "draft"), [("bytes", "pieces"), ("pieces", "bytes")])
def test_end_of_text_is_drafted(target: str, draft: str) -> None:
    def ending(name: str) -> Any:
        one = tokenizer(name)
        ids = [*one("Le café est là.").input_ids, one.eos_token_id]
        model = trained(ids * 8, len(one), steps=80)
        model.generation_config.eos_token_id = one.eos_token_id
        return model

    model = ending(target)
    drafter = TextDrafter(ending(draft), tokenizer(draft), tokenizer(target))
    out = Decoder(model, drafter, tokenizer(target), num_draft_tokens=12).generate(
        "Le", GREEDY, max_new_tokens=20
    )
    assert out.finish_reason == "stop"
    assert (out.text or "").strip() == "café est là."
    assert out.stats.accepted_tokens + out.stats.target_passes > len(out.token_ids), (
        "the last step drafted the end"
    )


def test_slots_are_reused() -> None:
    prompts = PROMPTS * 3
    text_decoder = decoder("words", "pieces", num_draft_tokens=3)
    outs = text_decoder.generate(prompts, GREEDY, batch_size=2, max_new_tokens=20)
    again = text_decoder.generate(prompts, GREEDY, batch_size=5, max_new_tokens=20)
    baseline = Decoder(trained_model("words"), None, tokenizer("words"))
    expected = baseline.generate(prompts, GREEDY, max_new_tokens=20)
    assert (
        [out.token_ids for out in outs]
        == [out.token_ids for out in again]
        == [out.token_ids for out in expected]
    )
    first, last = (sum(out.stats.accepted_tokens for out in some) for some in (outs[:4], outs[8:]))
    assert last >= 0.7 * first > 0


def test_a_draft_model_stops_drafting_at_its_context_limit() -> None:
    ids = tokenizer("pieces")(TEXT * 6).input_ids
    small = trained(ids, len(tokenizer("pieces")), steps=40, max_position_embeddings=64)
    out = decoder("words", "pieces", small, num_draft_tokens=3).generate(TEXT[:60], GREEDY, max_new_tokens=60)
    baseline = Decoder(trained_model("words"), None, tokenizer("words"))
    assert out.token_ids == baseline.generate(TEXT[:60], GREEDY, max_new_tokens=60).token_ids
    assert 0 < out.stats.draft_tokens < 60


def test_nan_logits_of_the_draft_propose_nothing_and_drafting_recovers() -> None:
    small = trained(tokenizer("pieces")(TEXT * 6).input_ids, len(tokenizer("pieces")), steps=20)
    one = decoder("words", "pieces", small, num_draft_tokens=3)
    weight = small.model.norm.weight
    healthy = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    assert one.generate(TEXT[:60], GREEDY, max_new_tokens=10).stats.draft_tokens == 0
    with torch.no_grad():
        weight.copy_(healthy)
    one.forget()
    assert one.generate(TEXT[:60], GREEDY, max_new_tokens=10).stats.draft_tokens > 0


def test_load_drafts_through_text_where_tokenizers_differ(tmp_path: Path) -> None:
    for name in ("words", "pieces"):
        trained_model(name).save_pretrained(tmp_path / name)
        tokenizer(name).save_pretrained(tmp_path / name)
    messages: list[str] = []
    folders = tmp_path / "words", tmp_path / "pieces"
    options: Any = {"device": "cpu", "dtype": "float32", "pack": True, "num_draft_tokens": 4}
    one = outpace.load(*folders, **options, tell=messages.append)
    assert any("its tokenizer is not the target's, so it drafts through text" in line for line in messages)
    assert "drafter           TextDrafter, through text" in one.describe()
    out = one.generate(PROMPTS[0], GREEDY, max_new_tokens=30)
    assert out.stats.accepted_tokens > 5
    same = outpace.load(folders[0], folders[0], device="cpu", dtype="float32", tell=messages.append)
    assert isinstance(same.drafter, outpace.ModelDrafter)


def test_custom_generate_accepts_a_text_drafter() -> None:
    model = trained_model("words")
    ids = torch.tensor([tokenizer("words")("The").input_ids])
    settings = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    drafter = TextDrafter(trained_model("bytes"), tokenizer("bytes"), tokenizer("words"))
    expected = model.generate(ids, **settings)
    assert model.generate(
        ids, custom_generate=outpace.generate, draft=drafter, tokenizer=tokenizer("words"), **settings
    ).equal(expected)
    assert model.generate(ids, custom_generate=outpace.generate, draft=drafter, **settings).equal(expected)


def test_the_graph_executor_accepts_drafts_from_a_text_drafter() -> None:
    one, other = (
        decoder("words", "pieces", engine=engine, num_draft_tokens=Fixed(3)) for engine in (True, False)
    )
    assert "TextDrafter drafts on the host" in one.describe()
    texts = [each.generate("The", temperature=0, max_new_tokens=16) for each in (one, other)]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].stats.accepted_tokens == texts[1].stats.accepted_tokens > 0


class EncodeOnlyTokenizer:
    """A tokenizer that only encodes."""

    def __call__(self, text: str) -> Any: ...

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def decode(self, ids: list[int]) -> str:
        raise LookupError("no text")


def test_unsupported_combinations_raise_one_line_errors() -> None:
    model, draft_tokenizer, target_tokenizer = (
        tiny(vocab_size=4),
        letter_tokenizer("a", "b"),
        letter_tokenizer("b", "a", "c", "d"),
    )
    with pytest.raises(TypeError, match="target_tokenizer: got NoneType None; it must be a Transformers"):
        TextDrafter(model, draft_tokenizer, None)
    with pytest.raises(ValueError, match="target_tokenizer: got a tokenizer that cannot decode"):
        TextDrafter(model, draft_tokenizer, EncodeOnlyTokenizer())
    with pytest.raises(ValueError, match="got an encoder-decoder model; it must be a causal model"):
        TextDrafter(tiny_seq2seq("t5"), draft_tokenizer, target_tokenizer)
    with pytest.raises(ValueError, match="draft: got a TextDrafter, which does not see"):
        Decoder(tiny_seq2seq("whisper"), TextDrafter(model, draft_tokenizer, target_tokenizer))
    with pytest.raises(ValueError, match="is not the Decoder's tokenizer"):
        Decoder(model, TextDrafter(model, draft_tokenizer, target_tokenizer), draft_tokenizer)
    with pytest.raises(ValueError, match=r"whose tokenizer shares 0 of .*TextDrafter\(model"):
        Decoder(model, outpace.ModelDrafter(model, draft_tokenizer), target_tokenizer)
    with pytest.raises(ValueError, match=r"the target's tokenizer; outpace.TextDrafter\(model"):
        Decoder(model, tiny(vocab_size=2000))


def test_captures_do_not_count_as_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the default policy would take the model for slow, and stop drafting."""
    outcomes = list[StepOutcome]()

    class Recording(Fixed):
        def observe(self, done: StepOutcome) -> None:
            outcomes.append(done)

    drafting = decoder("bytes", "bytes", num_draft_tokens=Recording(2))
    drafting.generate(PROMPTS[0], GREEDY, max_new_tokens=8)
    assert all(done.seconds and not done.capture_seconds for done in outcomes)
    outcomes.clear()
    captured = itertools.count(step=100.0)
    monkeypatch.setattr(Scorer, "capture_seconds", property(lambda scorer: next(captured)))
    drafting.generate(PROMPTS[0], GREEDY, max_new_tokens=8)
    assert all(done.seconds is None and done.capture_seconds == 100 for done in outcomes if done.g)
    assert any(done.g for done in outcomes)


def test_a_draft_that_ran_out_of_memory_leaves_no_wrong_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target rejects a draft, and memory runs short after the model has processed what came instead."""
    model, drafter_tokenizer = tiny(seed=1, vocab_size=261), byte_tokenizer()
    drafter = TextDrafter(model, drafter_tokenizer, drafter_tokenizer)
    text, instead = (drafter_tokenizer(one).input_ids for one in ("the quick brown fox", " the lazy dog"))

    def propose(tokens: list[int]) -> None:
        seed, device = torch.tensor([0]), torch.device("cpu")
        drafter.propose(State([0], [tokens], [1], [GREEDY], seed, [4], 261, device), 4)

    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    propose(text)
    rejected = [*drafter._cached[0], 7]
    with monkeypatch.context() as patch:
        patch.setattr(CausalScorer, "score", fail)
        with pytest.raises(torch.OutOfMemoryError):
            propose([*text, *instead])
    drafter.reset([0])  # as the scheduler does
    found, expected = (one.prefill([0], [rejected]) for one in (drafter.scorer, CausalScorer(model)))
    assert torch.allclose(found, expected, atol=1e-5)

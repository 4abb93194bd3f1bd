"""A draft of another tokenizer helps, and changes nothing."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import Decoder, Fixed, SamplingParams, TextDrafter
from outpace.draft.language import TAIL, Language, Reading
from tests.statistical import test_decoder as matrix
from tests.tiny import byte_tokenizer, letter_tokenizer, tiny, tiny_seq2seq, trained, trained_tokenizer

TEXT = (
    "Le café est à côté de la forêt, où l'été dure. 東京の春は短い。 "
    "Wer früh übt, der hört später auf, 🐢🐇 und 12345 ist weniger als 67890. "
)
KINDS = {"bytes": ("bytes", 300), "words": ("bytes", 400), "pieces": ("pieces", 350)}
PAIRS = list(itertools.product(KINDS, repeat=2))
SURE = SamplingParams(temperature=0)
PROMPTS = ["Le café est", "東京の", "Wer früh übt, der", "12345 ist"]


@lru_cache
def tokenizer(name: str) -> Any:
    kind, size = KINDS[name]
    return trained_tokenizer(kind, TEXT, size)


@lru_cache
def knowing(name: str) -> Any:
    """A model that knows the text by heart, in tokens of its own."""
    ids = tokenizer(name)(TEXT * 6).input_ids
    return trained(ids, len(tokenizer(name)), max_position_embeddings=512)


def decoder(target: str, draft: str, model: Any = None, **options: Any) -> Decoder:
    drafter = TextDrafter(model or knowing(draft), tokenizer(draft), tokenizer(target))
    return Decoder(knowing(target), drafter, tokenizer(target), **options)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_greedy_texts_are_plain_decodings_and_most_guesses_are_kept(target: str, draft: str) -> None:
    plain = Decoder(knowing(target), None, tokenizer(target))
    expected = plain.generate(PROMPTS, SURE, max_new_tokens=32)
    outs = decoder(target, draft, num_draft_tokens=4).generate(PROMPTS, SURE, max_new_tokens=32, batch_size=3)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    drafted, accepted = (
        sum(getattr(out.stats, name) for out in outs) for name in ("draft_tokens", "accepted_tokens")
    )
    print(f"{target} by {draft}: {accepted} of {drafted} kept")
    # A draft of whole words has never seen the parts that a finer target's text may end in.
    kept, share = (0.9, 0.6) if target == draft else (0.3, 0.3) if draft == "words" else (0.6, 0.5)
    assert accepted > kept * drafted
    assert accepted > share * sum(out.stats.new_tokens for out in outs)


@pytest.mark.parametrize(("target", "draft"), [("bytes", "pieces"), ("pieces", "words"), ("words", "bytes")])
def test_by_the_same_noise_the_text_is_plain_decodings(target: str, draft: str) -> None:
    warm = SamplingParams(temperature=1.5)
    plain = Decoder(knowing(target), None, tokenizer(target), rule="match")
    expected = plain.generate(PROMPTS, warm, seed=3, max_new_tokens=50)
    outs = decoder(target, draft, rule="match").generate(PROMPTS, warm, seed=3, max_new_tokens=50)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert 0 < sum(out.stats.accepted_tokens for out in outs) < sum(out.stats.draft_tokens for out in outs)


@pytest.mark.parametrize("draft", KINDS)
def test_random_bytes_are_no_obstacle(draft: str) -> None:
    """Most of what such a target writes is no text at all."""
    model, other = tiny(vocab_size=261), byte_tokenizer()
    prompts = [[100, 101, 200], [50], [60, 61, 62, 63]]
    expected = Decoder(model).generate(prompts, SURE, max_new_tokens=40)
    drafter = TextDrafter(tiny(seed=1, vocab_size=len(tokenizer(draft))), tokenizer(draft), other)
    outs = Decoder(model, drafter, num_draft_tokens=3).generate(prompts, SURE, max_new_tokens=40)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]


def test_the_matrix_tests_a_draft_that_is_kept_and_lost() -> None:
    outs = (
        matrix.Cell("text", length="f 3").decoder().generate(matrix.PROMPT, n=300, seed=1, max_new_tokens=5)
    )
    drafted, accepted = (
        sum(getattr(out.stats, name) for out in outs) for name in ("draft_tokens", "accepted_tokens")
    )
    assert 0.1 * drafted < accepted < 0.9 * drafted
    assert drafted > 300


@pytest.mark.parametrize("draft", KINDS)
def test_the_draft_reads_each_token_about_once(draft: str) -> None:
    fed = []
    model, target = knowing(draft), next(name for name in KINDS if name != draft)
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        prompt = TEXT * 2
        out = decoder(target, draft, num_draft_tokens=3).generate(prompt, SURE, max_new_tokens=100)
    finally:
        hook.remove()
    assert fed[0] <= len(tokenizer(draft)(prompt).input_ids) + 2, "the prompt, and the first new token"
    ratio = len(tokenizer(draft)(out.text).input_ids) / len(out.token_ids)
    assert sum(fed[1:]) < 3 * (3 + 1 + 1) * ratio * out.stats.target_passes, "guesses, and what replaced them"
    assert max(fed[1:]) < 30


def test_a_token_that_a_guess_cuts_short_is_left_out_unless_the_text_ends() -> None:
    ours, theirs = Language("ours", tokenizer("words")), Language("theirs", tokenizer("bytes"))
    drafter = TextDrafter(tiny(vocab_size=300), tokenizer("bytes"), tokenizer("words"))
    text = ours.encode("Le café est")
    reading = drafter._read(0, text)
    proposal = theirs.encode(" à côté d")
    assert drafter._translated(reading, text, proposal, 400) == ours.encode(" à côté")
    ended = [*proposal, tokenizer("bytes").eos_token_id, *proposal]
    whole = [*ours.encode(" à côté d"), tokenizer("words").eos_token_id]
    assert drafter._translated(reading, text, ended, 400) == whole
    assert drafter._translated(reading, text, ended, vocab_size=ours.encode(" à")[0]) == []


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_text_read_in_parts_is_encoded_as_a_whole(target: str, draft: str) -> None:
    ours, theirs = Language("ours", tokenizer(target)), Language("theirs", tokenizer(draft))
    reading = Reading(ours, theirs, {})
    ids = ours.encode(TEXT * 3)
    for end in range(1, len(ids) + 1):
        reading.take_in(ids[:end])
        seen = theirs.decode(reading.ids[len(theirs.start) :])
        assert (TEXT * 3).startswith(seen), "an incomplete character waits"
    assert len(reading._tail) < 3 * TAIL
    whole = theirs.encode(ours.decode(ids))
    assert reading.read == len(ids)
    assert reading.ids == [*theirs.start, *whole]


def test_special_tokens_are_read_by_name_or_left_out() -> None:
    ours, theirs = (Language(name, tokenizer(name)) for name in ("bytes", "pieces"))
    marks = ours.marks_in(theirs)
    end, turn = (tokenizer("bytes").convert_tokens_to_ids(one) for one in ("<|end|>", "<|turn|>"))
    assert marks == {
        end: tokenizer("pieces").eos_token_id,
        turn: tokenizer("pieces").convert_tokens_to_ids("<|turn|>"),
    }
    assert theirs.marks_in(ours).get(tokenizer("pieces").bos_token_id) is None
    reading = Reading(ours, theirs, marks)
    reading.take_in([turn, *ours.encode("Le café"), end, *ours.encode("東京"), ours.encode("春")[0]])
    names = tokenizer("pieces").convert_ids_to_tokens(reading.ids)
    assert names[:2] == ["<s>", "<|turn|>"]
    assert "".join(names[2:]).replace("▁", " ").split("</s>") == [" Le café", " 東京"]
    back = Reading(theirs, ours, theirs.marks_in(ours))
    back.take_in(tokenizer("pieces")("Le café").input_ids)
    assert ours.decode(back.ids) == "Le café"


@pytest.mark.parametrize(("target", "draft"), [("bytes", "pieces"), ("pieces", "bytes")])
def test_the_end_of_a_text_is_guessed(target: str, draft: str) -> None:
    def ending(name: str) -> Any:
        one = tokenizer(name)
        ids = [*one("Le café est là.").input_ids, one.eos_token_id]
        model = trained(ids * 8, len(one), steps=80)
        model.generation_config.eos_token_id = one.eos_token_id
        return model

    model = ending(target)
    drafter = TextDrafter(ending(draft), tokenizer(draft), tokenizer(target))
    out = Decoder(model, drafter, tokenizer(target), num_draft_tokens=12).generate(
        "Le", SURE, max_new_tokens=20
    )
    assert out.finish_reason == "stop"
    assert (out.text or "").strip() == "café est là."
    assert out.stats.accepted_tokens + out.stats.target_passes > len(out.token_ids), (
        "the end was a guess of the last call"
    )


def test_slots_are_used_again() -> None:
    prompts = PROMPTS * 3
    one = decoder("words", "pieces", num_draft_tokens=3)
    outs = one.generate(prompts, SURE, batch_size=2, max_new_tokens=20)
    again = one.generate(prompts, SURE, batch_size=5, max_new_tokens=20)
    plain = Decoder(knowing("words"), None, tokenizer("words"))
    expected = plain.generate(prompts, SURE, max_new_tokens=20)
    assert (
        [out.token_ids for out in outs]
        == [out.token_ids for out in again]
        == [out.token_ids for out in expected]
    )
    first, last = (sum(out.stats.accepted_tokens for out in some) for some in (outs[:4], outs[8:]))
    assert last >= 0.7 * first > 0


def test_a_draft_with_a_short_context_falls_silent() -> None:
    ids = tokenizer("pieces")(TEXT * 6).input_ids
    small = trained(ids, len(tokenizer("pieces")), steps=40, max_position_embeddings=64)
    out = decoder("words", "pieces", small, num_draft_tokens=3).generate(TEXT[:60], SURE, max_new_tokens=60)
    plain = Decoder(knowing("words"), None, tokenizer("words"))
    assert out.token_ids == plain.generate(TEXT[:60], SURE, max_new_tokens=60).token_ids
    assert 0 < out.stats.draft_tokens < 60


def test_a_draft_of_nan_guesses_nothing_and_recovers() -> None:
    small = trained(tokenizer("pieces")(TEXT * 6).input_ids, len(tokenizer("pieces")), steps=20)
    one = decoder("words", "pieces", small, num_draft_tokens=3)
    drafter: Any = one.drafter
    weight = small.model.norm.weight
    healthy = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    assert one.generate(TEXT[:60], SURE, max_new_tokens=10).stats.draft_tokens == 0
    with torch.no_grad():
        weight.copy_(healthy)
    drafter.forget()
    assert one.generate(TEXT[:60], SURE, max_new_tokens=10).stats.draft_tokens > 0


def test_load_drafts_through_text_where_tokenizers_differ(tmp_path: Path) -> None:
    for name in ("words", "pieces"):
        knowing(name).save_pretrained(tmp_path / name)
        tokenizer(name).save_pretrained(tmp_path / name)
    said: list[str] = []
    folders = tmp_path / "words", tmp_path / "pieces"
    options: Any = {"device": "cpu", "dtype": "float32", "pack": True, "num_draft_tokens": 4}
    one = outpace.load(*folders, **options, tell=said.append)
    assert any("its tokenizer is not the target's, so it drafts through text" in line for line in said)
    assert "drafter  TextDrafter, through text" in one.describe()
    out = one.generate(PROMPTS[0], SURE, max_new_tokens=30)
    assert out.stats.accepted_tokens > 5
    same = outpace.load(folders[0], folders[0], device="cpu", dtype="float32", tell=said.append)
    assert isinstance(same.drafter, outpace.ModelDrafter)


def test_transformers_generate_takes_it() -> None:
    model = knowing("words")
    ids = torch.tensor([tokenizer("words")("The").input_ids])
    settings = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    drafter = TextDrafter(knowing("bytes"), tokenizer("bytes"), tokenizer("words"))
    expected = model.generate(ids, **settings)
    assert model.generate(
        ids, custom_generate=outpace.generate, draft=drafter, tokenizer=tokenizer("words"), **settings
    ).equal(expected)
    assert model.generate(ids, custom_generate=outpace.generate, draft=drafter, **settings).equal(expected)


def test_an_engine_takes_its_guesses() -> None:
    one, other = (
        decoder("words", "pieces", engine=engine, num_draft_tokens=Fixed(3)) for engine in (True, False)
    )
    assert "TextDrafter drafts on the host" in one.describe()
    texts = [each.generate("The", temperature=0, max_new_tokens=16) for each in (one, other)]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].stats.accepted_tokens == texts[1].stats.accepted_tokens > 0


class Mute:
    """A tokenizer that only encodes."""

    def __call__(self, text: str) -> Any: ...

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def decode(self, ids: list[int]) -> str:
        raise LookupError("no text")


def test_what_cannot_work_is_refused_in_a_line() -> None:
    model, ours, theirs = tiny(vocab_size=4), letter_tokenizer("a", "b"), letter_tokenizer("b", "a", "c", "d")
    with pytest.raises(TypeError, match="target_tokenizer: got NoneType None; TextDrafter needs both"):
        TextDrafter(model, ours, None)
    with pytest.raises(ValueError, match="target_tokenizer: it cannot decode"):
        TextDrafter(model, ours, Mute())
    with pytest.raises(ValueError, match="an encoder-decoder model cannot draft through text"):
        TextDrafter(tiny_seq2seq("t5"), ours, theirs)
    with pytest.raises(ValueError, match="drafter: TextDrafter goes by the target's text"):
        Decoder(tiny_seq2seq("whisper"), TextDrafter(model, ours, theirs))
    with pytest.raises(ValueError, match="is not the Decoder's tokenizer"):
        Decoder(model, TextDrafter(model, ours, theirs), ours)
    with pytest.raises(ValueError, match=r"its tokenizer is another one.*TextDrafter\(model"):
        Decoder(model, outpace.ModelDrafter(model, ours), theirs)
    with pytest.raises(ValueError, match=r"their tokenizers differ; outpace.TextDrafter\(model"):
        Decoder(model, tiny(vocab_size=2000))

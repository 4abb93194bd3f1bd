"""All forms of a prompt give the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from outpace import Decoder, Fixed, Output, Source
from outpace.cli.generate import encode
from tests.tiny import byte_tokenizer, greedy, greedy_of, sources, tiny, tiny_seq2seq

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
CHAT = "<system>Be short.<user>Hello<assistant>"
OPTIONS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}


def chat_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = "<end>"
    return tokenizer


TOKENIZER = chat_tokenizer()
MODEL = tiny(vocab_size=272)
DECODER = Decoder(MODEL, "lookup", TOKENIZER, num_draft_tokens=Fixed(2))


def generated(prompt: Any) -> Any:
    """Return the generated text of a prompt, or those of several prompts."""
    outs = DECODER.generate(prompt, **OPTIONS)
    return outs.text if isinstance(outs, Output) else [out.text for out in outs]


def test_messages_go_through_the_chat_template_as_in_the_cli() -> None:
    ids = TOKENIZER(CHAT).input_ids
    assert DECODER.encode(MESSAGES) == encode(DECODER, MESSAGES, None) == ids
    assert generated(MESSAGES) == generated(CHAT) == TOKENIZER.decode(greedy(MODEL, ids, 6))
    assert [generated(MESSAGES), generated("abc")] == generated([MESSAGES, "abc"])
    steps = list(DECODER.stream(MESSAGES, **OPTIONS))
    assert "".join(step.text or "" for step in steps) == generated(MESSAGES)


TEXTS = ["Hello, you", "Hi"]
IDS = [TOKENIZER(text).input_ids for text in TEXTS]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS[0],
        tuple(IDS[0]),
        iter(IDS[0]),
        [np.int64(token) for token in IDS[0]],
        list(torch.tensor(IDS[0])),
        torch.tensor(IDS[0]),
        torch.tensor(IDS[0], dtype=torch.int32),
        np.array(IDS[0]),
        np.array([IDS[0]]),
        torch.tensor([IDS[0]]),
        TOKENIZER(TEXTS[0]),
        TOKENIZER(TEXTS[0], return_tensors="pt"),
        TOKENIZER(TEXTS[0], return_tensors="np"),
        TOKENIZER(TEXTS[0], return_token_type_ids=True, return_special_tokens_mask=True),
        {"input_ids": IDS[0]},
        {"input_ids": torch.tensor([[7, 7, *IDS[0]]]), "attention_mask": torch.tensor([[0, 0] + [1] * 10])},
        BatchEncoding({"input_ids": [*IDS[0], 7], "attention_mask": [*[1] * 10, 0]}),
        {"input_ids": [7, *IDS[0]], "attention_mask": torch.tensor([0.0] + [1.0] * 10)},
        {"input_ids": torch.tensor([[7, *IDS[0]]]), "attention_mask": torch.tensor([[False] + [True] * 10])},
        np.str_(TEXTS[0]),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_one_prompt_in_any_form_gives_one_output(prompt: Any) -> None:
    if not hasattr(prompt, "__next__"):
        assert DECODER.encode(prompt) == IDS[0]
    assert generated(prompt) == generated(TEXTS[0])


def test_output_of_the_chat_template_is_a_prompt() -> None:
    for options in ({}, {"return_tensors": "pt"}, {"return_dict": False}):
        encoding = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, **options)
        assert generated(encoding) == generated(MESSAGES)
    both = TOKENIZER.apply_chat_template(
        [MESSAGES, MESSAGES[1:]], add_generation_prompt=True, return_tensors="pt", padding=True
    )
    assert (
        generated(both)
        == [generated(MESSAGES), generated(MESSAGES[1:])]
        == generated([MESSAGES, MESSAGES[1:]])
    )


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_padding_of_an_encoding_is_removed(padding_side: str, tensors: str | None) -> None:
    encoding = TOKENIZER(TEXTS, padding=True, padding_side=padding_side, return_tensors=tensors)
    assert DECODER.encode(encoding) == IDS
    assert generated(encoding) == generated(TEXTS)


@pytest.mark.parametrize(
    "prompts",
    [
        IDS,
        [torch.tensor(IDS[0]), torch.tensor([IDS[1]])],
        [TOKENIZER(TEXTS[0]), TOKENIZER(TEXTS[1], return_tensors="pt")],
        TOKENIZER(TEXTS),
        tuple(TEXTS),
        (text for text in TEXTS),
        np.array(TEXTS),
        [TEXTS[0], IDS[1]],
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_several_prompts_in_any_form_give_a_list(prompts: Any) -> None:
    assert generated(prompts) == [generated(text) for text in TEXTS]


def test_a_list_gives_a_list_and_a_tensor_of_one_row_an_output() -> None:
    same = [IDS[1], IDS[1]]
    assert generated([IDS[1]]) == [generated(IDS[1])]
    assert generated(TOKENIZER([TEXTS[1]])) == [generated(IDS[1])]
    assert generated(torch.tensor([IDS[1]])) == generated(IDS[1])
    assert generated(torch.tensor(same)) == generated(np.array(same)) == generated(same)
    assert generated(list(torch.tensor([IDS[1]]))) == [generated(IDS[1])]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (
            torch.zeros(1, 1, 2, dtype=torch.int64),
            ValueError,
            r"prompt: got shape \(1, 1, 2\); it must",
        ),
        (torch.tensor(3), ValueError, r"prompt: got shape \(\); it must be that of token ids \[n\]"),
        (np.zeros((0, 3), dtype=int), ValueError, r"prompt: got shape \(0, 3\)"),
        (torch.tensor([1.0, 2.0]), TypeError, "prompt: got torch.float32 values; token ids must be ints"),
        (torch.tensor([[1.0, 2.0]]), TypeError, "prompt: got torch.float32 values; token ids must be ints"),
        (np.array([1.5]), TypeError, "prompt: got float64 values; token ids must be ints"),
        (torch.tensor([True]), TypeError, "prompt: got torch.bool values; token ids must be ints"),
        ([1, 2.5], TypeError, "prompt: got float 2.5 at 1; token ids must be ints"),
        ([1, None], TypeError, "prompt: got NoneType None at 1; token ids must be ints"),
        ({1, 2}, TypeError, r"prompt: got set \{1, 2\}; it must be a string, messages"),
        (MESSAGES[0], TypeError, "prompt: got a single message; it must be a list of messages"),
        (
            [{"role": "user"}],
            ValueError,
            r"messages\[0\]: got \{'role': 'user'\}; it must be",
        ),
        ([MESSAGES[0], "Hello"], ValueError, r"messages\[1\]: got 'Hello'"),
        ([{"role": "user", "content": 3}], ValueError, r"messages\[0\]: got .* a string or list as content"),
        ({"ids": [1]}, ValueError, "prompt: got dict with keys ids; it must have input_ids"),
        ({}, ValueError, "prompt: got dict with no keys; it must have input_ids"),
        ({"input_ids": [1], "pixel_values": 1}, ValueError, "prompt: got the key pixel_values, which"),
        (
            {"input_ids": [1, 2], "attention_mask": [1]},
            ValueError,
            "attention_mask: got 1 values; it must have 2",
        ),
        (
            {"input_ids": [[1], [2]], "attention_mask": [[1]]},
            ValueError,
            "attention_mask: got 1 rows; it must have 2",
        ),
        (
            {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
            ValueError,
            "attention_mask: got 0 between",
        ),
        (
            "ab\ud800",
            ValueError,
            r"prompt: got '\\ud800' at 2, which is no character; it must be text in UTF-8",
        ),
        ([{"role": "user", "content": "\ud800"}], ValueError, r"messages\[0\]: got '\\ud800' at 0"),
        (
            {"input_ids": [1, 2], "attention_mask": [1, 2]},
            ValueError,
            "attention_mask: got a value other than 0 and 1",
        ),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, ValueError, "prompt: it is empty"),
    ],
)
def test_errors_say_what_is_wrong_with_a_prompt(prompt: Any, error: type[Exception], message: str) -> None:
    for method in (DECODER.generate, DECODER.encode, DECODER.stream):
        with pytest.raises(error, match=message):
            method(prompt)


def test_messages_need_a_tokenizer_and_a_template() -> None:
    with pytest.raises(ValueError, match="prompt: got messages, and the Decoder has no tokenizer; pass tok"):
        Decoder(MODEL).generate(MESSAGES)
    with pytest.raises(ValueError, match="got messages, and the tokenizer has no chat template; pass"):
        Decoder(MODEL, None, byte_tokenizer()).generate(MESSAGES)
    strict = chat_tokenizer()
    strict.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(ValueError, match=r"chat template rejects \(no system message\)"):
        Decoder(MODEL, None, strict).generate(MESSAGES)


def test_encoder_accepts_the_output_of_a_tokenizer() -> None:
    model = tiny_seq2seq("t5", vocab_size=272)
    decoder = Decoder(model, None, TOKENIZER)
    expected = [greedy_of(model, ids, 6) for ids in IDS]
    for prompts in (TEXTS, TOKENIZER(TEXTS, padding=True, return_tensors="pt"), [Source(ids) for ids in IDS]):
        assert [out.token_ids for out in decoder.generate(prompts, **OPTIONS)] == expected
    assert decoder.generate(TOKENIZER(TEXTS[1], return_tensors="pt"), **OPTIONS).token_ids == expected[1]
    assert decoder.encode(TEXTS) == IDS
    with pytest.raises(ValueError, match="prompt: got the key decoder_input_ids, which"):
        decoder.generate({"input_ids": IDS[0], "decoder_input_ids": [1]})


def test_speech_model_accepts_the_output_of_a_feature_extractor() -> None:
    model = tiny_seq2seq("whisper")
    decoder, (one, other) = Decoder(model), sources("whisper", 1, 2)
    expected = [greedy_of(model, features, 5) for features in (one, other)]
    options: dict[str, Any] = {**OPTIONS, "max_new_tokens": 5}
    for single in (one, one[None], one.numpy(), {"input_features": one[None]}):
        assert decoder.generate(single, **options).token_ids == expected[0]
    both = torch.stack([one, other])
    for several in (both, [one, other], {"input_features": both, "attention_mask": torch.ones(2, 40)}):
        assert [out.token_ids for out in decoder.generate(several, **options)] == expected
    with pytest.raises(TypeError, match="prompt: got str 'Hello'; it must be features of speech"):
        decoder.generate("Hello")
    with pytest.raises(TypeError, match="prompt: got features of speech; it must be text or token ids"):
        decoder.encode(one)


def test_parts_of_content_go_to_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    decoder = Decoder(tiny(vocab_size=272), None, tokenizer)
    assert decoder.encode([{"role": "user", "content": parts}]) == decoder.encode("abcd")

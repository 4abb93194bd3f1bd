from __future__ import annotations

import pytest

from outpace.engine.text import Detokenizer
from tests.tiny import byte_tokenizer

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st

TOKENIZER = byte_tokenizer()


def text_of(pieces: list[tuple[int, str]]) -> str:
    return "".join(text for _, text in pieces)


def push_all(text: str, stops: list[str]) -> tuple[Detokenizer, str, bool]:
    """Push the tokens of a text, up to a stop string.

    Returns:
        The detokenizer, all text that it returned, and whether a stop string was completed.
    """
    detokenizer, returned = Detokenizer(TOKENIZER, stops), ""
    for token in TOKENIZER(text).input_ids:
        stopped = detokenizer.push(token)
        returned += text_of(detokenizer.take(final=stopped))
        if stopped:
            return detokenizer, returned, True
    detokenizer.finish()
    return detokenizer, returned + text_of(detokenizer.take(final=True)), False


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("abcde é🙂", max_size=30), st.lists(st.text("abcdé", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_and_returned_text_never_changes(
    text: str, stops: list[str]
) -> None:
    detokenizer, returned, stopped = push_all(text, stops)
    assert stopped == any(stop in text for stop in stops)
    assert returned == detokenizer.text
    assert text.startswith(detokenizer.text)
    if stopped:
        assert not any(stop in detokenizer.text for stop in stops)
        assert any(text[len(detokenizer.text) :].startswith(stop) for stop in stops)
    else:
        assert detokenizer.text == text


def test_a_character_is_held_back_until_all_its_bytes_are_there() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    seen = []
    for token in TOKENIZER("🙂").input_ids:
        detokenizer.push(token)
        seen.append(text_of(detokenizer.take()))
    assert seen == ["", "", "", "🙂"]


def test_incomplete_character_is_returned_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    detokenizer.push(TOKENIZER("🙂").input_ids[0])
    detokenizer.finish()
    assert text_of(detokenizer.take(final=True)) == "\N{REPLACEMENT CHARACTER}"


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["##!"])
    seen = []
    for token in TOKENIZER("a##b").input_ids:
        detokenizer.push(token)
        seen.append(text_of(detokenizer.take()))
    assert seen == ["a", "", "", "##b"]


def test_each_piece_of_text_comes_with_its_token_index() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["cd"])
    for token in TOKENIZER("xy🙂c").input_ids:
        detokenizer.push(token)
    assert detokenizer.take() == [(0, "x"), (1, "y"), (5, "🙂")]
    detokenizer.push(TOKENIZER("e").input_ids[0])
    assert detokenizer.take() == [(6, "c"), (7, "e")]

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
    """Push a text's tokens, taking what is certain after each."""
    made, taken = Detokenizer(TOKENIZER, stops), ""
    for token in TOKENIZER(text).input_ids:
        stopped = made.push(token)
        taken += text_of(made.take(final=stopped))
        if stopped:
            return made, taken, True
    made.finish()
    return made, taken + text_of(made.take(final=True)), False


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("abcde é🙂", max_size=30), st.lists(st.text("abcdé", min_size=1, max_size=4), max_size=3))
def test_text_stops_where_a_stop_string_first_completes_and_nothing_is_taken_back(
    text: str, stops: list[str]
) -> None:
    made, taken, stopped = push_all(text, stops)
    assert stopped == any(stop in text for stop in stops)
    assert taken == made.text
    assert text.startswith(made.text)
    if stopped:
        assert not any(stop in made.text for stop in stops)
        assert any(text[len(made.text) :].startswith(stop) for stop in stops)
    else:
        assert made.text == text


def test_a_character_waits_for_all_its_bytes() -> None:
    made = Detokenizer(TOKENIZER)
    seen = []
    for token in TOKENIZER("🙂").input_ids:
        made.push(token)
        seen.append(text_of(made.take()))
    assert seen == ["", "", "", "🙂"]


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    made = Detokenizer(TOKENIZER)
    made.push(TOKENIZER("🙂").input_ids[0])
    made.finish()
    assert text_of(made.take(final=True)) == "\N{REPLACEMENT CHARACTER}"


def test_an_ending_that_may_become_a_stop_string_waits() -> None:
    made = Detokenizer(TOKENIZER, ["##!"])
    seen = []
    for token in TOKENIZER("a##b").input_ids:
        made.push(token)
        seen.append(text_of(made.take()))
    assert seen == ["a", "", "", "##b"]


def test_each_piece_of_text_comes_with_the_token_that_brought_it() -> None:
    made = Detokenizer(TOKENIZER, ["cd"])
    for token in TOKENIZER("xy🙂c").input_ids:
        made.push(token)
    assert made.take() == [(0, "x"), (1, "y"), (5, "🙂")]
    made.push(TOKENIZER("e").input_ids[0])
    assert made.take() == [(6, "c"), (7, "e")]

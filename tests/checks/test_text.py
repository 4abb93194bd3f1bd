"""Tokens are decoded as a call of the tokenizer decodes them, by a shorter way where there is one."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from outpace.checks.text import decoding
from tests.tiny import byte_tokenizer, trained_tokenizer

TEXT = "Le café est à côté. 東京の春は短い。 🐢 Do n't , you ?"
OPTIONS = [{}, *({name: value} for name in ("skip_special_tokens", "clean_up_tokenization_spaces")
                 for value in (False, True))]  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("cleans_up", [False, True])
def test_any_tokens_are_decoded_as_the_tokenizer_does(kind: str, cleans_up: bool) -> None:
    own = copy.deepcopy(trained_tokenizer(kind, TEXT, 350))
    own.clean_up_tokenization_spaces = cleans_up
    ids = own(TEXT).input_ids + own.all_special_ids
    for options, start, length in itertools.product(OPTIONS, range(len(ids)), (0, 1, 7)):
        tokens = ids[start : start + length]
        assert decoding(own, **options)(tokens) == own.decode(tokens, **options)


def test_a_decode_of_ones_own_is_called() -> None:
    class Shouting(type(byte_tokenizer())):  # type: ignore[misc]
        def decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super().decode(*args, **kwargs)).upper()

    ids = byte_tokenizer()("shout").input_ids
    own = copy.deepcopy(byte_tokenizer())
    own.__class__ = Shouting
    assert decoding(own)(ids) == "SHOUT"
    replaced = copy.deepcopy(byte_tokenizer())
    replaced.decode = lambda tokens: "replaced"
    assert decoding(replaced)(ids) == "replaced"

"""Conversion of text between the tokenizers of two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from outpace.checks.arguments import kind
from outpace.checks.text import REPLACEMENT_CHARACTER, decoding

WINDOW = 8  # tokens decoded before new tokens, since they affect the text of these
MAX_CHARACTER_BYTES = 4  # of UTF-8
TAIL = 32  # characters at a text's end whose tokens may change when the text grows
BEFORE = 8  # characters that are encoded together with the tail, since they affect its tokens
SAMPLE = "\t Aé1, 東京\n\n  don't"  # a text of all kinds of characters
NEUTRAL = ("\n", ".", "")  # contexts that share no token with the text after them


class TokenizerAdapter:
    """Converter between text and the tokens of one tokenizer.

    Args:
        name: Argument that the tokenizer came from, for error messages.
        tokenizer: A Transformers tokenizer.

    Attributes:
        size: One more than the largest token id.
        special: Ids of the special tokens.
        end: Id of end-of-text, or None.
        start: Tokens that every text starts with.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "get_vocab"):
            raise TypeError(f"{name}: got {kind(tokenizer)[:80]}; it must be a Transformers tokenizer")
        self.tokenizer = tokenizer
        self._text_of = decoding(tokenizer, clean_up_tokenization_spaces=False)
        self._backend = None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            expected, self._backend = self.encode(SAMPLE), tokenizer.backend_tokenizer
            if self.encode(SAMPLE) != expected:  # its calls do more than the backend
                self._backend = None
        ids = tokenizer.get_vocab().values()
        self.size = max(ids) + 1
        try:
            tokenizer.decode([min(ids)])
        except Exception as error:
            raise ValueError(
                f"{name}: got a tokenizer that cannot decode ({error!r:.80}); it must convert tokens to text"
            ) from error
        self.special = frozenset(tokenizer.all_special_ids)
        self.end: int | None = tokenizer.eos_token_id
        bos = tokenizer.bos_token_id
        self.start = [bos] if bos is not None and list(tokenizer("").input_ids[:1]) == [bos] else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens."""
        return self._text_of(list(tokens))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        fast, split = self._backend, getattr(self.tokenizer, "split_special_tokens", False)
        if (
            fast is not None
            and fast.truncation is None
            and fast.padding is None
            and fast.encode_special_tokens == split
        ):  # takes half as long as a call of Transformers' tokenizer, which may set all three
            return list(fast.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add to those before them.

        Many tokens are decoded differently at the start of a text.
        """
        return self.decode([*before, *tokens])[len(self.decode(before)) :]

    def encode_after(self, before: str, text: str, before_ids: Sequence[int] | None = None) -> list[int]:
        """Return the tokens of a text that follows another one.

        Both may be encoded together across their border, as "wor" and "ld". Then the second is encoded after
        a neutral text that is never encoded together with it.

        Args:
            before: The text before.
            text: The text to encode.
            before_ids: Tokens of ``before``, if they are known.
        """
        whole = self.encode(before + text)
        if before_ids is not None and whole[: len(before_ids)] == list(before_ids):
            return whole[len(before_ids) :]
        for context in (before, *NEUTRAL):
            context_ids = self.encode(context)
            whole = whole if context is before else self.encode(context + text)
            if whole[: len(context_ids)] == context_ids:
                return whole[len(context_ids) :]
        raise AssertionError("every text starts with the empty text")

    def special_tokens_in(self, other: TokenizerAdapter) -> dict[int, int]:
        """Return the special tokens by id, with the other tokenizer's ids for the same tokens."""
        names = {*other.tokenizer.all_special_tokens, *other.tokenizer.get_added_vocab()}
        special_map = {} if self.end is None or other.end is None else {self.end: other.end}
        for id in self.special:
            name = self.tokenizer.convert_ids_to_tokens(id)
            if name in names:
                special_map[id] = other.tokenizer.convert_tokens_to_ids(name)
        return special_map


class Retokenizer:
    """Growing text of the target, as tokens of the draft model.

    When the text grows, only its end is encoded again. That end starts where the tokens do not change.

    Attributes:
        num_read: Number of target tokens read, up to the last whole character.
        ids: Tokens of the draft model for them.
        origin: Index in ``ids`` where the text after the last special token begins.
    """

    def __init__(
        self, target: TokenizerAdapter, draft: TokenizerAdapter, special_map: Mapping[int, int]
    ) -> None:
        self._target, self._draft, self._special_map = target, draft, special_map
        self.num_read = 0
        self.ids = list(draft.start)
        self.origin = self._num_frozen = len(self.ids)
        self._text_start = 0  # index in the target's tokens after the last special one
        self._before, self._tail = "", ""  # text before ids[_num_frozen:], and text of them
        self._before_ids = list[int]()  # tokens of `_before`

    def update(self, tokens: Sequence[int]) -> None:
        """Read a text that extends the text of the last call."""
        while self.num_read < len(tokens):
            if tokens[self.num_read] in self._target.special:
                self._add_special(tokens[self.num_read])
                continue
            before = self._before_new(tokens)
            whole = self._last_whole_character(before, tokens)
            if whole == self.num_read:
                break
            self._tail += self._target.decode_after(before, tokens[self.num_read : whole])
            self.num_read = whole
        self._encode()

    def _last_whole_character(self, before: Sequence[int], tokens: Sequence[int]) -> int:
        """Return the end of the whole characters after ``num_read``.

        Before a special token it is the end of the text.

        Args:
            before: Tokens before them, which they are decoded with.
            tokens: All tokens of the text.
        """
        for end in range(self.num_read, len(tokens)):
            if tokens[end] in self._target.special:
                return end  # a character that is incomplete there stays incomplete
        for end in range(len(tokens), max(self.num_read, len(tokens) - WINDOW), -1):
            text = self._target.decode([*before, *tokens[self.num_read : end]])
            if not text.endswith(REPLACEMENT_CHARACTER):
                return end
        return self.num_read

    def _before_new(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return up to ``WINDOW`` tokens before the new ones, which begin with a whole character.

        Some tokenizers decode a run of bytes that begins within a character to nothing but replacements.
        """
        first = max(self._text_start, self.num_read - WINDOW)
        for start in range(first, min(first + MAX_CHARACTER_BYTES, self.num_read)):
            if REPLACEMENT_CHARACTER not in self._target.decode(tokens[start : self.num_read]):
                return tokens[start : self.num_read]
        return tokens[first : self.num_read]

    def _add_special(self, token: int) -> None:
        self._encode()
        special = self._special_map.get(token)
        self._before = self._tail = ""
        if special is not None:
            self._before = self._draft.decode([special])
            if self.ids != [special]:  # a start token that both have
                self.ids.append(special)
        self.num_read += 1
        self._text_start = self.num_read
        self.origin = self._num_frozen = len(self.ids)
        self._before_ids = self._draft.encode(self._before)

    def _encode(self) -> None:
        self.ids[self._num_frozen :] = self._draft.encode_after(self._before, self._tail, self._before_ids)

    def freeze(self) -> None:
        """Stop encoding text far from the end again, if that does not change the tokens of the rest.

        Optional after ``update``: it makes later updates cheaper.
        """
        frozen_chars = len(self._tail) - TAIL
        cut = self._tail.rfind(" ", 1, max(1, frozen_chars))
        if cut < 0 and frozen_chars < TAIL:
            return
        cut = frozen_chars if cut < 0 else cut  # within a long word
        before, tail = (self._before + self._tail[:cut])[-BEFORE:], self._tail[cut:]
        tail_ids = self._draft.encode_after(before, tail)
        num_frozen = len(self.ids) - len(tail_ids)
        if num_frozen > self._num_frozen and self.ids[num_frozen:] == tail_ids:
            self._num_frozen, self._before, self._tail = num_frozen, before, tail
            self._before_ids = self._draft.encode(before)

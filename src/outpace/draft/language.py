"""Conversion of text between the tokenizers of two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.checks.arguments import kind
from outpace.checks.text import BROKEN

WINDOW = 8  # tokens before a border that decide how the text after it is decoded
TAIL = 64  # characters at a text's end that later ones may be encoded together with
NEUTRAL = ("\n", ".", "")  # texts that another one can follow without being encoded together


class Language:
    """Tokenizer, as a converter between text and tokens.

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
            raise TypeError(f"{name}: got {kind(tokenizer)[:80]}; TextDrafter needs both models' tokenizers")
        self.tokenizer = tokenizer
        ids = tokenizer.get_vocab().values()
        self.size = max(ids) + 1
        try:
            tokenizer.decode([min(ids)])
        except Exception as error:
            raise ValueError(
                f"{name}: it cannot decode ({error!r:.80}), so its tokens have no text"
            ) from error
        self.special = frozenset(tokenizer.all_special_ids)
        self.end: int | None = tokenizer.eos_token_id
        bos = tokenizer.bos_token_id
        self.start = [bos] if bos is not None and list(tokenizer("").input_ids[:1]) == [bos] else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens."""
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def grown(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add to those before them.

        Many tokens are decoded differently at the start of a text.
        """
        return self.decode([*before, *tokens])[len(self.decode(before)) :]

    def continued(self, before: str, text: str) -> list[int]:
        """Return the tokens of a text that follows another one.

        Both may be encoded together across their border, as "wor" and "ld". Then the second is encoded after
        a neutral text, which it has a border with.
        """
        for anchor in (before, *NEUTRAL):
            known, whole = self.encode(anchor), self.encode(anchor + text)
            if whole[: len(known)] == known:
                return whole[len(known) :]
        raise AssertionError("nothing is the beginning of everything")

    def marks_in(self, other: Language) -> dict[int, int]:
        """Return the special tokens by id, with the other tokenizer's ids for the same tokens."""
        names = {*other.tokenizer.all_special_tokens, *other.tokenizer.get_added_vocab()}
        marks = {} if self.end is None or other.end is None else {self.end: other.end}
        for id in self.special:
            name = self.tokenizer.convert_ids_to_tokens(id)
            if name in names:
                marks[id] = other.tokenizer.convert_tokens_to_ids(name)
        return marks


class Reading:
    """Growing text of the target, as tokens of the draft model.

    When the text grows, only its end is encoded again. It starts where that makes no difference.

    Attributes:
        read: Number of target tokens read, up to the last whole character.
        ids: Tokens of the draft model for them.
        origin: Index in ``ids`` where the text after the last special token begins.
    """

    def __init__(self, target: Language, draft: Language, marks: Mapping[int, int]) -> None:
        self._target, self._draft, self._marks = target, draft, marks
        self.read = 0
        self.ids = list(draft.start)
        self.origin = self._settled = len(self.ids)
        self._begun = 0  # index in the target's tokens after the last special one
        self._before, self._tail = "", ""  # text before ids[settled:], and text of them

    def take_in(self, tokens: Sequence[int]) -> None:
        """Read the new tokens of a text that begins as the last one did."""
        while self.read < len(tokens):
            if tokens[self.read] in self._target.special:
                self._mark(tokens[self.read])
                continue
            whole = self._whole(tokens)
            if whole == self.read:
                break
            before = tokens[max(self._begun, self.read - WINDOW) : self.read]
            self._tail += self._target.grown(before, tokens[self.read : whole])
            self.read = whole
        self._encode()
        self._settle()

    def _whole(self, tokens: Sequence[int]) -> int:
        """Return the end of the whole characters after ``read``, or of the text before a special token."""
        for end in range(self.read, len(tokens)):
            if tokens[end] in self._target.special:
                return end  # what is incomplete there stays so
        first = max(self._begun, self.read - WINDOW)
        for end in range(len(tokens), max(self.read, len(tokens) - WINDOW), -1):
            if not self._target.decode(tokens[first:end]).endswith(BROKEN):
                return end
        return self.read

    def _mark(self, token: int) -> None:
        self._encode()
        mark = self._marks.get(token)
        self._before = self._tail = ""
        if mark is not None:
            self._before = self._draft.decode([mark])
            if self.ids != [mark]:  # a start token that both have
                self.ids.append(mark)
        self.read += 1
        self._begun = self.read
        self.origin = self._settled = len(self.ids)

    def _encode(self) -> None:
        self.ids[self._settled :] = self._draft.continued(self._before, self._tail)

    def _settle(self) -> None:
        """Stop encoding text far from the end again, if the rest alone is encoded as it is now."""
        far = len(self._tail) - TAIL
        if far < TAIL:
            return
        cut = max(self._tail.rfind(" ", 0, far), 0) or far
        before, tail = (self._before + self._tail[:cut])[-TAIL:], self._tail[cut:]
        rest = self._draft.continued(before, tail)
        settled = len(self.ids) - len(rest)
        if settled > self._settled and self.ids[settled:] == rest:
            self._settled, self._before, self._tail = settled, before, tail

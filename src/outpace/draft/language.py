"""Text between two tokenizers: what one wrote, as the other reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.arguments import kind
from outpace.text import BROKEN

WINDOW = 8  # tokens before a border that decide how a text is written after it
TAIL = 64  # characters at a text's end that later ones may be encoded together with
NEUTRAL = ("\n", ".", "")  # what a text can follow without being encoded together with it


class Language:
    """A tokenizer as a way between text and tokens."""

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
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def grown(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that tokens add to what is before them: many are written differently at a beginning."""
        return self.decode([*before, *tokens])[len(self.decode(before)) :]

    def continued(self, before: str, text: str) -> list[int]:
        """Tokens of a text after another one.

        Where both would be encoded together across their border, as "wor" and "ld", the second is encoded
        after something that it has a border with.
        """
        for anchor in (before, *NEUTRAL):
            known, whole = self.encode(anchor), self.encode(anchor + text)
            if whole[: len(known)] == known:
                return whole[len(known) :]
        raise AssertionError("nothing is the beginning of everything")

    def marks_in(self, other: Language) -> dict[int, int]:
        """Special tokens by id, and the other's ids for the same."""
        names = {*other.tokenizer.all_special_tokens, *other.tokenizer.get_added_vocab()}
        marks = {} if self.end is None or other.end is None else {self.end: other.end}
        for id in self.special:
            name = self.tokenizer.convert_ids_to_tokens(id)
            if name in names:
                marks[id] = other.tokenizer.convert_tokens_to_ids(name)
        return marks


class Reading:
    """A growing text of the target's, as the draft's tokens.

    Only its end is encoded again when it grows, from where that makes no difference.

    read    the target's tokens taken in, up to the last whole character
    ids     the draft's tokens for them
    origin  where in ids the text after the last special token begins
    """

    def __init__(self, target: Language, draft: Language, marks: Mapping[int, int]) -> None:
        self._target, self._draft, self._marks = target, draft, marks
        self.read = 0
        self.ids = list(draft.start)
        self.origin = self._settled = len(self.ids)
        self._begun = 0  # where among the target's tokens the text after the last special one begins
        self._before, self._tail = "", ""  # text that ends before, and of, ids[settled:]

    def take_in(self, tokens: Sequence[int]) -> None:
        """Read on in a text that begins as the last one did."""
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
        """How far the tokens after `read` make whole characters, or up to a special one."""
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
            if self.ids != [mark]:  # a beginning that both have
                self.ids.append(mark)
        self.read += 1
        self._begun = self.read
        self.origin = self._settled = len(self.ids)

    def _encode(self) -> None:
        self.ids[self._settled :] = self._draft.continued(self._before, self._tail)

    def _settle(self) -> None:
        """Leave behind what is far from the end, if the rest alone is encoded as it is now."""
        far = len(self._tail) - TAIL
        if far < TAIL:
            return
        cut = max(self._tail.rfind(" ", 0, far), 0) or far
        before, tail = (self._before + self._tail[:cut])[-TAIL:], self._tail[cut:]
        rest = self._draft.continued(before, tail)
        settled = len(self.ids) - len(rest)
        if settled > self._settled and self.ids[settled:] == rest:
            self._settled, self._before, self._tail = settled, before, tail

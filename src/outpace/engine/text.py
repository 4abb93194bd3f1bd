"""Incremental detokenization, with stop strings found across token borders."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.checks.text import REPLACEMENT_CHARACTER, check_text, decoding

PARTS = ("role", "content")  # keys of a message


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a conversation, as the chat template formats it for the model's answer.

    The content of a message is a string or a list of parts. With ``tool_calls`` it may be missing.
    """
    for index, message in enumerate(messages):
        role, content = (message.get(name) if isinstance(message, Mapping) else None for name in PARTS)
        structured = isinstance(content, list) or (isinstance(message, Mapping) and "tool_calls" in message)
        if not isinstance(role, str) or not (isinstance(content, str) or structured):
            raise ValueError(
                f"messages[{index}]: got {f'{message!r}'[:80]}; it must be "
                '{"role": "user", "content": "..."}, with a string as role and a string or list as content'
            )
        if isinstance(content, str):
            check_text(f"messages[{index}]", content)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "prompt: got messages, and the tokenizer has no chat template; pass a string, or set "
            "tokenizer.chat_template first"
        )
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates may raise anything
        raise ValueError(
            f"prompt: got messages that the chat template rejects ({error}); they must fit the template"
        ) from error
    return list(ids)


class Detokenizer:
    """The text of one sequence's new tokens.

    Only text that no later token can change is returned. An incomplete character is held back, and so is an
    ending that may become a stop string.

    Args:
        tokenizer: The target's tokenizer.
        stops: Stop strings.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.text = ""  # whole characters so far, cut before a stop string
        self._text_of, self._stops = decoding(tokenizer, skip_special_tokens=True), stops
        self._tokens: list[int] = []
        # Decoding starts at an earlier token, as many tokenizers write the first token of a text differently.
        self._from, self._done = 0, 0
        self._returned = 0  # characters that `take` has returned
        self._ends: deque[tuple[int, int]] = deque()  # where the text of a token ends, and the token's index

    def push(self, token: int) -> bool:
        """Add a token and return whether a stop string is now complete.

        The stop string is cut from the text.
        """
        self._tokens.append(token)
        before, after = self._decode(self._from, self._done), self._decode(self._from)
        if len(after) <= len(before) or after.endswith(REPLACEMENT_CHARACTER):
            return False
        self._from, self._done = self._done, len(self._tokens)
        return self._add(after[len(before) :])

    def finish(self) -> None:
        """Add an incomplete character as it is, since no token follows."""
        before, after = self._decode(self._from, self._done), self._decode(self._from)
        self._add(after[len(before) :])

    def take(self, final: bool = False) -> list[tuple[int, str]]:
        """Return the text that no later token can change and that was not returned yet, in pieces.

        Each piece comes with the index of the token that completed it, counted from the first new token.

        Args:
            final: Whether no token follows, so that nothing is held back.
        """
        held_back = 0 if final else max((_partial_stop(self.text, stop) for stop in self._stops), default=0)
        end = max(self._returned, len(self.text) - held_back)
        pieces = []
        while self._returned < end:
            until, token = self._ends[0]
            pieces.append((token, self.text[self._returned : min(until, end)]))
            self._returned = min(until, end)
            if until <= end:
                self._ends.popleft()
        return pieces

    def _add(self, new: str) -> bool:
        old = len(self.text)
        self.text += new
        if new:
            self._ends.append((len(self.text), len(self._tokens) - 1))
        found = [self.text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        starts = [start for start in found if start >= 0]
        if starts:
            self.text = self.text[: min(starts)]
        return bool(starts)

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._text_of(self._tokens[start:end])


def _partial_stop(text: str, stop: str) -> int:
    """Return the length of the longest ending of the text that is a prefix of a stop string."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

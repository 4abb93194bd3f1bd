"""Prompts of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.engine.text import chat_ids

BUILT_IN, FROM_FLAG = "built-in", "--prompt"  # names of prompts that no file holds

# The default: a few prompts of every kind. Some ask to repeat words of the prompt.
BUILT_IN_PROMPTS = (
    ("story", "Write a short story about a keeper of a lighthouse who finds a message in a bottle."),
    ("story", "Describe a market in a small town on a rainy morning."),
    ("question", "Why is the sky blue at noon and red at sunset?"),
    ("question", "How do vaccines teach the body to fight an illness?"),
    ("code", "Write a Python function that returns the n-th Fibonacci number, with a docstring and a test."),
    ("code", "Write a Python class Stack with push, pop, peek and is_empty, and show how to use it."),
    (
        "edit",
        "Repeat this list with every item in capitals: apples, pears, plums, cherries, figs, nuts.",
    ),
    (
        "edit",
        "Correct the spelling and repeat the whole text: The contry lane was quite, and the old huose stood "
        "at its end. Nobody had lived their for years. The windows of the old huose were broken, and grass "
        "grew on the contry lane.",
    ),
    (
        "summary",
        "Summarize in two sentences: The town council met on Tuesday to discuss the new bridge. The old "
        "bridge, built in 1931, has been closed since a flood in March damaged two of its piers. Engineers "
        "told the council that a repair would cost nearly as much as a new bridge and last half as long. "
        "The council voted to ask for offers for a new bridge, which is to have a lane for bicycles.",
    ),
    ("summary", "List the main events of a day at school, then summarize the list in one sentence."),
    (
        "maths",
        "A train covers 180 kilometres in 2 hours and a quarter. How fast is it? Show each step.",
    ),
    ("maths", "Anna has 3 boxes of 24 pencils and gives away 17 pencils. How many are left? Show each step."),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the kind of text that it asks for."""

    ids: list[int]
    domain: str


@dataclass(frozen=True)
class PromptSet:
    """Texts of prompts, before they are tokenized.

    Attributes:
        texts: Kind and text of each prompt.
        name: The file or data set that they are from, ``"built-in"``, or ``"--prompt"``.
        left_out: Rows that cannot be used: the place of each, and the reason.
    """

    texts: Sequence[tuple[str, str]]
    name: str | None = None
    left_out: Sequence[str] = ()

    def to(self, tokenizer: Any) -> list[Prompt]:
        """Return the prompts as token ids; with a chat template, each is a user's message."""
        return [Prompt(_ids(tokenizer, text), domain) for domain, text in self.texts]

    @property
    def rows(self) -> int:
        """Number of rows, including those left out."""
        return len(self.texts) + len(self.left_out)

    @property
    def about(self) -> dict[str, Any] | None:
        """Description for the results; None where the origin of the texts is unknown."""
        if self.name is None:
            return None
        return {"name": self.name, "rows": self.rows, "left_out": len(self.left_out)}


def prompt_set(
    texts: Sequence[str] = (), data: str | None = None, limit: int | None = None, every: int = 1
) -> PromptSet:
    """Return prompts from texts, from a file or data set, or the built-in ones.

    Args:
        texts: Texts of prompts.
        data: A file or data set, read as by ``outpace eval``.
        limit: Maximum number of prompts.
        every: Take only every n-th prompt, from the first on.
    """
    if data is None:
        rows = [("prompt", text) for text in texts] or list(BUILT_IN_PROMPTS)
        return PromptSet(rows[::every][:limit], FROM_FLAG if texts else BUILT_IN)
    from outpace.bench.data import category, read

    found = read(data, limit=limit, every=every)
    found.check()
    name = Path(data).name if found.local else data
    usable = [(category(one), one.turns[0]) for one in found.items if one.problem is None]
    return PromptSet(usable, name, found.left_out)


def tokenized_prompts(
    tokenizer: Any,
    texts: Sequence[str] = (),
    data: str | None = None,
    limit: int | None = None,
    every: int = 1,
) -> list[Prompt]:
    """Return the prompts of ``prompt_set`` as token ids."""
    return prompt_set(texts, data, limit, every).to(tokenizer)


def _ids(tokenizer: Any, text: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        return chat_ids(tokenizer, [{"role": "user", "content": text}])
    return list(tokenizer(text).input_ids)

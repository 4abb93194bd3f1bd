"""Pieces of sentences that several rooms say: counts, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def too_few(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'} too few"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean "lookup"?` for a name close to a known one, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""

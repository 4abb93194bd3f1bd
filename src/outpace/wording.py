"""Pieces of sentences that several rooms say: counts, small numbers, suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from decimal import Decimal


def counted(number: int, noun: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def too_few(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'} too few"


def small(value: float) -> str:
    """Return 0.093 for 0.0932, and 0.000068 for 6.8e-5: at least two digits that count."""
    return f"{value:.3f}" if value >= 0.01 else format(Decimal(f"{value:.2g}"), "f")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean "lookup"?` for a name close to a known one, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""

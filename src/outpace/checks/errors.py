"""Text of error messages: ranges, suggestions for misspelt names, missing packages.

This module imports nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

LARGEST = 1e30  # a logit times or divided by this stays finite in float32

Range = tuple[str, Callable[[float], bool]]
"""A description of the allowed values, and a test of a number."""

RANGES: dict[str, Range] = {
    "temperature": (
        "0 (greedy) or a number from 1e-30 to 1e30",
        lambda t: t == 0 or 1 / LARGEST <= t <= LARGEST,
    ),
    "top_k": ("an int >= 0 (0 keeps all)", lambda k: k >= 0),
    "top_p": ("a number between 0 and 1", lambda p: 0 <= p <= 1),
    "min_p": ("a number between 0 and 1", lambda p: 0 <= p <= 1),
    "repetition_penalty": ("a number from 1e-30 to 1e30", lambda r: 1 / LARGEST <= r <= LARGEST),
    "frequency_penalty": ("a number from -1e30 to 1e30", lambda f: abs(f) <= LARGEST),
    "presence_penalty": ("a number from -1e30 to 1e30", lambda f: abs(f) <= LARGEST),
    "logit_bias": ("a number from -1e30 to 1e30, or -inf", lambda b: abs(b) <= LARGEST or b == -math.inf),
    "lenience": ("a number in (0, 1]", lambda l: 0 < l <= 1),
    "seed": ("an int in -2**63..2**64-1", lambda s: -(2**63) <= s < 2**64),
    "first seed": ("an int in -2**63..2**63-1", lambda s: -(2**63) <= s < 2**63),  # others count up from it
}


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 prompt``, ``2 prompts``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def too_few(number: int, noun: str) -> str:
    """Return a clause about too few things: ``1 prompt is too few``."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'} too few"


def format_small(value: float) -> str:
    """Return a number with two or more significant digits: 0.093 for 0.0932, 0.000068 for 6.8e-5."""
    return f"{value:.3f}" if value >= 0.01 else format(Decimal(f"{value:.2g}"), "f")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean "lookup"?`` for a name close to a known one, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


def import_extra(package: str, extra: str) -> Any:
    """Import a package and return it.

    Raises:
        ImportError: The package is missing. The error names the extra to install.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"this needs {package}: pip install 'outpace[{extra}]'") from error

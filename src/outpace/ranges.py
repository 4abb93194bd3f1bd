"""Ranges of numbers that users give, for arguments and flags alike. Nothing heavy is imported here."""

from __future__ import annotations

import math
from collections.abc import Callable

LARGEST = 1e30  # logits times or divided by it stay finite in float32

Range = tuple[str, Callable[[float], bool]]
"""What fits, in words, and whether a number does."""

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
    "first seed": ("an int in -2**63..2**63-1", lambda s: -(2**63) <= s < 2**63),  # others follow it
}

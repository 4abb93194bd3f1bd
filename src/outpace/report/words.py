"""Values in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.checks.errors import small

LEVEL = 0.05  # values no further apart than this, as a share of the largest, are called level

# Settings that change nothing.
NEUTRAL = {
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
}


def said(value: Any, form: str = "") -> str:
    """Return a value as a cell; a dash for what was not measured.

    Args:
        value: The value.
        form: Format of numbers. "ms" has one digit after the point below 1000, and "small" two significant
            digits.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if form == "small":
        return small(value)
    if form == "ms":
        form = ".0f" if value >= 1000 else ".1f"
    if isinstance(value, float) or (isinstance(value, int) and form):
        return format(value, form or (".3g" if abs(value) < 1000 else ".0f"))
    return str(value)


def between(interval: Sequence[float] | None, form: str) -> str:
    """Return an interval in words."""
    return " to ".join(said(end, form) for end in interval) if interval else "–"


def with_interval(value: Any, interval: Sequence[float] | None, form: str) -> str:
    """Return a figure with its own interval: "1.14 (1.05–1.24)"."""
    if value is None or not interval:
        return said(value, form)
    dash = " to " if min(interval) < 0 else "–"
    return f"{said(value, form)} ({dash.join(said(end, form) for end in interval)})"


def course(y: Sequence[float]) -> str:
    """Return how a line goes: level, rising, falling, or none of these."""
    values = [one for one in y if not math.isnan(one)]
    low, high = min(values), max(values)
    steps = [b - a for a, b in itertools.pairwise(values)]
    if high - low <= LEVEL * max(abs(low), abs(high)):
        return f"is level within {LEVEL:.0%}"
    if all(step > 0 for step in steps):
        return "rises at every point"
    if all(step < 0 for step in steps):
        return "falls at every point"
    return "neither rises nor falls throughout"


def short(name: str | None, most: int = 24) -> str:
    """Return the last part of a model's name, for a legend."""
    last = (name or "none").rstrip("/").rsplit("/", 1)[-1].lstrip("_")  # matplotlib hides what starts with _
    return last if len(last) <= most else last[: most - 1] + "…"


def sampled(settings: Mapping[str, Any]) -> str:
    """Return sampling parameters in words."""
    if settings.get("temperature") == 0:
        return "greedy"
    there = {name: one for name, one in settings.items() if one is not None and one != NEUTRAL.get(name, "")}
    return ", ".join(f"{name.replace('_', '-')} {said(one)}" for name, one in there.items()) or "sampled"

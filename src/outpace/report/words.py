"""Values in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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
    """A cell, with numbers in this form; a dash for what was not measured."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) or (isinstance(value, int) and form):
        return format(value, form or ".3g")
    return str(value)


def between(interval: Sequence[float] | None, form: str) -> str:
    return " to ".join(said(end, form) for end in interval) if interval else "–"


def short(name: str | None, most: int = 24) -> str:
    """The last part of a model's name, for a legend."""
    last = (name or "none").rstrip("/").rsplit("/", 1)[-1].lstrip("_")  # matplotlib hides what starts with _
    return last if len(last) <= most else last[: most - 1] + "…"


def sampled(settings: Mapping[str, Any]) -> str:
    """How texts were drawn."""
    if settings.get("temperature") == 0:
        return "greedy"
    there = {name: one for name, one in settings.items() if one is not None and one != NEUTRAL.get(name, "")}
    return ", ".join(f"{name.replace('_', '-')} {said(one)}" for name, one in there.items()) or "sampled"

"""Values in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.checks.errors import format_small

LEVEL_TOLERANCE = 0.05  # fraction of the largest value; a line that varies less is called level

# Settings that change nothing.
NEUTRAL = {
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
}


def format_value(value: Any, spec: str = "") -> str:
    """Return a value as a cell; a dash for a missing value.

    Args:
        value: The value.
        spec: Format of numbers. "ms" has one digit after the point below 1000, and "small" two significant
            digits.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if spec == "small":
        return format_small(value)
    if spec == "ms":
        spec = ".0f" if value >= 1000 else ".1f"
    if isinstance(value, float) or (isinstance(value, int) and spec):
        return format(value, spec or (".3g" if abs(value) < 1000 else ".0f"))
    return str(value)


def format_interval(interval: Sequence[float] | None, spec: str) -> str:
    """Return an interval in words: "1.05 to 1.24"."""
    return " to ".join(format_value(bound, spec) for bound in interval) if interval else "–"


def with_interval(value: Any, interval: Sequence[float] | None, spec: str) -> str:
    """Return a value with its interval: "1.14 (1.05–1.24)"."""
    if value is None or not interval:
        return format_value(value, spec)
    dash = " to " if min(interval) < 0 else "–"
    return f"{format_value(value, spec)} ({dash.join(format_value(bound, spec) for bound in interval)})"


def describe_trend(y: Sequence[float]) -> str:
    """Return whether a line is level, rises, falls, or none of these."""
    values = [value for value in y if not math.isnan(value)]
    low, high = min(values), max(values)
    changes = [after - before for before, after in itertools.pairwise(values)]
    if high - low <= LEVEL_TOLERANCE * max(abs(low), abs(high)):
        return f"is level within {LEVEL_TOLERANCE:.0%}"
    if all(change > 0 for change in changes):
        return "rises at every point"
    if all(change < 0 for change in changes):
        return "falls at every point"
    return "neither rises nor falls throughout"


def short_name(name: str | None, max_chars: int = 24) -> str:
    """Return the last part of a model's name, for a legend."""
    last = (name or "none").rstrip("/").rsplit("/", 1)[-1].lstrip("_")  # matplotlib hides labels with _ first
    return last if len(last) <= max_chars else last[: max_chars - 1] + "…"


def describe_sampling(settings: Mapping[str, Any]) -> str:
    """Return sampling parameters in words."""
    if settings.get("temperature") == 0:
        return "greedy"
    active = {
        name: value
        for name, value in settings.items()
        if value is not None and value != NEUTRAL.get(name, "")
    }
    return (
        ", ".join(f"{name.replace('_', '-')} {format_value(value)}" for name, value in active.items())
        or "sampled"
    )

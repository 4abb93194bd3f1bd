"""The answer, in a sentence: what was tuned, else the fastest measured, else the best foretold, else why
there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.report import swept
from outpace.report.section import Content
from outpace.report.words import between, said

UNKNOWN = "It is not known whether speculation pays"


def verdict(contents: Sequence[Content]) -> str:
    """Empty where nothing allows one."""
    return _tuned(contents) or _swept(contents) or _measured(contents) or _tuned(contents, known=False)


def _tuned(contents: Sequence[Content], known: bool = True) -> str:
    """Of those that came to a choice, or of the others."""
    tuned = (one for one in contents if one["kind"] == "tune" and (one.get("chosen") is not None) == known)
    return next((one["verdict"] for one in tuned if one.get("verdict")), "")


def _swept(contents: Sequence[Content]) -> str:
    rows = [row for one in contents if one["kind"] == "sweep" for row in one.get("figures") or ()]
    row = swept.best(rows)
    if row is None:
        return ""
    speed, interval = row["speedup"], row.get("interval")
    what = f"{row.get('draft')}, g = {row['length']}, {swept.way(row)}"
    known = f"{speed:.2f} times as fast as plain decoding"
    known += f" ({between(interval, '.2f')})" if interval else ""
    if speed <= 1:
        return f"Do not speculate: the best that was measured, {what}, is {known}."
    if not interval or interval[0] <= 1:
        return f"It is not sure that speculation pays: {what} is {known}."
    return f"Guess with {what}: {known}."


def _measured(contents: Sequence[Content]) -> str:
    drafts = [draft for one in contents if one["kind"] == "measure" for draft in one.get("drafts") or ()]
    exact = [one for one in drafts if one.get("predicted") is not None and one.get("lenience") in (None, 1)]
    if not exact:
        return ""
    best = max(exact, key=_promise)
    name, g, speed = said(best.get("draft")), best.get("best_g"), best["predicted"]
    interval = best.get("predicted_interval")
    times = between(interval, ".2f")
    if not g:
        if interval and interval[1] > 1:
            return f"{UNKNOWN}: {name} is expected to be {times} times as fast, over α's interval."
        return f"Do not speculate: no draft is expected to pay, not even {name}, the best of them."
    over = f" ({times} over α's interval)" if interval else ""
    known = f"{name}, g = {g}: {speed:.2f} times as fast as plain decoding{over}"
    if not interval or interval[0] <= 1:
        return f"{UNKNOWN}: {known}, by the acceptance and times measured."
    return f"Guess with {known}, by the acceptance and times measured."


def _promise(draft: dict[str, Any]) -> tuple[bool, float, float]:
    """Whether it pays anywhere in α's interval; how much it is expected to bring; and at best."""
    low, high = draft.get("predicted_interval") or (0.0, 0.0)
    return low > 1, float(draft["predicted"]), high

"""The answer of a page in a sentence.

It is the result of a tuning, else the fastest draft measured, else the best one predicted, else why there is
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.report import evaluated, measured, swept, tuned
from outpace.report.section import Content, Speed, Way
from outpace.report.words import between, said

UNKNOWN = "It is not known whether speculation pays"
Files = Sequence[tuple[str, Content]]


@dataclass(frozen=True)
class Verdict:
    """An answer, and the file that it follows from.

    Attributes:
        words: The answer.
        file: Name of the file.
        content: Content of the file.
        way: Draft and g that it recommends or calls the best; None where it names none.
        speed: Their speed; None where the answer names none.
    """

    words: str
    file: str
    content: Content
    way: Way | None = None
    speed: Speed | None = None


def verdicts(files: Files) -> list[Verdict]:
    """Return an answer for each file of the first kind that has one; an empty list if none has."""
    for kind, answer in (
        ("tune", _tuned),
        ("sweep", _swept),
        ("alpha", _measured),
        ("eval", _evaluated),
        ("tune", _open),
    ):
        found = [one for name, content in files if content["kind"] == kind and (one := answer(name, content))]
        if found:
            return found
    return []


def _tuned(name: str, content: Content) -> Verdict | None:
    """Return the answer of a tuning that made a choice."""
    chosen = content.get("chosen")
    if chosen is None or not content.get("verdict"):
        return None
    way = (chosen.get("draft"), str(chosen.get("length")))
    speed = tuned.speeds(content).get(way)
    return Verdict(content["verdict"], name, content, way if speed else None, speed)


def _open(name: str, content: Content) -> Verdict | None:
    """Return the answer of a tuning that made no choice."""
    return Verdict(content["verdict"], name, content) if content.get("verdict") else None


def _swept(name: str, content: Content) -> Verdict | None:
    row = swept.best(content.get("figures") or ())
    if row is None:
        return None
    speed, interval = row["speedup"], row.get("interval")
    what = f"{row.get('draft')}, g = {row['length']}, {swept.way(row)}"
    known = f"{speed:.2f} times as fast as plain decoding"
    known += f" ({between(interval, '.2f')})" if interval else ""
    way, at = (str(row.get("draft")), str(row["length"])), Speed("speedup", speed, interval)
    if speed <= 1:
        words = f"Do not speculate: the best that was measured, {what}, is {known}."
        return Verdict(words, name, content, way, at)
    if not interval or interval[0] <= 1:
        return Verdict(f"It is not sure that speculation pays: {what} is {known}.", name, content, way, at)
    return Verdict(f"Draft with {what}: {known}.", name, content, way, at)


def _measured(name: str, content: Content) -> Verdict | None:
    drafts = content.get("drafts") or ()
    exact = [one for one in drafts if one.get("predicted") is not None and one.get("lenience") in (None, 1)]
    if not exact:
        return None
    best = max(exact, key=_promise)
    draft, g, speed = said(best.get("draft")), best.get("best_g"), best["predicted"]
    interval = best.get("predicted_interval")
    times = between(interval, ".2f")
    way = (draft, str(g)) if g else None
    at = measured.speeds(content).get(way) if way else None

    def found(words: str) -> Verdict:
        return Verdict(words, name, content, way, at)

    if not g:
        if interval and interval[1] > 1:
            return found(f"{UNKNOWN}: {draft} is expected to be {times} times as fast, over α's interval.")
        return found(f"Do not speculate: no draft is expected to pay, not even {draft}, the best of them.")
    over = f" ({times} over α's interval)" if interval else ""
    known = f"{draft}, g = {g}: {speed:.2f} times as fast as plain decoding{over}"
    if not interval or interval[0] <= 1:
        return found(f"{UNKNOWN}: {known}, by the acceptance and times measured.")
    return found(f"Draft with {known}, by the acceptance and times measured.")


def _evaluated(name: str, content: Content) -> Verdict | None:
    for way, speed in evaluated.speeds(content).items():
        known = f"{content['task']} with {way[0]}, g = {way[1]}"
        times = f"{speed.value:.2f} times as fast as plain decoding"
        times += f" ({between(speed.interval, '.2f')})" if speed.interval else ""
        sure = speed.interval and not speed.interval[0] <= 1 <= speed.interval[1]
        doubt = "" if sure else ", so it is not sure whether it pays"
        return Verdict(f"{known} is {times}{doubt}.", name, content, way, speed)
    return None


def _promise(draft: dict[str, Any]) -> tuple[bool, float, float]:
    """Return whether a draft pays everywhere in α's interval, its predicted speed, and that at best."""
    low, high = draft.get("predicted_interval") or (0.0, 0.0)
    return low > 1, float(draft["predicted"]), high

"""The answer of a page in a sentence.

It is the result of a tuning, else the fastest draft measured, else the best one predicted, else why there is
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.report import evaluated, measured, swept, tuned
from outpace.report.section import Content, DraftConfig, Speed
from outpace.report.words import format_interval, format_value

UNKNOWN = "It is not known whether speculation pays"
Files = Sequence[tuple[str, Content]]


@dataclass(frozen=True)
class Answer:
    """An answer, and the file that it follows from.

    Attributes:
        words: The answer.
        file: Name of the file.
        content: Content of the file.
        config: Draft and g that it recommends or calls the best; None where it names none.
        speed: Their speed; None where the answer names none.
    """

    words: str
    file: str
    content: Content
    config: DraftConfig | None = None
    speed: Speed | None = None


def answers(files: Files) -> list[Answer]:
    """Return an answer for each file of the first kind that has one; an empty list if none has."""
    for kind, answer_of in (
        ("tune", _tuned),
        ("sweep", _swept),
        ("alpha", _measured),
        ("eval", _evaluated),
        ("tune", _undecided),
    ):
        found = [
            answer
            for name, content in files
            if content["kind"] == kind and (answer := answer_of(name, content))
        ]
        if found:
            return found
    return []


def _tuned(name: str, content: Content) -> Answer | None:
    """Return the answer of a tuning that made a choice."""
    chosen = content.get("chosen")
    if chosen is None or not content.get("verdict"):
        return None
    config = (chosen.get("draft"), str(chosen.get("num_draft_tokens")))
    speed = tuned.speeds(content).get(config)
    return Answer(content["verdict"], name, content, config if speed else None, speed)


def _undecided(name: str, content: Content) -> Answer | None:
    """Return the answer of a tuning that made no choice."""
    return Answer(content["verdict"], name, content) if content.get("verdict") else None


def _swept(name: str, content: Content) -> Answer | None:
    row = swept.best(content.get("figures") or ())
    if row is None:
        return None
    value, interval = row["speedup"], row.get("interval")
    setting = f"{row.get('draft')}, g = {row['num_draft_tokens']}, {swept.row_sampling(row)}"
    times = f"{value:.2f} times as fast as without speculation"
    times += f" ({format_interval(interval, '.2f')})" if interval else ""
    config, speed = (str(row.get("draft")), str(row["num_draft_tokens"])), Speed("speedup", value, interval)
    if value <= 1:
        words = f"Do not speculate: the best that was measured, {setting}, is {times}."
    elif not interval or interval[0] <= 1:
        words = f"It is not sure that speculation pays: {setting} is {times}."
    else:
        words = f"Draft with {setting}: {times}."
    return Answer(words, name, content, config, speed)


def _measured(name: str, content: Content) -> Answer | None:
    drafts = content.get("drafts") or ()
    exact = [
        draft for draft in drafts if draft.get("predicted") is not None and draft.get("lenience") in (None, 1)
    ]
    if not exact:
        return None
    best = max(exact, key=_rank)
    draft, g, value = format_value(best.get("draft")), best.get("best_g"), best["predicted"]
    interval = best.get("predicted_interval")
    times = format_interval(interval, ".2f")
    config = (draft, str(g)) if g else None
    speed = measured.speeds(content).get(config) if config else None

    def answer(words: str) -> Answer:
        return Answer(words, name, content, config, speed)

    if not g:
        if interval and interval[1] > 1:
            return answer(f"{UNKNOWN}: {draft} is expected to be {times} times as fast, over α's interval.")
        return answer(f"Do not speculate: no draft is expected to pay, not even {draft}, the best of them.")
    over_interval = f" ({times} over α's interval)" if interval else ""
    prediction = f"{draft}, g = {g}: {value:.2f} times as fast as without speculation{over_interval}"
    if not interval or interval[0] <= 1:
        return answer(f"{UNKNOWN}: {prediction}, by the acceptance and times measured.")
    return answer(f"Draft with {prediction}, by the acceptance and times measured.")


def _evaluated(name: str, content: Content) -> Answer | None:
    for config, speed in evaluated.speeds(content).items():
        setting = f"{content['task']} with {config[0]}, g = {config[1]}"
        times = f"{speed.value:.2f} times as fast as without speculation"
        times += f" ({format_interval(speed.interval, '.2f')})" if speed.interval else ""
        sure = speed.interval and not speed.interval[0] <= 1 <= speed.interval[1]
        caveat = "" if sure else ", so it is not sure whether it pays"
        return Answer(f"{setting} is {times}{caveat}.", name, content, config, speed)
    return None


def _rank(draft: dict[str, Any]) -> tuple[bool, float, float]:
    """Return whether a draft pays in all of α's interval, its predicted speed, and the highest one."""
    low, high = draft.get("predicted_interval") or (0.0, 0.0)
    return low > 1, float(draft["predicted"]), high

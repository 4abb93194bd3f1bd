"""Comparison of the sections of a page that measured the same draft and g."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.report.section import DraftConfig, Section, Speed
from outpace.report.source import differences

MAX_LISTED = 3  # pairs of draft and g that a sentence names
SAME = "It was measured under the same conditions as far as the files tell, at another time."


def notes(earlier: Sequence[Section], section: Section) -> list[str]:
    """Return notes on earlier sections that have speeds of the same drafts.

    A note names the conditions that differ, and speeds that disagree.

    Args:
        earlier: Earlier sections.
        section: The section to write notes for.
    """
    comparable = [other for other in earlier if _shared(other, section)]
    disagreeing = [other for other in comparable if _disagreeing(other, section)]
    agreeing = [other for other in comparable if other not in disagreeing]
    if len(agreeing) <= 1:
        return [_note(other, section) for other in comparable]
    names = []
    for other in agreeing:
        settings = ", ".join(differences(other.source, section.source))
        names.append(f"“{other.title}” ({f'other {settings}' if settings else 'the same conditions'})")
    return [
        *(_note(other, section) for other in disagreeing),
        f"Also with speeds of the same drafts: {'; '.join(names)}.",
    ]


def _shared(other: Section, section: Section) -> list[DraftConfig]:
    return [config for config in section.speeds if config in other.speeds]


def _disagreeing(other: Section, section: Section) -> list[DraftConfig]:
    return [
        config
        for config in _shared(other, section)
        if other.speeds[config].contradicts(section.speeds[config])
    ]


def _note(other: Section, section: Section) -> str:
    changed = [f"{name}: {values}" for name, values in differences(other.source, section.source).items()]
    words = f"“{other.title}” also has speeds of {_describe_all(_shared(other, section))}. "
    words += f"It was measured under other conditions: {'; '.join(changed)}." if changed else SAME
    if disagreeing := _disagreeing(other, section):
        pairs = [
            f"{_describe(config)}: {other.speeds[config]} there, {section.speeds[config]} here"
            for config in disagreeing[:MAX_LISTED]
        ]
        more = f"; and {len(disagreeing) - MAX_LISTED} more" if len(disagreeing) > MAX_LISTED else ""
        words += f" The two disagree: {'; '.join(pairs)}{more}."
    return words


def contradictions(config: DraftConfig | None, speed: Speed | None, others: Sequence[Section]) -> list[str]:
    """Return the sections that contradict an answer, in words.

    Args:
        config: Draft and g that the answer recommends or calls the best; None where it names none.
        speed: Their speed; None where the answer names none.
        others: Sections of other files.
    """
    found = []
    for section in others:
        if config is None or speed is None or speed.value <= 1:
            faster = {
                name: known
                for name, known in section.speeds.items()
                if known.interval and known.interval[0] > 1
            }
            if faster:
                best = max(faster, key=lambda name: faster[name].value)
                found.append(_contradiction(section, best, faster[best]))
        elif config in section.speeds and speed.contradicts(section.speeds[config]):
            found.append(_contradiction(section, config, section.speeds[config]))
    return found


def _contradiction(section: Section, config: DraftConfig, speed: Speed) -> str:
    prompts = section.source.get("prompts", "")
    words = f"But “{section.title}” has {speed} for {_describe(config)}"
    return words + (f", with {prompts}." if prompts else ".")


def _describe(config: DraftConfig) -> str:
    return f"{config[0]}, g = {config[1]}"


def _describe_all(configs: Sequence[DraftConfig]) -> str:
    return "; ".join(map(_describe, configs[:MAX_LISTED])) + (
        f"; and {len(configs) - MAX_LISTED} more" if len(configs) > MAX_LISTED else ""
    )

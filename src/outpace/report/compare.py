"""Comparison of the sections of a page that measured the same thing."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.report.section import Section, Speed, Way
from outpace.report.source import differences

SHOWN = 3  # pairs of draft and g that are listed
SAME = "It was measured under the same conditions as far as the files tell, at another time."


def notes(earlier: Sequence[Section], here: Section) -> list[str]:
    """Return notes on earlier sections that have speeds of the same drafts.

    A note names the conditions that differ, and speeds that disagree.

    Args:
        earlier: Earlier sections.
        here: The section to write notes for.
    """
    alike = [there for there in earlier if _both(there, here)]
    apart = [there for there in alike if _apart(there, here)]
    rest = [there for there in alike if there not in apart]
    if len(rest) <= 1:
        return [_note(there, here) for there in alike]
    each = []
    for there in rest:
        other = ", ".join(differences(there.source, here.source))
        each.append(f"“{there.title}” ({f'other {other}' if other else 'the same conditions'})")
    return [
        *(_note(there, here) for there in apart),
        f"Also with speeds of the same drafts: {'; '.join(each)}.",
    ]


def _both(there: Section, here: Section) -> list[Way]:
    return [way for way in here.speeds if way in there.speeds]


def _apart(there: Section, here: Section) -> list[Way]:
    return [way for way in _both(there, here) if there.speeds[way].contradicts(here.speeds[way])]


def _note(there: Section, here: Section) -> str:
    other = [f"{name}: {both}" for name, both in differences(there.source, here.source).items()]
    words = f"“{there.title}” also has speeds of {_ways(_both(there, here))}. "
    words += f"It was measured under other conditions: {'; '.join(other)}." if other else SAME
    if apart := _apart(there, here):
        each = [f"{_way(way)}: {there.speeds[way]} there, {here.speeds[way]} here" for way in apart[:SHOWN]]
        more = f"; and {len(apart) - SHOWN} more" if len(apart) > SHOWN else ""
        words += f" The two disagree: {'; '.join(each)}{more}."
    return words


def doubts(way: Way | None, speed: Speed | None, others: Sequence[Section]) -> list[str]:
    """Return the sections that contradict an answer, in words.

    Args:
        way: Draft and g that the answer recommends or calls the best; None where it names none.
        speed: Their speed; None where the answer names none.
        others: Sections of other files.
    """
    found = []
    for one in others:
        if way is None or speed is None or speed.value <= 1:
            sure = {name: at for name, at in one.speeds.items() if at.interval and at.interval[0] > 1}
            if sure:
                best = max(sure, key=lambda name: sure[name].value)
                found.append(_doubt(one, best, sure[best]))
        elif way in one.speeds and speed.contradicts(one.speeds[way]):
            found.append(_doubt(one, way, one.speeds[way]))
    return found


def _doubt(section: Section, way: Way, speed: Speed) -> str:
    where = section.source.get("prompts", "")
    return f"But “{section.title}” has {speed} for {_way(way)}" + (f", with {where}." if where else ".")


def _way(way: Way) -> str:
    return f"{way[0]}, g = {way[1]}"


def _ways(ways: Sequence[Way]) -> str:
    return "; ".join(map(_way, ways[:SHOWN])) + (
        f"; and {len(ways) - SHOWN} more" if len(ways) > SHOWN else ""
    )

"""How sections of a page fit together: where two measured the same thing, the second says how."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.report.section import Section, Speed, Way
from outpace.report.source import differences

SHOWN = 3  # contradictions that are spelt out


def note(there: Section, here: Section) -> str:
    """Say that another section has speeds of the same drafts, on what, and where the two disagree.

    Empty if they share no draft and g.
    """
    both = [way for way in here.speeds if way in there.speeds]
    if not both:
        return ""
    other = differences(there.source, here.source)
    words = f"“{there.title}” also has speeds of {_ways(both)}. "
    words += f"It was measured under other conditions: {'; '.join(other)}." if other else SAME
    apart = [way for way in both if there.speeds[way].contradicts(here.speeds[way])]
    if apart:
        each = [f"{_way(way)}: {there.speeds[way]} there, {here.speeds[way]} here" for way in apart[:SHOWN]]
        more = f"; and {len(apart) - SHOWN} more" if len(apart) > SHOWN else ""
        words += f" The two disagree: {'; '.join(each)}{more}."
    return words


SAME = "It was measured under the same conditions as far as the files tell, at another time."


def doubts(way: Way | None, speed: Speed | None, others: Sequence[Section]) -> list[str]:
    """Say which other sections contradict an answer.

    way, speed  of what the answer recommends, or calls the best; None where it names none
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

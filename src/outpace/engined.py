"""Rows that an engine writes, from their beginnings to their ends."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Generator

from outpace.advance import advance
from outpace.draft.base import Draft
from outpace.length import Length
from outpace.models.compiled import Engine, Outcome, Pending
from outpace.rows import Row, Step
from outpace.stats import Clock


def run(engine: Engine, waiting: deque[Row], slots: int, length: Length, context: int) -> Generator[Step]:
    """All rows, so many at a time. An iteration has been started when the outcome of the last one is read."""
    sampling = waiting[0].sampling
    active: dict[int, Row] = {}
    started: deque[tuple[Pending, dict[int, Row]]] = deque()
    try:
        while waiting or active:
            clock = Clock()
            _take_up(engine, waiting, slots, active)
            while len(started) < 2:
                g = max(length.choose(list(active)))
                started.append((engine.start(g, sampling, slots), dict(active)))
            pending, theirs = started.popleft()
            outcome = pending.read()
            # A row that ended meanwhile has no use for what came of its slot.
            rows = [row for slot, row in theirs.items() if active.get(slot) is row]
            clock.lap("target")
            steps = _gained(engine, rows, outcome, active, length, context)
            phases = clock.share([row.stats for row in rows])
            yield from (dataclasses.replace(step, phases=phases) for step in steps)
    finally:
        for slot in active:
            engine.end(slot)
        length.reset(range(slots))
        for pending, _ in started:
            pending.read()


def _take_up(engine: Engine, waiting: deque[Row], slots: int, active: dict[int, Row]) -> None:
    """Slots that are free get rows that wait, those side by side together."""
    free = [slot for slot in range(slots) if slot not in active][: len(waiting)]
    for slot in free:
        active[slot] = waiting.popleft()
        active[slot].slot = slot
    for _, side_by_side in itertools.groupby(enumerate(free), key=lambda one: one[1] - one[0]):
        new = [active[slot] for _, slot in side_by_side]
        engine.begin_all(new[0].slot, [row.tokens for row in new], [row.seed for row in new])


def _gained(
    engine: Engine, rows: list[Row], outcome: Outcome, active: dict[int, Row], length: Length, context: int
) -> list[Step]:
    """What an iteration brought to rows; those that have come to their ends give up their slots."""
    slots = [row.slot for row in rows]
    accepted, next_token, bad = (
        [of[slot] for slot in slots] for of in (outcome.accepted, outcome.next_token, outcome.bad)
    )
    draft = Draft.chosen([outcome.drafts[slot] for slot in slots])
    length.observe(slots, draft.lengths or [], accepted)
    steps = advance(rows, draft, None, (accepted, next_token, bad), context)
    for i, row in enumerate(rows):
        if row.finish_reason is not None:
            engine.end(row.slot, row.tokens, wipe=row.error is not None)
            del active[row.slot]
            length.reset([row.slot])
            steps[i] = dataclasses.replace(steps[i], finish_reason=row.finish_reason, output=row.output())
    return steps

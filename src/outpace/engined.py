"""Rows that an engine writes, from their beginnings to their ends."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import torch

from outpace.advance import advance
from outpace.draft.base import Draft
from outpace.guess import Guesser, Proposal, right
from outpace.length import Done, Load
from outpace.models.compiled import Engine
from outpace.models.guesses import Given
from outpace.models.pending import Outcome, Pending
from outpace.rows import Row, Step
from outpace.sampling import Sampling
from outpace.stats import Clock

AHEAD = 2  # iterations that are under way at a time: the outcome of one is read while the next one runs


@dataclass(frozen=True)
class Begun:
    """An iteration that was started."""

    pending: Pending
    g: int
    rows: dict[int, Row]  # that took part, by slot
    load: Load
    proposal: Proposal | None = None  # what the host's drafter guessed
    waited: float = 0.0  # seconds in which nothing was run, as the host had to see the last outcome first
    catching_up: float = 0.0  # seconds that the draft took to read what it had missed
    reading_made: float = 0.0  # seconds in which that was made ready


class Run:
    """All rows of a call, so many at a time.

    inside  guessing is part of the engine's iterations; otherwise it needs to see what came of the last one
    """

    def __init__(
        self, engine: Engine, guesser: Guesser, slots: int, inside: bool, sampling: Sampling
    ) -> None:
        self.engine, self.guesser, self.slots, self.inside = engine, guesser, slots, inside
        self.sampling = sampling  # of all rows
        self.length, self.drafter = guesser.length, guesser.drafter
        self._active: dict[int, Row] = {}
        self._begun: deque[Begun] = deque()
        self._read_by_draft: dict[int, int] = {}  # tokens of each row's text
        self._smooth = True  # nothing else was done beside the last iteration
        self._chosen: dict[int, int] | None = None  # by slot, for an iteration that has to wait
        self._drafted = 0.0  # seconds that the host's drafter took
        self._after = 0.0  # seconds that the last outcome took, after it was read

    def steps(self, waiting: deque[Row]) -> Generator[Step]:
        try:
            while waiting or self._active:
                clock = Clock()
                self._take_up(waiting)
                while len(self._begun) < AHEAD:
                    begun = self._start()
                    if begun is None:
                        break
                    self._begun.append(begun)
                begun = self._begun.popleft()
                if begun.proposal is not None:
                    clock.took("draft", self._drafted)
                outcome = begun.pending.read()
                read = time.perf_counter()
                # A row that ended meanwhile has no use for what came of its slot.
                rows = [row for slot, row in begun.rows.items() if self._active.get(slot) is row]
                clock.lap("target")
                spare = self._spare(rows, outcome, begun.g)
                steps = self._gained(rows, outcome, begun)
                phases = clock.share([row.stats for row in rows])
                # Without another one under way, what follows is waited for in the next.
                wall = sum(phases.values()) - (phases["other"] if begun.proposal is not None else 0.0)
                self._observe(rows, outcome, begun, spare, wall)
                self._end(rows)
                self._after = time.perf_counter() - read
                yield from (dataclasses.replace(step, phases=phases) for step in steps)
        finally:
            for slot in self._active:
                self.engine.end(slot)
            self.length.reset(range(self.slots))
            if self.drafter is not None:
                self.drafter.reset(range(self.slots))
            for begun in self._begun:
                begun.pending.read()

    def _take_up(self, waiting: deque[Row]) -> None:
        """Slots that are free get rows that wait, those side by side together."""
        free = [slot for slot in range(self.slots) if slot not in self._active][: len(waiting)]
        self._smooth = not free
        for slot in free:
            self._active[slot] = waiting.popleft()
            self._active[slot].slot = slot
            self._read_by_draft[slot] = len(self._active[slot].tokens)
        for _, side_by_side in itertools.groupby(enumerate(free), key=lambda one: one[1] - one[0]):
            new = [self._active[slot] for _, slot in side_by_side]
            self.engine.begin_all(new[0].slot, [row.tokens for row in new], [row.seed for row in new])

    def _start(self) -> Begun | None:
        """The next iteration; None if it has to wait for the outcome of the last one."""
        rows, guesser = dict(self._active), self.guesser
        under_way = len(self._begun) > 0
        asked = self._chosen or (guesser.free and not self.length.idle)
        if under_way and not self.inside and (self._begun[-1].g or asked):
            return None  # the drafter would have to see what comes of it
        there, load = list(rows.values()), self._load(rows)
        if self.inside:
            chosen = self._chosen or guesser.choose(there, load)
            g = max(chosen.values(), default=0)
            behind = g > 0 and self._behind() > 0
            self._chosen = chosen if behind and under_way else None
            if self._chosen is not None:
                return None
            return self._after_rest(g, rows, load) if behind else self._begin(g, rows, load)
        if under_way:
            if not guesser.free:
                chosen = guesser.choose(there, load)
                if any(chosen.values()):
                    self._chosen = chosen
                    return None
            return self._begin(0, rows, load)
        began = time.perf_counter()
        proposal = guesser.propose(there, load, self._chosen)
        self._chosen, self._drafted = None, time.perf_counter() - began
        return self._begin(proposal.draft.tokens.shape[1], rows, load, proposal)

    def _begin(self, g: int, rows: dict[int, Row], load: Load, proposal: Proposal | None = None) -> Begun:
        given = Given(list(rows), proposal.draft) if proposal is not None and g else None
        pending = self.engine.start(g, self.sampling, self.slots, given)
        self._smooth = self._smooth and pending.ready
        waited = self._after if proposal is not None and self.engine.goes_on else 0.0
        return Begun(pending, g, rows, load, proposal, waited)

    def _load(self, rows: dict[int, Row]) -> Load:
        load = self.guesser.load(list(rows.values()), self.slots, self._ready(), len(self._begun), "engine")
        if not self.inside:
            return load
        unread = self.engine.pieces(self._behind()) * self.engine.piece * self.slots
        return dataclasses.replace(load, unread=unread, padded=True)

    def _ready(self) -> frozenset[int] | None:
        return self.engine.ready(self.sampling, self.slots, given=not self.inside)

    def _behind(self) -> int:
        """Tokens of a row that the engine's draft has not read, at most."""
        if self.engine.draft is None:
            return 0
        coming = sum(not begun.g for begun in self._begun)
        known = (len(row.tokens) - self._read_by_draft[slot] for slot, row in self._active.items())
        return coming + max(known)

    def _after_rest(self, g: int, rows: dict[int, Row], load: Load) -> Begun:
        """The draft reads what it has missed. That is timed by the host, which was idle meanwhile, too."""
        began = time.perf_counter()
        self._smooth = False
        texts = {slot: row.tokens for slot, row in rows.items()}
        made = self.engine.catch_up(texts, self._behind(), self.slots)
        self._read_by_draft |= {slot: len(text) for slot, text in texts.items()}
        begun = self._begin(g, rows, load)
        begun.pending.read()
        own = begun.pending.seconds
        spent = time.perf_counter() - began - own if not made and own is not None else 0.0
        waited = self._after if self.engine.goes_on else 0.0
        return dataclasses.replace(begun, catching_up=spent, reading_made=made, waited=waited)

    def _spare(self, rows: list[Row], outcome: Outcome, g: int) -> list[bool]:
        """Whether a drafter that costs nothing would have guessed right, if it was not asked. Nothing guessed
        is wrong: the pass would have had room for it."""
        if not (self.inside and self.guesser.free and g == 0 and rows and self.length.most):
            return []
        followed = [outcome.next_token[row.slot] for row in rows]
        return [one is True for one in right(self.guesser.aside(rows), followed)]

    def _gained(self, rows: list[Row], outcome: Outcome, begun: Begun) -> list[Step]:
        """What an iteration brought to rows."""
        slots = [row.slot for row in rows]
        accepted, next_token, bad = (
            [of[slot] for slot in slots] for of in (outcome.accepted, outcome.next_token, outcome.bad)
        )
        if begun.proposal is not None and begun.proposal.state is not None and self.drafter is not None:
            kept, followed = (
                [of[slot] for slot in begun.rows] for of in (outcome.accepted, outcome.next_token)
            )
            self.drafter.commit(torch.tensor(kept), torch.tensor(followed))
        draft = Draft.chosen([outcome.drafts[slot] for slot in slots])
        steps = advance(rows, draft, None, (accepted, next_token, bad), self.guesser.scorer.context)
        for i, row in enumerate(rows):
            if begun.g:
                self._read_by_draft[row.slot] = len(row.tokens)
            if row.finish_reason is not None:
                steps[i] = dataclasses.replace(steps[i], finish_reason=row.finish_reason, output=row.output())
        return steps

    def _observe(
        self, rows: list[Row], outcome: Outcome, begun: Begun, spare: list[bool], wall: float
    ) -> None:
        """Tell the policy: the device's time, or the host's if that was longer."""
        if not rows:
            return
        slots = [row.slot for row in rows]
        room = dict(zip(begun.rows, begun.load.room or (), strict=True))
        proposal, seconds, drafted = begun.proposal, begun.pending.seconds, 0.0
        lengths = [len(outcome.drafts[slot]) for slot in slots]
        asked, steps = [begun.g] * len(slots), 0  # they are scored whether there are any or not
        unused: list[bool | None] = [*spare]
        if proposal is not None:
            place = [list(begun.rows).index(slot) for slot in slots]
            asked = [proposal.asked[i] for i in place] if proposal.asked else lengths
            if proposal.state is not None:
                steps, drafted = proposal.steps, self._drafted
            if proposal.spare:
                followed = [outcome.next_token[slot] for slot in slots]
                unused = right([proposal.spare[i] for i in place], followed)
        if seconds is not None:
            # The host may be what takes longer; where it is the device, its time is another iteration's.
            longer = wall if self._smooth and self.engine.goes_on else 0.0
            seconds = max(seconds + drafted, longer)
        self.length.observe(
            Done(
                slots,
                lengths,
                [outcome.accepted[slot] for slot in slots],
                begun.g,
                dataclasses.replace(begun.load, room=tuple(room[slot] for slot in slots)),
                seconds,
                draft_seconds=drafted,
                steps=steps,
                catching_up=begun.catching_up,
                waited=begun.waited,
                asked=asked,
                unused=unused,
                making=begun.pending.making,
                reading_made=begun.reading_made,
            )
        )

    def _withdraw(self) -> None:
        """What was chosen was for other rows."""
        if self._chosen is not None:
            self._chosen = None
            self.length.withdraw()

    def _end(self, rows: list[Row]) -> None:
        """Rows that have come to their ends give up their slots."""
        ended = [row for row in rows if row.finish_reason is not None]
        if ended:
            self._withdraw()
        for row in ended:
            whole = self.engine.draft is None or self._read_by_draft[row.slot] == len(row.tokens)
            known = row.tokens if whole else row.tokens[: self._read_by_draft[row.slot]]
            self.engine.end(row.slot, known, wipe=row.error is not None)
            del self._active[row.slot]
            self.length.reset([row.slot])
            if self.drafter is not None:
                self.drafter.reset([row.slot])

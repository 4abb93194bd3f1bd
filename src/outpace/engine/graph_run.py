"""The sequences of a call in the graph executor, from prefill to their ends."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import torch

from outpace.draft.base import Draft
from outpace.engine.commit import advance
from outpace.engine.drafting import Proposal, Proposer, right
from outpace.engine.graph import Engine
from outpace.engine.inputs import HostDraft
from outpace.engine.pending import Outcome, Pending
from outpace.engine.sequence import Row, Step
from outpace.engine.stats import Clock
from outpace.policy import Load, StepOutcome
from outpace.sampling import SamplingParams

AHEAD = 2  # steps under way at a time: the host reads one outcome while the next step runs


@dataclass(frozen=True)
class Prefilled:
    """A step that was started."""

    pending: Pending
    g: int
    rows: dict[int, Row]  # sequences that take part, by slot
    load: Load
    proposal: Proposal | None = None  # draft tokens of a drafter on the host
    waited: float = 0.0  # seconds in which the device idled, as the host needed the last outcome first
    catching_up: float = 0.0  # seconds that the draft model took to read the tokens it missed
    reading_made: float = 0.0  # seconds that captures for that took


class GraphRun:
    """All sequences of a call, at most ``slots`` at a time.

    Args:
        engine: The graph executor.
        proposer: The drafter with its draft-length policy.
        slots: Sequences at a time.
        inside: Whether drafting is part of the engine's steps. Otherwise the drafter must see the outcome of
            the last step first.
        sampling: Sampling parameters of all sequences.
    """

    def __init__(
        self, engine: Engine, proposer: Proposer, slots: int, inside: bool, sampling: SamplingParams
    ) -> None:
        self.engine, self.proposer, self.slots, self.inside = engine, proposer, slots, inside
        self.sampling = sampling  # of all sequences
        self.length, self.drafter = proposer.length, proposer.drafter
        self._active: dict[int, Row] = {}
        self._begun: deque[Prefilled] = deque()
        self._read_by_draft: dict[int, int] = {}  # by slot: tokens that the draft model has read
        self._smooth = True  # no prefill, capture or catch-up beside the last step
        self._chosen: dict[int, int] | None = None  # draft tokens by slot, for a step that has to wait
        self._drafted = 0.0  # seconds that the host's drafter took
        self._after = 0.0  # seconds that the host spent on the last outcome after reading it

    def steps(self, waiting: deque[Row]) -> Generator[Step]:
        """Yield the steps of all sequences as they happen."""
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
                # A sequence that has ended meanwhile drops the outcome of its slot.
                rows = [row for slot, row in begun.rows.items() if self._active.get(slot) is row]
                clock.lap("target")
                spare = self._spare(rows, outcome, begun.g)
                steps = self._gained(rows, outcome, begun)
                phases = clock.share([row.stats for row in rows])
                # If no other step is under way, the time after the outcome is `waited` of the next step.
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
        """Prefill waiting sequences in free slots, those in adjacent slots together."""
        free = [slot for slot in range(self.slots) if slot not in self._active][: len(waiting)]
        self._smooth = not free
        for slot in free:
            self._active[slot] = waiting.popleft()
            self._active[slot].slot = slot
            self._read_by_draft[slot] = len(self._active[slot].tokens)
        for _, side_by_side in itertools.groupby(enumerate(free), key=lambda one: one[1] - one[0]):
            new = [self._active[slot] for _, slot in side_by_side]
            self.engine.begin_all(new[0].slot, [row.tokens for row in new], [row.seed for row in new])

    def _start(self) -> Prefilled | None:
        """Start the next step; return None if it must wait for the last outcome."""
        rows, proposer = dict(self._active), self.proposer
        under_way = len(self._begun) > 0
        asked = self._chosen or (proposer.free and not self.length.idle)
        if under_way and not self.inside and (self._begun[-1].g or asked):
            return None  # the drafter must see its outcome first
        there, load = list(rows.values()), self._load(rows)
        if self.inside:
            chosen = self._chosen or proposer.choose(there, load)
            g = max(chosen.values(), default=0)
            behind = g > 0 and self._behind() > 0
            self._chosen = chosen if behind and under_way else None
            if self._chosen is not None:
                return None
            return self._after_rest(g, rows, load) if behind else self._begin(g, rows, load)
        if under_way:
            if not proposer.free:
                chosen = proposer.choose(there, load)
                if any(chosen.values()):
                    self._chosen = chosen
                    return None
            return self._begin(0, rows, load)
        began = time.perf_counter()
        proposal = proposer.propose(there, load, self._chosen)
        self._chosen, self._drafted = None, time.perf_counter() - began
        return self._begin(proposal.draft.tokens.shape[1], rows, load, proposal)

    def _begin(self, g: int, rows: dict[int, Row], load: Load, proposal: Proposal | None = None) -> Prefilled:
        given = HostDraft(list(rows), proposal.draft) if proposal is not None and g else None
        pending = self.engine.start(g, self.sampling, self.slots, given)
        self._smooth = self._smooth and pending.ready
        waited = self._after if proposal is not None and self.engine.goes_on else 0.0
        return Prefilled(pending, g, rows, load, proposal, waited)

    def _load(self, rows: dict[int, Row]) -> Load:
        load = self.proposer.load(list(rows.values()), self.slots, self._ready(), len(self._begun), "engine")
        if not self.inside:
            return load
        unread = self.engine.pieces(self._behind()) * self.engine.piece * self.slots
        return dataclasses.replace(load, unread=unread, padded=True)

    def _ready(self) -> frozenset[int] | None:
        return self.engine.ready(self.sampling, self.slots, given=not self.inside)

    def _behind(self) -> int:
        """Return the most tokens of a sequence that the engine's draft model has not read."""
        if self.engine.draft is None:
            return 0
        coming = sum(not begun.g for begun in self._begun)
        known = (len(row.tokens) - self._read_by_draft[slot] for slot, row in self._active.items())
        return coming + max(known)

    def _after_rest(self, g: int, rows: dict[int, Row], load: Load) -> Prefilled:
        """Start a step after the draft model has read the tokens it missed.

        The host, which was idle meanwhile too, measures the time of that.
        """
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
        """Return whether a free drafter would have proposed the right tokens, if it was not asked.

        No proposal counts as wrong: the forward pass would have scored a draft token all the same.
        """
        if not (self.inside and self.proposer.free and g == 0 and rows and self.length.max_draft_tokens):
            return []
        followed = [outcome.next_token[row.slot] for row in rows]
        return [one is True for one in right(self.proposer.aside(rows), followed)]

    def _gained(self, rows: list[Row], outcome: Outcome, begun: Prefilled) -> list[Step]:
        """Commit the outcome of a step to the sequences."""
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
        steps = advance(rows, draft, None, (accepted, next_token, bad), self.proposer.scorer.context)
        for i, row in enumerate(rows):
            if begun.g:
                self._read_by_draft[row.slot] = len(row.tokens)
            if row.finish_reason is not None:
                steps[i] = dataclasses.replace(steps[i], finish_reason=row.finish_reason, output=row.output())
        return steps

    def _observe(
        self, rows: list[Row], outcome: Outcome, begun: Prefilled, spare: list[bool], wall: float
    ) -> None:
        """Report a step to the policy, with the device's time, or the host's if that was longer."""
        if not rows:
            return
        slots = [row.slot for row in rows]
        room = dict(zip(begun.rows, begun.load.room or (), strict=True))
        proposal, seconds, drafted = begun.proposal, begun.pending.seconds, 0.0
        lengths = [len(outcome.drafts[slot]) for slot in slots]
        asked, steps = [begun.g] * len(slots), 0  # g positions are scored, drafted or not
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
            # The host may take longer than the device. If the device does, wall time covers another step's.
            longer = wall if self._smooth and self.engine.goes_on else 0.0
            seconds = max(seconds + drafted, longer)
        self.length.observe(
            StepOutcome(
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
        """Withdraw a choice that was made for other sequences."""
        if self._chosen is not None:
            self._chosen = None
            self.length.withdraw()

    def _end(self, rows: list[Row]) -> None:
        """Free the slots of sequences that have ended."""
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

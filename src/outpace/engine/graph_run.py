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
from outpace.engine.drafting import Proposal, Proposer, matches
from outpace.engine.graph import Engine
from outpace.engine.inputs import HostDraft
from outpace.engine.pending import Outcome, Pending
from outpace.engine.sequence import SequenceState, Step
from outpace.engine.stats import Clock
from outpace.policy import Load, StepOutcome
from outpace.sampling import SamplingParams

MAX_IN_FLIGHT = 2  # steps: the host reads one outcome while the next step runs


@dataclass(frozen=True)
class InFlightStep:
    """A step that has started, and whose outcome is not committed yet."""

    pending: Pending
    g: int
    rows: dict[int, SequenceState]  # sequences that take part, by slot
    load: Load
    proposal: Proposal | None = None  # draft tokens of a drafter on the host
    idle_seconds: float = 0.0  # of the device before the step, as the host needed the last outcome first
    catch_up_seconds: float = 0.0  # in which the draft model read the tokens it missed
    catch_up_capture_seconds: float = 0.0  # of captures for the catch-up


class GraphRun:
    """All sequences of a call, at most ``slots`` at a time.

    Args:
        engine: The graph executor.
        proposer: The drafter with its draft-length policy.
        slots: Sequences at a time.
        drafts_in_graph: Whether drafting is part of the engine's steps. Otherwise the drafter must see the
            outcome of the last step first.
        sampling: Sampling parameters of all sequences.
    """

    def __init__(
        self, engine: Engine, proposer: Proposer, slots: int, drafts_in_graph: bool, sampling: SamplingParams
    ) -> None:
        self.engine, self.proposer, self.slots = engine, proposer, slots
        self.drafts_in_graph = drafts_in_graph
        self.sampling = sampling  # of all sequences
        self.policy, self.drafter = proposer.policy, proposer.drafter
        self._active: dict[int, SequenceState] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._read_by_draft: dict[int, int] = {}  # by slot: tokens that the draft model has read
        self._undisturbed = True  # no prefill, capture or catch-up beside the last step
        self._chosen: dict[int, int] | None = None  # draft tokens by slot, for a step that has to wait
        self._draft_seconds = 0.0  # of the drafter on the host
        self._commit_seconds = 0.0  # of the host, after it read the last outcome

    def steps(self, waiting: deque[SequenceState]) -> Generator[Step]:
        """Yield the steps of all sequences as they happen."""
        try:
            while waiting or self._active:
                clock = Clock()
                self._prefill(waiting)
                while len(self._in_flight) < MAX_IN_FLIGHT:
                    next_step = self._start()
                    if next_step is None:
                        break
                    self._in_flight.append(next_step)
                started = self._in_flight.popleft()
                if started.proposal is not None:
                    clock.record("draft", self._draft_seconds)
                outcome = started.pending.read()
                read_at = time.perf_counter()
                # A sequence that has ended meanwhile drops the outcome of its slot.
                rows = [row for slot, row in started.rows.items() if self._active.get(slot) is row]
                clock.lap("target")
                unscored = self._unscored_matches(rows, outcome, started.g)
                steps = self._commit(rows, outcome, started)
                phases = clock.share([row.stats for row in rows])
                # With no other step in flight, the time after the outcome is idle time of the next step.
                wall = sum(phases.values()) - (phases["other"] if started.proposal is not None else 0.0)
                self._observe(rows, outcome, started, unscored, wall)
                self._end(rows)
                self._commit_seconds = time.perf_counter() - read_at
                yield from (dataclasses.replace(step, phases=phases) for step in steps)
        finally:
            for slot in self._active:
                self.engine.end(slot)
            self.policy.reset(range(self.slots))
            if self.drafter is not None:
                self.drafter.reset(range(self.slots))
            for started in self._in_flight:
                started.pending.read()

    def _prefill(self, waiting: deque[SequenceState]) -> None:
        """Prefill waiting sequences in free slots, those in adjacent slots together."""
        free = [slot for slot in range(self.slots) if slot not in self._active][: len(waiting)]
        self._undisturbed = not free
        for slot in free:
            self._active[slot] = waiting.popleft()
            self._active[slot].slot = slot
            self._read_by_draft[slot] = len(self._active[slot].tokens)
        for _, adjacent in itertools.groupby(enumerate(free), key=lambda pair: pair[1] - pair[0]):
            new = [self._active[slot] for _, slot in adjacent]
            self.engine.prefill_all(new[0].slot, [row.tokens for row in new], [row.seed for row in new])

    def _start(self) -> InFlightStep | None:
        """Start the next step; return None if it must wait for the last outcome."""
        rows, proposer = dict(self._active), self.proposer
        step_in_flight = len(self._in_flight) > 0
        needs_draft = self._chosen or (proposer.free and not self.policy.idle)
        if step_in_flight and not self.drafts_in_graph and (self._in_flight[-1].g or needs_draft):
            return None  # the drafter must see its outcome first
        active, load = list(rows.values()), self._load(rows)
        if self.drafts_in_graph:
            chosen = self._chosen or proposer.choose(active, load)
            g = max(chosen.values(), default=0)
            must_catch_up = g > 0 and self._num_missing() > 0
            self._chosen = chosen if must_catch_up and step_in_flight else None
            if self._chosen is not None:
                return None
            return self._catch_up_and_launch(g, rows, load) if must_catch_up else self._launch(g, rows, load)
        if step_in_flight:
            if not proposer.free:
                chosen = proposer.choose(active, load)
                if any(chosen.values()):
                    self._chosen = chosen
                    return None
            return self._launch(0, rows, load)
        started_at = time.perf_counter()
        proposal = proposer.propose(active, load, self._chosen)
        self._chosen, self._draft_seconds = None, time.perf_counter() - started_at
        return self._launch(proposal.draft.tokens.shape[1], rows, load, proposal)

    def _launch(
        self, g: int, rows: dict[int, SequenceState], load: Load, proposal: Proposal | None = None
    ) -> InFlightStep:
        host_draft = HostDraft(list(rows), proposal.draft) if proposal is not None and g else None
        pending = self.engine.start(g, self.sampling, self.slots, host_draft)
        self._undisturbed = self._undisturbed and pending.was_captured
        idle_seconds = self._commit_seconds if proposal is not None and self.engine.is_async else 0.0
        return InFlightStep(pending, g, rows, load, proposal, idle_seconds)

    def _load(self, rows: dict[int, SequenceState]) -> Load:
        captured = self.engine.captured_lengths(self.sampling, self.slots, from_host=not self.drafts_in_graph)
        load = self.proposer.load(list(rows.values()), self.slots, captured, len(self._in_flight), "engine")
        if not self.drafts_in_graph:
            return load
        chunks = self.engine.num_catch_up_chunks(self._num_missing())
        tokens = chunks * self.engine.catch_up_chunk * self.slots
        return dataclasses.replace(load, catch_up_tokens=tokens, padded_drafts=True)

    def _num_missing(self) -> int:
        """Return the most tokens of a sequence that the engine's draft model has not read."""
        if self.engine.draft is None:
            return 0
        in_flight = sum(not started.g for started in self._in_flight)
        missing = (len(row.tokens) - self._read_by_draft[slot] for slot, row in self._active.items())
        return in_flight + max(missing)

    def _catch_up_and_launch(self, g: int, rows: dict[int, SequenceState], load: Load) -> InFlightStep:
        """Start a step after the draft model has read the tokens it missed.

        The host measures the time of the catch-up, since it waits meanwhile.
        """
        started_at = time.perf_counter()
        self._undisturbed = False
        texts = {slot: row.tokens for slot, row in rows.items()}
        capture_seconds = self.engine.catch_up(texts, self._num_missing(), self.slots)
        self._read_by_draft |= {slot: len(text) for slot, text in texts.items()}
        started = self._launch(g, rows, load)
        started.pending.read()
        step_seconds = started.pending.seconds
        catch_up_seconds = 0.0
        if not capture_seconds and step_seconds is not None:
            catch_up_seconds = time.perf_counter() - started_at - step_seconds
        return dataclasses.replace(
            started,
            catch_up_seconds=catch_up_seconds,
            catch_up_capture_seconds=capture_seconds,
            idle_seconds=self._commit_seconds if self.engine.is_async else 0.0,
        )

    def _unscored_matches(self, rows: list[SequenceState], outcome: Outcome, g: int) -> list[bool]:
        """Return whether a free drafter would have proposed the right tokens, after a step without a draft.

        No proposal counts as wrong: the forward pass would have scored a draft token all the same.
        """
        may_draft = self.drafts_in_graph and self.proposer.free and self.policy.max_draft_tokens
        if not (may_draft and g == 0 and rows):
            return []
        next_tokens = [outcome.next_token[row.slot] for row in rows]
        return [match is True for match in matches(self.proposer.propose_unscored(rows), next_tokens)]

    def _commit(self, rows: list[SequenceState], outcome: Outcome, started: InFlightStep) -> list[Step]:
        """Commit the outcome of a step to the sequences."""
        slots = [row.slot for row in rows]
        accepted, next_token, bad = (
            [values[slot] for slot in slots] for values in (outcome.accepted, outcome.next_token, outcome.bad)
        )
        if started.proposal is not None and started.proposal.state is not None and self.drafter is not None:
            all_accepted, all_next = (
                [values[slot] for slot in started.rows] for values in (outcome.accepted, outcome.next_token)
            )
            self.drafter.commit(torch.tensor(all_accepted), torch.tensor(all_next))
        draft = Draft.chosen([outcome.drafts[slot] for slot in slots])
        steps = advance(rows, draft, None, (accepted, next_token, bad), self.proposer.scorer.context)
        for i, row in enumerate(rows):
            if started.g:
                self._read_by_draft[row.slot] = len(row.tokens)
            if row.finish_reason is not None:
                steps[i] = dataclasses.replace(steps[i], finish_reason=row.finish_reason, output=row.output())
        return steps

    def _observe(
        self,
        rows: list[SequenceState],
        outcome: Outcome,
        started: InFlightStep,
        unscored: list[bool],
        wall: float,
    ) -> None:
        """Report a step to the policy, with the device's time, or the host's if that was longer."""
        if not rows:
            return
        slots = [row.slot for row in rows]
        remaining = dict(zip(started.rows, started.load.remaining_draft_tokens or (), strict=True))
        proposal, seconds, draft_seconds = started.proposal, started.pending.seconds, 0.0
        lengths = [len(outcome.drafts[slot]) for slot in slots]
        requested, draft_steps = [started.g] * len(slots), 0  # g positions are scored, drafted or not
        unscored_correct: list[bool | None] = [*unscored]
        if proposal is not None:
            indices = [list(started.rows).index(slot) for slot in slots]
            requested = [proposal.requested[i] for i in indices] if proposal.requested else lengths
            if proposal.state is not None:
                draft_steps, draft_seconds = proposal.draft_steps, self._draft_seconds
            if proposal.unscored:
                next_tokens = [outcome.next_token[slot] for slot in slots]
                unscored_correct = matches([proposal.unscored[i] for i in indices], next_tokens)
        if seconds is not None:
            # The host may take longer than the device. If the device does, wall time covers another step's.
            host_seconds = wall if self._undisturbed and self.engine.is_async else 0.0
            seconds = max(seconds + draft_seconds, host_seconds)
        self.policy.observe(
            StepOutcome(
                slots,
                lengths,
                [outcome.accepted[slot] for slot in slots],
                started.g,
                dataclasses.replace(
                    started.load, remaining_draft_tokens=tuple(remaining[slot] for slot in slots)
                ),
                seconds,
                draft_seconds=draft_seconds,
                draft_steps=draft_steps,
                catch_up_seconds=started.catch_up_seconds,
                idle_seconds=started.idle_seconds,
                requested=requested,
                unscored_correct=unscored_correct,
                capture_seconds=started.pending.capture_seconds,
                catch_up_capture_seconds=started.catch_up_capture_seconds,
            )
        )

    def _withdraw(self) -> None:
        """Withdraw a choice that was made for other sequences."""
        if self._chosen is not None:
            self._chosen = None
            self.policy.withdraw()

    def _end(self, rows: list[SequenceState]) -> None:
        """Free the slots of sequences that have ended."""
        ended = [row for row in rows if row.finish_reason is not None]
        if ended:
            self._withdraw()
        for row in ended:
            all_read = self.engine.draft is None or self._read_by_draft[row.slot] == len(row.tokens)
            cached = row.tokens if all_read else row.tokens[: self._read_by_draft[row.slot]]
            self.engine.end(row.slot, cached, wipe=row.error is not None)
            del self._active[row.slot]
            self.policy.reset([row.slot])
            if self.drafter is not None:
                self.drafter.reset([row.slot])

"""Decoding of a call's sequences by the graph executor, from prefill to their ends."""

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
    """A step that has started, and whose outcome is not committed yet.

    Its seconds of catch-up and of captures came before the step.
    """

    pending: Pending
    g: int
    rows: dict[int, SequenceState]  # sequences that take part, by slot
    load: Load
    proposal: Proposal | None = None  # draft tokens of a drafter on the host
    idle_seconds: float = 0.0  # before the step, while the device waited for the host
    catch_up_seconds: float = 0.0  # in which the draft model processed tokens generated without it
    catch_up_capture_seconds: float = 0.0  # in which graphs of the catch-up were captured


class GraphRun:
    """All sequences of a call, at most ``slots`` at a time.

    Args:
        engine: The graph executor.
        proposer: The drafter with its draft-length policy.
        slots: Largest number of sequences at a time.
        drafts_in_graph: Whether drafting is part of the engine's steps. Otherwise the drafter runs on the
            host, which needs the outcome of the last step first.
        sampling: Sampling parameters of all sequences.
    """

    def __init__(
        self, engine: Engine, proposer: Proposer, slots: int, drafts_in_graph: bool, sampling: SamplingParams
    ) -> None:
        self.engine, self.proposer, self.slots = engine, proposer, slots
        self.drafts_in_graph = drafts_in_graph
        self.sampling = sampling
        self.policy, self.drafter = proposer.policy, proposer.drafter
        self._active: dict[int, SequenceState] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._read_by_draft: dict[int, int] = {}  # by slot: number of tokens the draft model has processed
        self._undisturbed = True  # whether the last step had no prefill, capture or catch-up before it
        self._chosen: dict[int, int] | None = None  # number of draft tokens by slot, for a step that waits
        self._draft_seconds = 0.0  # of the last draft on the host
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
                # A sequence may have ended after this step started: the outcome of its slot is dropped.
                rows = [row for slot, row in started.rows.items() if self._active.get(slot) is row]
                clock.lap("target")
                unscored = self._unscored_matches(rows, outcome, started.g)
                steps = self._commit(rows, outcome, started)
                phases = clock.share([row.stats for row in rows])
                # With a drafter on the host, the time after the outcome counts as the next step's idle time.
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
            return None  # the drafter must see the outcome of the step in flight first
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
        self._undisturbed = self._undisturbed and pending.needed_no_capture
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
        """Return the largest number of tokens of a sequence that the draft model has not processed."""
        if self.engine.draft is None:
            return 0
        in_flight = sum(not started.g for started in self._in_flight)
        missing = (len(row.tokens) - self._read_by_draft[slot] for slot, row in self._active.items())
        return in_flight + max(missing)

    def _catch_up_and_launch(self, g: int, rows: dict[int, SequenceState], load: Load) -> InFlightStep:
        """Run the draft model over the tokens it has not processed, then start a step.

        The host measures the seconds of the catch-up, because it waits until the step has ended.
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
        """Return whether a free drafter would have proposed the right tokens in a step without draft tokens.

        No proposal counts as wrong, because the forward pass would have been just as long.
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
        """Report a step to the policy, with the seconds of the device, or of the host if it took longer."""
        if not rows:
            return
        slots = [row.slot for row in rows]
        remaining = dict(zip(started.rows, started.load.remaining_draft_tokens or (), strict=True))
        proposal, seconds, draft_seconds = started.proposal, started.pending.seconds, 0.0
        lengths = [len(outcome.drafts[slot]) for slot in slots]
        requested, draft_steps = [started.g] * len(slots), 0  # the target scores g positions, padding too
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
            # Host and device work at the same time, and the slower one sets the pace. Wall time counts only
            # if nothing else happened in it: no prefill, capture or catch-up.
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
        """Withdraw the choice of a step that has not started, because its sequences have changed."""
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

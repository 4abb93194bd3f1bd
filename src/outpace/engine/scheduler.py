"""The scheduler: the one loop that all sequences are decoded by.

It admits requests to slots, prefills them in chunks between decode steps, asks the draft-length policy how
many tokens to draft, and lets an executor run a step. It appends the accepted tokens, ends sequences exactly
where decoding without speculation would have ended them, and returns one ``Step`` per sequence and step.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from outpace.draft.base import Drafter
from outpace.engine.commit import advance
from outpace.engine.drafting import Proposal, Proposer, matches
from outpace.engine.executor import Executor, Outcome, Pending, Prefilling
from outpace.engine.sequence import SequenceState, Step
from outpace.engine.stats import Clock
from outpace.models.kv_cache import size
from outpace.models.scorer import Scorer, WeightsMovedError
from outpace.policy import DraftLengthPolicy, Load, StepOutcome
from outpace.verification import Rule

FAILURES = MemoryError, torch.OutOfMemoryError, WeightsMovedError  # that end one request, and no other
MAX_IN_FLIGHT = 2  # steps: the host reads one outcome while the next step runs


@dataclass(frozen=True)
class InFlightStep:
    """A step that has started, and whose outcome is not committed yet."""

    pending: Pending
    g: int
    rows: Mapping[int, SequenceState]  # sequences that take part, by slot
    load: Load
    proposal: Proposal | None = None  # draft tokens of a drafter on the host
    draft_seconds: float = 0.0  # of that drafter
    idle_seconds: float = 0.0  # before the step, while the device waited for the host


class Scheduler:
    """All sequences of a decoder, which join and leave at any step.

    Args:
        scorer: The target.
        drafter: The drafter, or None.
        policy: The draft-length policy.
        rule: The verification rule.
        executors: Executors, the preferred one first. The last one runs any sequences.
        slots: Most sequences at a time.
        on_close: Called once when the scheduler is closed.
    """

    def __init__(
        self,
        scorer: Scorer,
        drafter: Drafter | None,
        policy: DraftLengthPolicy,
        rule: Rule,
        executors: Sequence[Executor],
        slots: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.scorer, self.drafter, self.policy = scorer, drafter, policy
        self.executors, self.slots, self._on_close = executors, slots, on_close
        self.executor = executors[0]
        self.proposer = Proposer(scorer, drafter, policy, rule)
        self._num_added = 0
        self._closed = False
        self._admitted: list[SequenceState] = []  # sequences that have slots, and no prefill yet
        self._waiting: deque[SequenceState] = deque()
        self._prefilling: Prefilling | None = None
        self._active: dict[int, SequenceState] = {}  # by slot
        self._in_flight: deque[InFlightStep] = deque()
        self._undisturbed = True  # whether the last step had no prefill, capture or catch-up before it
        self._chosen: dict[int, int] | None = None  # number of draft tokens by slot, for a step that waits
        self._commit_seconds = 0.0  # of the host, after it read the last outcome
        self._rows_changed = False  # whether sequences have ended since the executor was chosen
        self._caches_valid = True  # whether the KV caches agree with the sequences' tokens

    # Requests

    def add(self, request: SequenceState) -> int:
        """Add a request, which takes a slot as soon as one is free.

        Returns:
            Its id, which is the ``index`` of its steps, and which ``cancel`` takes.

        Raises:
            ValueError: The request was added before.
            RuntimeError: The scheduler is closed, or a step has failed.
        """
        self._check_usable()
        if request.added:
            raise ValueError("request: got one that was added before; call Decoder.requests again")
        request.added = True
        request.index = self._num_added
        self._num_added += 1
        self._waiting.append(request)
        return request.index

    def cancel(self, request_id: int) -> None:
        """End a sequence at once. No step follows.

        Raises:
            ValueError: No unfinished sequence has this id.
        """
        for waiting in self._waiting:
            if waiting.index == request_id:
                self._waiting.remove(waiting)
                return
        for row in self._rows():
            if row.index == request_id and row.finish_reason is None:
                row.finish_reason = "cancelled"
                if row.slot in self._active:
                    self._end([row])
                elif all(other.finish_reason is not None for other in self._rows_in_prefill()):
                    for other in self._rows_in_prefill():
                        self._free(other, keep=False)
                    self._prefilling = None
                return
        raise ValueError(f"request_id: got {request_id}; it must be the id of an unfinished sequence")

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the scheduler is closed; create another one")
        if not self._caches_valid:
            raise RuntimeError("an earlier step of the scheduler failed; close it, and create another one")

    @property
    def unfinished(self) -> int:
        """Number of sequences that wait or are being generated."""
        return len(self._waiting) + sum(row.finish_reason is None for row in self._rows())

    def _rows(self) -> list[SequenceState]:
        """Return the sequences that have slots."""
        return [*self._active.values(), *self._rows_in_prefill(), *self._admitted]

    def _rows_in_prefill(self) -> list[SequenceState]:
        return [] if self._prefilling is None else self._prefilling.rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all sequences and free their slots."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.ExitStack() as stack:  # one failure does not keep the rest from being freed
                for scorer in self._scorers():
                    stack.callback(scorer.cache.trim)
                for row in self._rows():
                    stack.callback(self._free, row, self._caches_valid and row.slot in self._active)
                for started in self._in_flight:
                    stack.callback(started.pending.read)
        finally:
            if self._on_close is not None:
                self._on_close()

    # The loop

    def step(self) -> list[Step]:
        """Run the next decode step, after a chunk of prefill; return what each sequence gained.

        Raises:
            RuntimeError: The scheduler is closed, or an earlier step has failed.
        """
        self._check_usable()
        self._caches_valid = False
        steps = self._prefill()
        if self._rows_changed and self._active and self._prefilling is None:
            steps += self._choose_executor(list(self._active.values()))
        if self._active or self._in_flight:
            clock = Clock()
            while len(self._in_flight) < (MAX_IN_FLIGHT if self.executor.is_async else 1):
                try:
                    started = self._start(clock)
                except FAILURES as error:
                    steps += self._fail_newest(error)
                    break
                if started is None:
                    break
                self._in_flight.append(started)
            if self._in_flight:
                steps += self._finish(self._in_flight.popleft(), clock)
        self._caches_valid = True
        return steps

    def _finish(self, started: InFlightStep, clock: Clock) -> list[Step]:
        """Read the outcome of a step, commit it, and report it to the policy."""
        outcome = started.pending.read()
        read_at = time.perf_counter()
        clock.lap("target")
        # A sequence may have ended after this step started: the outcome of its slot is dropped.
        rows = [row for slot, row in started.rows.items() if self._active.get(slot) is row]
        unscored = self._unscored_matches(rows, outcome, started.g)
        steps = self._commit(rows, outcome, started)
        phases = clock.share([row.stats for row in rows])
        if rows:
            self._observe(rows, outcome, started, unscored, phases)
        self._end([row for row in rows if row.finish_reason is not None])
        self._commit_seconds = time.perf_counter() - read_at
        return [dataclasses.replace(step, phases=phases) for step in steps]

    # Prefill

    def _prefill(self) -> list[Step]:
        """Admit waiting requests, and run a chunk of prefill, or all of it if no sequence is active."""
        clock, steps = Clock(), list[Step]()
        self._undisturbed = True
        new = self._admit(steps) if self._prefilling is None and self._waiting else []
        if new:
            steps += self._choose_executor([*self._active.values(), *new])
        elif self._prefilling is None:
            return steps
        self._undisturbed = False
        try:
            if new:
                self._admitted = new
                self._prefilling = self.executor.prefill(new, clock)
                self._admitted = []
            assert self._prefilling is not None
            while not self._prefilling.advance():
                if self._active:
                    clock.lap("target")
                    clock.share([row.stats for row in self._prefilling.rows])
                    return steps
        except FAILURES as error:
            rows, self._admitted = self._admitted or self._rows_in_prefill(), []
            self._prefilling = None
            return steps + [step for row in rows if (step := self._fail(row, error)) is not None]
        outcome = self._prefilling.finish(clock)
        clock.lap("target")
        rows, self._prefilling = self._prefilling.rows, None
        self._active |= {row.slot: row for row in rows}
        self._end([row for row in rows if row.finish_reason is not None])  # those were cancelled
        rows = [row for row in rows if row.finish_reason is None]
        if outcome is None:
            clock.share([row.stats for row in rows])
            return steps
        new_steps = self._append(rows, outcome)
        phases = clock.share([row.stats for row in rows])
        self._end([row for row in rows if row.finish_reason is not None])
        return steps + [dataclasses.replace(step, phases=phases) for step in new_steps]

    def _admit(self, steps: list[Step]) -> list[SequenceState]:
        """Return waiting requests that have got a slot; those that failed before get a step each."""
        free = [slot for slot in range(self.slots) if slot not in self._active]
        new: list[SequenceState] = []
        candidates = [row for row in itertools.islice(self._waiting, len(free)) if row.error is None]
        all_fit = bool(candidates) and self._fits([*self._active.values(), *candidates])
        while self._waiting and (free[len(new) :] or self._waiting[0].error is not None):
            row = self._waiting[0]
            if row.error is None and not all_fit and not self._fits([*self._active.values(), *new, row]):
                if self._active or new:
                    break  # it waits for memory
                row.error = self._too_long(row)
                row.finish_reason = "error"
            self._waiting.popleft()
            if row.error is not None:
                steps.append(row.failed_step())
            else:
                row.slot = free[len(new)]
                new.append(row)
        return new

    def _fits(self, rows: Sequence[SequenceState]) -> bool:
        """Return whether the KV caches have memory for these sequences, however long they become."""
        lengths = [self.max_tokens(row) for row in rows]
        return all(scorer.cache.bytes_for(lengths) <= scorer.cache.budget for scorer in self._scorers())

    def _too_long(self, row: SequenceState) -> Exception:
        tokens = self.max_tokens(row)
        scorer = next(one for one in self._scorers() if one.cache.bytes_for([tokens]) > one.cache.budget)
        return MemoryError(
            f"the KV cache of {tokens} tokens of {type(scorer.base).__name__} needs "
            f"{size(scorer.cache.bytes_for([tokens]))}; its budget is {size(scorer.cache.budget)}: pass a "
            "shorter prompt, a smaller max_new_tokens, or a larger kv_cache_bytes"
        )

    def _scorers(self) -> list[Scorer]:
        draft = None if self.drafter is None else self.drafter.scorer
        return [self.scorer, *([] if draft is None else [draft])]

    def max_tokens(self, row: SequenceState) -> int:
        """Return the most tokens of a sequence in the KV cache, draft tokens included."""
        longest = min(row.prompt_length + row.max_new_tokens, self.scorer.context)
        return longest + self.policy.max_draft_tokens + 1

    def prepare(self, rows: Sequence[SequenceState]) -> None:
        """Prepare for sequences that are about to be added, so that no memory moves later."""
        self._choose_executor(rows)
        longest_first = sorted(rows, key=self.max_tokens, reverse=True)[: self.slots]
        fitting = bisect.bisect_left(
            range(1, len(longest_first) + 1), True, key=lambda n: not self._fits(longest_first[:n])
        )
        if fitting:
            self.executor.prepare(fitting, self.max_tokens(longest_first[0]))

    def _choose_executor(self, rows: Sequence[SequenceState]) -> list[Step]:
        """Choose the first executor that can run these sequences together.

        Returns:
            Steps that were in flight, if the executor changes.
        """
        self._rows_changed = False
        chosen = next(one for one in self.executors if one.unsupported(rows) is None)
        steps = list[Step]()
        if chosen is not self.executor:
            while self._in_flight:
                steps += self._finish(self._in_flight.popleft(), Clock())
            self.executor.detach()
            self.executor = chosen
        return steps

    # Steps

    def _start(self, clock: Clock) -> InFlightStep | None:
        """Start the next step; return None if it must wait for the last outcome."""
        rows, proposer = dict(self._active), self.proposer
        if not rows:
            return None
        step_in_flight = len(self._in_flight) > 0
        active, load = list(rows.values()), self._load(rows)
        if self.executor.drafts:
            chosen = proposer.choose(active, load)
            return self._launch(max(chosen.values(), default=0), rows, load, clock)
        if step_in_flight:
            needs_draft = self._chosen or (proposer.free and not self.policy.idle)
            if self._in_flight[-1].g or needs_draft:
                return None  # the drafter must see the outcome of the step in flight first
            if not proposer.free:
                chosen = proposer.choose(active, load)
                if any(chosen.values()):
                    self._chosen = chosen
                    return None
            return self._launch(0, rows, load, clock)
        started_at = time.perf_counter()
        try:
            proposal = proposer.propose(active, load, self._chosen)
        except WeightsMovedError:  # of the draft model; the target goes on
            self._reset_drafter()
            proposal = proposer.without_draft(active, load)
        self._chosen, seconds = None, time.perf_counter() - started_at
        clock.lap("draft")
        return self._launch(proposal.draft.tokens.shape[1], rows, load, clock, proposal, seconds)

    def _launch(
        self,
        g: int,
        rows: Mapping[int, SequenceState],
        load: Load,
        clock: Clock,
        proposal: Proposal | None = None,
        draft_seconds: float = 0.0,
    ) -> InFlightStep:
        draft = None if proposal is None else proposal.draft
        pending = self.executor.start(rows, g, draft, clock)
        captured = pending.capture_seconds or pending.catch_up_capture_seconds
        self._undisturbed = self._undisturbed and not captured
        waited = proposal is not None and self.executor.is_async
        return InFlightStep(
            pending, g, rows, load, proposal, draft_seconds, self._commit_seconds if waited else 0.0
        )

    def _load(self, rows: Mapping[int, SequenceState]) -> Load:
        executor = self.executor
        load = self.proposer.load(
            list(rows.values()),
            executor.batch(rows),
            executor.captured(rows),
            len(self._in_flight),
            executor.name,
        )
        catch_up_tokens = executor.catch_up_tokens(rows)
        if catch_up_tokens is None:
            return load
        return dataclasses.replace(
            load,
            catch_up_tokens=catch_up_tokens if executor.drafts else load.catch_up_tokens,
            padded_drafts=executor.drafts,
        )

    def _unscored_matches(self, rows: list[SequenceState], outcome: Outcome, g: int) -> list[bool]:
        """Return whether a free drafter would have proposed the right tokens in a step without draft tokens.

        No proposal counts as wrong, because the forward pass would have been just as long.
        """
        may_draft = self.executor.drafts and self.proposer.free and self.policy.max_draft_tokens
        if not (may_draft and g == 0 and rows):
            return []
        next_tokens = [outcome.next_token[row.slot] for row in rows]
        return [match is True for match in matches(self.proposer.propose_unscored(rows), next_tokens)]

    def _commit(self, rows: Sequence[SequenceState], outcome: Outcome, started: InFlightStep) -> list[Step]:
        """Commit the outcome of a step to the KV caches, the drafter and the sequences."""
        for row in rows:
            self.executor.commit(row, started.g, outcome.accepted[row.slot])
        proposal = started.proposal
        if proposal is not None and proposal.state is not None and self.drafter is not None:
            accepted, next_token = (
                torch.tensor([values[slot] for slot in started.rows])
                for values in (outcome.accepted, outcome.next_token)
            )
            self.drafter.commit(accepted, next_token)
        if proposal is not None and proposal.state is not None and proposal.state.after:
            for i, (slot, row) in enumerate(started.rows.items()):
                if row.draft_sampling is not None and not outcome.bad[slot]:
                    after = proposal.state.after
                    row.draft_sampling = after[min(outcome.accepted[slot], len(after) - 1)][i]
        return self._append(rows, outcome)

    def _append(self, rows: Sequence[SequenceState], outcome: Outcome) -> list[Step]:
        """Append new tokens to the sequences; return a step for each."""
        return [self._advance(row, outcome) for row in rows]

    def _advance(self, row: SequenceState, outcome: Outcome) -> Step:
        slot = row.slot
        verdict = outcome.accepted[slot], outcome.next_token[slot], outcome.bad[slot]
        try:
            return advance(row, outcome.drafts[slot], *verdict, self.scorer.context)
        except Exception as error:  # of a user's function, or of a tokenizer
            row.error, row.finish_reason = error, "error"
            return row.failed_step()

    def _observe(
        self,
        rows: Sequence[SequenceState],
        outcome: Outcome,
        started: InFlightStep,
        unscored: list[bool],
        phases: Mapping[str, float],
    ) -> None:
        """Report a step to the policy, with the seconds of the device, or of the host if it took longer."""
        slots, pending, proposal = [row.slot for row in rows], started.pending, started.proposal
        remaining = dict(zip(started.rows, started.load.remaining_draft_tokens or (), strict=True))
        lengths = [len(outcome.drafts[slot]) for slot in slots]
        requested: Sequence[int] = [started.g] * len(slots)  # the target scores g positions, padding too
        draft_steps, draft_seconds, unscored_correct = 0, 0.0, list[bool | None](unscored)
        if proposal is not None:
            indices = [list(started.rows).index(slot) for slot in slots]
            requested = [proposal.requested[i] for i in indices] if proposal.requested else lengths
            if proposal.state is not None:
                draft_steps, draft_seconds = proposal.draft_steps, started.draft_seconds
            if proposal.unscored:
                next_tokens = [outcome.next_token[slot] for slot in slots]
                unscored_correct = matches([proposal.unscored[i] for i in indices], next_tokens)
        seconds: float | None = sum(phases.values())
        if pending.capture_seconds:
            seconds = None
        elif self.executor.is_async and pending.seconds is not None:
            # Host and device work at the same time, and the slower one sets the pace. Wall time counts only
            # if nothing else happened in it: no prefill, capture or catch-up. With a drafter on the host, the
            # time after the outcome counts as the next step's idle time.
            wall = sum(phases.values()) - (phases["other"] if proposal is not None else 0.0)
            undisturbed = self._undisturbed and not pending.catch_up_seconds
            seconds = max(pending.seconds + draft_seconds, wall if undisturbed else 0.0)
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
                catch_up_seconds=pending.catch_up_seconds,
                idle_seconds=started.idle_seconds,
                requested=requested,
                unscored_correct=unscored_correct,
                capture_seconds=pending.capture_seconds,
                catch_up_capture_seconds=pending.catch_up_capture_seconds,
            )
        )

    # Ends

    def _end(self, rows: Sequence[SequenceState]) -> None:
        """Free the slots of sequences that have ended."""
        if rows and self._chosen is not None:  # the choice of a step that has not started is withdrawn
            self._chosen = None
            self.policy.withdraw()
        for row in rows:
            try:
                self._free(row, keep=row.error is None)
            finally:
                del self._active[row.slot]
            self._rows_changed = True

    def _free(self, row: SequenceState, keep: bool) -> None:
        self.executor.release(row, keep)
        if self.drafter is not None:
            self.drafter.reset([row.slot])
        self.policy.reset([row.slot])

    def _fail(self, row: SequenceState, error: Exception) -> Step | None:
        """End a sequence that could not be prefilled; return its step, unless it was cancelled."""
        self._free(row, keep=False)
        self._rows_changed = True
        if row.finish_reason is not None:
            return None
        row.error, row.finish_reason = error, "error"
        return row.failed_step()

    def _fail_newest(self, error: Exception) -> list[Step]:
        """End the newest sequence, because a step could not start; return its step."""
        self._reset_drafter()
        newest = max(self._active.values(), key=lambda row: row.index)
        del self._active[newest.slot]
        step = self._fail(newest, error)
        return [] if step is None else [step]

    def _reset_drafter(self) -> None:
        """Let the drafter start again, because its last proposal was not verified."""
        self._chosen = None
        if self.drafter is not None:
            self.drafter.reset(list(self._active))

"""The scheduler: the one loop that decodes all sequences.

It admits requests to slots, and prefills them in chunks between decode steps. For each step, the draft-length
policy chooses how many tokens to draft, and an executor runs the step. The scheduler then appends the
accepted tokens. It ends sequences exactly where decoding without speculation would end them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch

from outpace.draft.base import Drafter
from outpace.engine.admission import Admission
from outpace.engine.drafting import Proposal, Proposer, matches
from outpace.engine.executor import Executor, Outcome
from outpace.engine.in_flight import InFlightStep
from outpace.engine.prompt_logprobs import ScoredPrefilling
from outpace.engine.sequence import SequenceState, Step, advance
from outpace.engine.stats import Clock
from outpace.models.scorer import Scorer, WeightsMovedError
from outpace.policy import DraftLengthPolicy, Load

# Errors that end the request of a prefill, or the newest sequence of a decode step, and no others
FAILURES = MemoryError, torch.OutOfMemoryError, WeightsMovedError
CANCELLED = "cancelled"  # finish reason
MAX_IN_FLIGHT = 2  # steps: the host reads one outcome while the next step runs


class Scheduler:
    """All sequences of a decoder, which join and leave at any step.

    Call it from one thread at a time.

    Args:
        scorers: The target, and the draft model if there is one.
        drafter: The drafter, or None.
        policy: The draft-length policy.
        executor: The executor that runs the steps.
        slots: Most sequences at a time.
        on_close: Called once when the scheduler is closed.
    """

    _closed = True  # until it is complete

    def __init__(
        self,
        scorers: Sequence[Scorer],
        drafter: Drafter | None,
        policy: DraftLengthPolicy,
        executor: Executor,
        slots: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.scorers, self.drafter, self.policy = scorers, drafter, policy
        self.executor, self._on_close = executor, on_close
        self.proposer = Proposer(scorers[0], drafter, policy)
        self._admission = Admission(scorers, policy.max_draft_tokens, slots, executor.padded)
        self._num_added = 0
        self._prefilling: ScoredPrefilling | None = None
        self._active: dict[int, SequenceState] = {}  # by slot
        self._in_flight: deque[InFlightStep] = deque()
        self._undisturbed = True  # whether the last step had no prefill, capture or catch-up before it
        self._chosen: dict[int, int] | None = None  # number of draft tokens by slot, for a step that waits
        self._commit_seconds = 0.0  # of the host, after it read the last outcome
        self._explored_seconds = policy.exploration_seconds  # that the statistics contain already
        self._caches_valid = True  # whether the KV caches agree with the sequences' tokens
        self._in_step = False  # a user's function may call the scheduler in a step
        self._closed = False

    # Requests

    def add(self, request: SequenceState) -> int:
        """Add a request, which waits for a free slot and for memory of the KV caches.

        Args:
            request: A request of ``Decoder.requests``.

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
        self._admission.waiting.append(request)
        return request.index

    def cancel(self, request_id: int) -> None:
        """End a sequence at once. No further ``Step`` is returned for it.

        Args:
            request_id: The id that ``add`` returned.

        Raises:
            ValueError: No unfinished sequence has this id.
        """
        for waiting in self._admission.waiting:
            if waiting.index == request_id:
                self._admission.waiting.remove(waiting)
                return
        for sequence in self._with_slots():
            if sequence.index == request_id and sequence.finish_reason is None:
                sequence.finish_reason = CANCELLED
                if not self._in_step:
                    self._end_cancelled()
                return
        raise ValueError(f"request_id: got {request_id}; it must be the id of an unfinished sequence")

    def _end_cancelled(self) -> None:
        """Free the slots of cancelled sequences; those in a prefill are freed when none of it is left."""
        self._end([one for one in self._active.values() if one.finish_reason is not None])
        if self._in_prefill() and all(one.finish_reason is not None for one in self._in_prefill()):
            for sequence in self._in_prefill():
                self._free(sequence, keep=False)
            self._prefilling = None

    def _check_usable(self) -> None:
        if self._in_step:
            raise RuntimeError("the scheduler runs a step; call it again after that step")
        if self._closed:
            raise RuntimeError("the scheduler is closed; create another one")
        if not self._caches_valid:
            raise RuntimeError("an earlier step of the scheduler failed; close it, and create another one")

    @property
    def unfinished(self) -> int:
        """Number of sequences that wait or are being generated."""
        return len(self._admission.waiting) + sum(one.finish_reason is None for one in self._with_slots())

    def _with_slots(self) -> list[SequenceState]:
        """Return the sequences that have slots."""
        return [*self._active.values(), *self._in_prefill()]

    def _in_prefill(self) -> list[SequenceState]:
        return [] if self._prefilling is None else self._prefilling.sequences

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sequences and free their slots.

        Raises:
            RuntimeError: A step runs.
        """
        if self._closed:
            return
        if self._in_step:
            raise RuntimeError("the scheduler runs a step; close it after that step")
        self._closed = True
        try:
            with contextlib.ExitStack() as stack:  # one failure does not keep the rest from being freed
                for cache in (one for scorer in self.scorers for one in scorer.caches):
                    stack.callback(cache.trim)
                for sequence in self._with_slots():
                    stack.callback(self._free, sequence, self._caches_valid and sequence.slot in self._active)
                for started in self._in_flight:
                    stack.callback(started.pending.read)
        finally:
            if self._on_close is not None:
                self._on_close()

    def __del__(self) -> None:
        self.close()

    # The loop

    def step(self) -> list[Step]:
        """Run a chunk of prefill if prompts wait, then a decode step.

        Returns:
            New steps. A sequence may have none, or two: its first token, and a decode step.

        Raises:
            RuntimeError: The scheduler is closed, or an earlier step has failed.
        """
        self._check_usable()
        self._caches_valid, self._in_step = False, True
        try:
            steps = self._step()
            self._end_cancelled()
            self._caches_valid = True
        finally:
            self._in_step = False
        return steps

    def _step(self) -> list[Step]:
        steps = self._prefill()
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
        return steps

    def _finish(self, started: InFlightStep, clock: Clock) -> list[Step]:
        """Read the outcome of a step, commit it, and report it to the policy."""
        outcome = started.pending.read()
        read_at = time.perf_counter()
        clock.lap("target")
        # A sequence may have ended after this step started: the outcome of its slot is dropped.
        sequences = [one for slot, one in started.sequences.items() if self._active.get(slot) is one]
        if unscored := self._unscored_matches(sequences, outcome, started.g):
            clock.lap("draft")
        steps = self._commit(sequences, outcome, started)
        phases = clock.share([one.stats for one in sequences])
        ended = [one for one in sequences if one.finish_reason is not None]
        if sequences:
            timed = {**phases, "other": 0.0} if ended else phases  # "other" has their end
            self.policy.observe(started.report(sequences, outcome, unscored, timed, self._undisturbed))
            self._count(sequences, outcome, sum(phases.values()))
        self._end(ended)
        self._commit_seconds = time.perf_counter() - read_at
        return [dataclasses.replace(step, phases=phases) for step in steps]

    def _count(self, sequences: Sequence[SequenceState], outcome: Outcome, seconds: float) -> None:
        """Add a step, and a share of what exploration took, to the statistics of each sequence."""
        explored = self.policy.exploration_seconds - self._explored_seconds
        self._explored_seconds = self.policy.exploration_seconds
        for sequence in sequences:
            drafted = len(outcome.drafts[sequence.slot])
            sequence.stats.time_step(drafted, seconds)
            sequence.stats.exploration_seconds += explored / len(sequences)

    # Prefill

    def prepare(self, sequences: Sequence[SequenceState]) -> None:
        """Prepare for sequences that are about to be added, so that no memory moves later.

        It does nothing if other sequences have slots.
        """
        if self._with_slots():
            return
        slots, tokens = self._admission.reservation(sequences)
        if slots:
            self.executor.prepare(slots, tokens)

    def _prefill(self) -> list[Step]:
        """Admit waiting requests, and run a chunk of prefill, or all of it if no sequence is active."""
        steps = list[Step]()
        self._undisturbed = True
        if self._prefilling is None and self._admission.waiting:
            new, failed = self._admission.admit(self._active)
            steps += [one.failed_step() for one in failed]
            self._prefilling = ScoredPrefilling(self.executor, self.scorers[0], new) if new else None
        if self._prefilling is None:
            return steps
        self._undisturbed, clock = False, Clock()
        try:
            while not self._prefilling.advance(clock):
                if self._active:
                    clock.lap("target")
                    clock.share([one.stats for one in self._prefilling.sequences])
                    return steps
        except FAILURES as error:
            sequences, self._prefilling = self._prefilling.sequences, None
            return steps + self._fail_prefill(sequences, error)
        outcome = self._prefilling.finish(clock)
        clock.lap("target")
        sequences, self._prefilling = self._prefilling.sequences, None
        self._active |= {one.slot: one for one in sequences}
        self._end([one for one in sequences if one.finish_reason is not None])  # those were cancelled
        sequences = [one for one in sequences if one.finish_reason is None]
        first = [] if outcome is None else self._append(sequences, outcome)
        phases = clock.share([one.stats for one in sequences])
        self._end([one for one in sequences if one.finish_reason is not None])
        return steps + [dataclasses.replace(step, phases=phases) for step in first]

    # Steps

    def _start(self, clock: Clock) -> InFlightStep | None:
        """Start the next step; return None if it must wait for the last outcome."""
        sequences, proposer = dict(self._active), self.proposer
        if not sequences:
            return None
        active = list(sequences.values())
        if self._in_flight and self.executor.waits(active):
            return None
        load = self.executor.load(sequences, proposer.load(active, len(self._in_flight)))
        if self.executor.drafts:
            chosen = proposer.choose(active, load)
            g = max(chosen.values(), default=0)
            limits = chosen if any(one.num_draft_tokens is not None for one in active) else None
            try:
                return self._launch(g, sequences, load, clock, limits=limits)
            except WeightsMovedError:  # if those are the draft model's, the target goes on
                return self._launch(0, sequences, load, clock)
        if self._in_flight:
            needs_draft = self._chosen or (proposer.free and not proposer.is_idle(active))
            if self._in_flight[-1].g or needs_draft:
                return None  # the drafter must see the outcome of the step in flight first
            if not proposer.free:
                chosen = proposer.choose(active, load)
                if any(chosen.values()):
                    self._chosen = chosen
                    return None
            return self._launch(0, sequences, load, clock)
        started_at = time.perf_counter()
        try:
            proposal = proposer.propose(active, load, self._chosen)
        except FAILURES:  # the target goes on
            self._reset_drafter()
            proposal = proposer.without_draft(active)
        self._chosen, seconds, setup = None, time.perf_counter() - started_at, 0.0
        if self.drafter is not None and proposal.state is not None:
            setup = self.drafter.setup_seconds
        clock.lap("draft")
        g = proposal.draft.tokens.shape[1]
        return self._launch(g, sequences, load, clock, proposal, seconds - setup, setup)

    def _launch(
        self,
        g: int,
        sequences: Mapping[int, SequenceState],
        load: Load,
        clock: Clock,
        proposal: Proposal | None = None,
        draft_seconds: float = 0.0,
        setup_seconds: float = 0.0,
        limits: Mapping[int, int] | None = None,
    ) -> InFlightStep:
        executor, draft = self.executor, None if proposal is None else proposal.draft
        pending = executor.start(sequences, g, draft, clock, limits)
        captures = pending.capture_seconds + pending.catch_up_capture_seconds + setup_seconds
        self._undisturbed = self._undisturbed and not captures
        is_async, limits = executor.is_async, limits or {}
        waited = self._commit_seconds if proposal is not None and is_async else 0.0
        return InFlightStep(
            pending, g, sequences, load, is_async, limits, captures, proposal, draft_seconds, waited
        )

    def _unscored_matches(self, sequences: list[SequenceState], outcome: Outcome, g: int) -> list[bool]:
        """Return whether a free drafter would have proposed the right tokens in a step without draft tokens.

        No proposal counts as wrong, because the forward pass would have been just as long.
        """
        may_draft = self.executor.drafts and self.proposer.free and self.policy.max_draft_tokens
        if not (may_draft and g == 0 and sequences):
            return []
        next_tokens = [outcome.next_token[one.slot] for one in sequences]
        return [match is True for match in matches(self.proposer.propose_unscored(sequences), next_tokens)]

    def _commit(
        self, sequences: Sequence[SequenceState], outcome: Outcome, started: InFlightStep
    ) -> list[Step]:
        """Commit the outcome of a step to the KV caches, the drafter and the sequences."""
        for sequence in sequences:
            self.executor.commit(sequence, started.g, outcome.accepted[sequence.slot])
        state = None if started.proposal is None else started.proposal.state
        if state is not None and self.drafter is not None:
            accepted, next_token = (
                torch.tensor([values[slot] for slot in started.sequences])
                for values in (outcome.accepted, outcome.next_token)
            )
            self.drafter.commit(accepted, next_token)
        if state is not None and state.after:
            for i, (slot, sequence) in enumerate(started.sequences.items()):
                if sequence.draft_sampling is not None:
                    sequence.draft_sampling = state.after[min(outcome.accepted[slot], len(state.after) - 1)][
                        i
                    ]
        return self._append(sequences, outcome)

    def _append(self, sequences: Sequence[SequenceState], outcome: Outcome) -> list[Step]:
        """Append new tokens to the sequences; return a step for each."""
        steps = list[Step]()
        for slot, sequence in ((one.slot, one) for one in sequences):
            verdict = outcome.accepted[slot], outcome.next_token[slot], outcome.bad[slot]
            before = len(sequence.tokens)
            if sequence.finish_reason == CANCELLED:  # by a user's function, for another sequence
                continue
            try:
                error = outcome.errors.get(slot)
                step = advance(sequence, outcome.drafts[slot], *verdict, self.scorers[0].context, error)
            except Exception as raised:  # of a user's function, or of a tokenizer
                sequence.error, sequence.finish_reason = raised, "error"
                step = sequence.failed_step(len(sequence.tokens) - before)
            if sequence.finish_reason != CANCELLED:
                steps.append(step)
        return steps

    # Ends

    def _end(self, sequences: Sequence[SequenceState]) -> None:
        """Free the slots of sequences that have ended."""
        if sequences:
            self._chosen = None  # it was made for other slots
        for sequence in sequences:
            try:
                self._free(sequence, keep=sequence.error is None)
            finally:
                del self._active[sequence.slot]

    def _free(self, sequence: SequenceState, keep: bool) -> None:
        self.executor.release(sequence, keep)
        if self.drafter is not None:
            self.drafter.reset([sequence.slot])
        self.policy.reset([sequence.slot])

    def _fail_prefill(self, sequences: Sequence[SequenceState], error: Exception) -> list[Step]:
        """End the sequence of a prefill; of several ones, let each be prefilled alone."""
        if len(sequences) == 1:
            step = self._fail(sequences[0], error)
            return [] if step is None else [step]
        for sequence in sequences:
            self._free(sequence, keep=False)
        self._admission.retry_alone([one for one in sequences if one.finish_reason is None])
        return []

    def _fail(self, sequence: SequenceState, error: Exception) -> Step | None:
        """End a sequence that could not be prefilled; return its step, unless it was cancelled."""
        self._free(sequence, keep=False)
        if sequence.finish_reason is not None:
            return None
        sequence.error, sequence.finish_reason = error, "error"
        return sequence.failed_step()

    def _fail_newest(self, error: Exception) -> list[Step]:
        """End the newest sequence, because a step could not start; return its step."""
        self._reset_drafter()
        newest = max(self._active.values(), key=lambda sequence: sequence.index)
        del self._active[newest.slot]
        step = self._fail(newest, error)
        return [] if step is None else [step]

    def _reset_drafter(self) -> None:
        """Let a drafter on the host start again, because its last proposal was not verified."""
        self._chosen = None
        if self.drafter is not None and not self.executor.drafts:
            self.drafter.reset(list(self._active))

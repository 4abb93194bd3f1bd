"""A step between its start and its commit, and what the draft-length policy learns from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outpace.engine.drafting import Proposal, matches
from outpace.engine.executor import Outcome, Pending
from outpace.engine.sequence import SequenceState
from outpace.policy import Load, StepOutcome


@dataclass(frozen=True)
class InFlightStep:
    """A step that has started, and whose outcome is not committed yet."""

    pending: Pending
    g: int
    sequences: Mapping[int, SequenceState]  # sequences that take part, by slot
    load: Load
    is_async: bool  # whether the step runs while the host does something else
    limits: Mapping[int, int]  # draft tokens that the target scores, by slot; others have g
    proposal: Proposal | None = None  # draft tokens of a drafter on the host
    draft_seconds: float = 0.0  # of that drafter
    idle_seconds: float = 0.0  # before the step, while the device waited for the host

    def report(
        self,
        sequences: Sequence[SequenceState],
        outcome: Outcome,
        unscored: Sequence[bool],
        phases: Mapping[str, float],
        undisturbed: bool,
    ) -> StepOutcome:
        """Return what the policy learns from this step.

        Args:
            sequences: The sequences that had not ended before the step.
            outcome: Outcome of the step.
            unscored: Whether a free drafter would have been right in a step without draft tokens.
            phases: Seconds of the host by phase.
            undisturbed: Whether those seconds are free of prefills and captures.
        """
        slots, pending, proposal = [one.slot for one in sequences], self.pending, self.proposal
        load, indices = self.load, list(range(len(slots)))
        if len(slots) < len(self.sequences):
            order = {slot: i for i, slot in enumerate(self.sequences)}
            indices = [order[slot] for slot in slots]
            if load.remaining_draft_tokens:
                remaining = load.remaining_draft_tokens
                load = replace(load, remaining_draft_tokens=tuple(remaining[i] for i in indices))
        lengths = [len(outcome.drafts[slot]) for slot in slots]
        requested: Sequence[int] = [self.limits.get(slot, self.g) for slot in slots]  # padding too
        draft_steps, draft_seconds, unscored_correct = 0, 0.0, list[bool | None](unscored)
        if proposal is not None:
            requested = [proposal.requested[i] for i in indices] if proposal.requested else lengths
            if proposal.state is not None:
                draft_steps, draft_seconds = proposal.draft_steps, self.draft_seconds
            if proposal.unscored:
                next_tokens = [outcome.next_token[slot] for slot in slots]
                unscored_correct = matches([proposal.unscored[i] for i in indices], next_tokens)
        return StepOutcome(
            slots,
            lengths,
            [outcome.accepted[slot] for slot in slots],
            self.g,
            load,
            self._seconds(draft_seconds, phases, undisturbed),
            draft_seconds=draft_seconds,
            draft_steps=draft_steps,
            catch_up_seconds=pending.catch_up_seconds,
            idle_seconds=self.idle_seconds,
            requested=requested,
            unscored_correct=unscored_correct,
            capture_seconds=pending.capture_seconds,
            catch_up_capture_seconds=pending.catch_up_capture_seconds,
            forced=any(one.num_draft_tokens for one in self.sequences.values()),
        )

    def _seconds(self, draft_seconds: float, phases: Mapping[str, float], undisturbed: bool) -> float | None:
        """Return the seconds of the device, or of the host if it took longer; None after a capture."""
        if self.pending.capture_seconds:
            return None
        if not self.is_async or self.pending.seconds is None:
            return sum(phases.values())
        # Host and device work at the same time, and the slower one sets the pace. Wall time counts only if
        # nothing else happened in it: no prefill, capture or catch-up. With a drafter on the host, the time
        # after the outcome counts as the next step's idle time.
        wall = sum(phases.values()) - (phases["other"] if self.proposal is not None else 0.0)
        undisturbed = undisturbed and not self.pending.catch_up_seconds
        return max(self.pending.seconds + draft_seconds, wall if undisturbed else 0.0)

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
    capture_seconds: float = 0.0  # before the step
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
            phases: Seconds of the host by phase, without the end of sequences.
            undisturbed: Whether those seconds are free of prefills and captures.
        """
        slots, proposal, load = [one.slot for one in sequences], self.proposal, self.load
        indices = list(range(len(slots)))
        if len(slots) < len(self.sequences):
            order = {slot: i for i, slot in enumerate(self.sequences)}
            indices = [order[slot] for slot in slots]
            if load.remaining_draft_tokens:
                remaining = load.remaining_draft_tokens
                load = replace(load, remaining_draft_tokens=tuple(remaining[i] for i in indices))
        drafted = [len(outcome.drafts[slot]) for slot in slots]
        accepted = [outcome.accepted[slot] for slot in slots]
        tested, correct = [self.limits.get(slot, self.g) for slot in slots], list(accepted)  # padding too
        draft_seconds, idle_seconds, matched = 0.0, 0.0, list[bool | None](unscored)
        if proposal is not None:
            tested = [proposal.requested[i] for i in indices] if proposal.requested else list(drafted)
            if proposal.state is not None:
                draft_seconds, idle_seconds = self.draft_seconds, self.idle_seconds
            if proposal.unscored:
                next_tokens = [outcome.next_token[slot] for slot in slots]
                matched = matches([proposal.unscored[i] for i in indices], next_tokens)
        for i, match in enumerate(matched):
            if match is not None and correct[i] == tested[i]:
                tested[i], correct[i] = tested[i] + 1, correct[i] + match
        seconds = self._seconds(draft_seconds, phases, undisturbed)
        is_part = self.g > 0 and proposal is not None and bool(proposal.requested)  # of a step with this g
        if seconds is not None:
            seconds += idle_seconds if is_part else -draft_seconds
        return StepOutcome(
            slots,
            drafted,
            accepted,
            self.g,
            load,
            seconds,
            tested,
            correct,
            proposal_seconds=0.0 if is_part else draft_seconds + idle_seconds,
            catch_up_seconds=self.pending.catch_up_seconds,
            capture_seconds=self.capture_seconds,
            forced=any(one.num_draft_tokens for one in self.sequences.values()),
        )

    def _seconds(self, draft_seconds: float, phases: Mapping[str, float], undisturbed: bool) -> float | None:
        """Return the seconds of the device, or of the host if it took longer; None after a capture."""
        if self.capture_seconds:
            return None
        # Without a drafter on the host, the phase "draft" is the comparison of tokens that were not scored
        compared = phases.get("draft", 0.0) if self.proposal is None else 0.0
        if not self.is_async or self.pending.seconds is None:
            return sum(phases.values()) - compared - self.pending.catch_up_seconds
        # Host and device work at the same time, and the slower one sets the pace. Wall time counts only if
        # nothing else happened in it: no prefill, capture or catch-up. With a drafter on the host, the time
        # after the outcome counts as the next step's idle time.
        wall = sum(phases.values()) - (compared if self.proposal is None else phases["other"])
        undisturbed = undisturbed and not self.pending.catch_up_seconds
        return max(self.pending.seconds + draft_seconds, wall if undisturbed else 0.0)

"""Drafting: a drafter proposes as many tokens as the draft-length policy chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.draft.base import Draft, Drafter, State, check_draft
from outpace.engine.sequence import SequenceState
from outpace.models.causal import CausalScorer
from outpace.policy import DraftLengthPolicy, Hint, Load, StepOutcome
from outpace.verification import Rule


@dataclass(frozen=True)
class Proposal:
    """Draft tokens to be scored by the target.

    Attributes:
        draft: The draft tokens.
        load: The load of the forward pass.
        state: The drafter's input. None if the drafter was not called.
        requested: Draft tokens of each sequence that drafting time was spent on, proposed or not.
        draft_steps: Steps of the drafter. 0 if it is free.
        unscored: For each sequence the first proposed token that is not in the draft, if there is one.
    """

    draft: Draft
    load: Load
    state: State | None = None
    requested: Sequence[int] = ()
    draft_steps: int = 0
    unscored: Sequence[int | None] = ()

    def outcome(
        self,
        rows: Sequence[SequenceState],
        accepted: Sequence[int],
        next_token: Sequence[int],
        phases: dict[str, float],
    ) -> StepOutcome:
        """Return the outcome of the step, as the draft-length policy observes it."""
        return StepOutcome(
            [row.slot for row in rows],
            list(self.draft.lengths or [0] * len(rows)),
            accepted,
            self.draft.tokens.shape[1],
            self.load,
            sum(phases.values()),
            phases["draft"] if self.state is not None else 0.0,
            self.draft_steps,
            requested=self.requested,
            unscored_correct=matches(self.unscored, next_token) if self.unscored else (),
        )


def matches(proposals: Sequence[int | None], tokens: Sequence[int]) -> list[bool | None]:
    """Return whether each draft token equals the generated token; None where there was no draft token."""
    return [
        None if proposal is None else proposal == token
        for proposal, token in zip(proposals, tokens, strict=True)
    ]


class Proposer:
    """A drafter and a draft-length policy, which together draft for sequences.

    A free drafter proposes first, and the policy then chooses how many of its tokens are scored.
    """

    def __init__(
        self, scorer: CausalScorer, drafter: Drafter | None, policy: DraftLengthPolicy, rule: Rule
    ) -> None:
        self.scorer, self.drafter, self.policy, self.rule = scorer, drafter, policy, rule
        self.free = bool(getattr(drafter, "free", False))
        self._last_drafted: Sequence[
            tuple[SequenceState, int]
        ] = ()  # sequences of the last draft, and their lengths
        self._num_read: dict[
            int, tuple[SequenceState, int]
        ] = {}  # by slot: a sequence, and its tokens that were read

    def load(
        self,
        rows: Sequence[SequenceState],
        batch: int | None = None,
        captured: frozenset[int] | None = None,
        in_flight: int = 0,
        executor: str = "",
    ) -> Load:
        """Return the load of the next forward pass.

        Args:
            rows: The active sequences.
            batch: Slots that the forward pass covers, if some of them are idle.
            captured: Values of g that need no capture, if others do.
            in_flight: Steps that have started and not ended.
            executor: The executor. Times measured in one executor do not hold for the other.
        """
        longest = max(len(row.tokens) for row in rows)
        remaining = tuple(self.remaining_draft_tokens(rows, in_flight))
        return Load(batch or len(rows), longest, self._num_unread(rows), captured, remaining, executor)

    def remaining_draft_tokens(self, rows: Sequence[SequenceState], in_flight: int = 0) -> list[int]:
        """Return the number of draft tokens that each sequence can use after the steps in flight."""
        return [
            min(row.max_new_tokens - row.stats.new_tokens, self.scorer.context - len(row.tokens))
            - 1
            - in_flight
            for row in rows
        ]

    def choose(self, rows: Sequence[SequenceState], load: Load) -> dict[int, int]:
        """Return the number of draft tokens that the policy chooses for each slot.

        This is for drafters that are not free.
        """
        if self.drafter is None:
            return {}
        slots = [row.slot for row in rows]
        return dict(zip(slots, self.policy.choose(slots, load=load), strict=True))

    def propose(
        self, rows: Sequence[SequenceState], load: Load, chosen: Mapping[int, int] | None = None
    ) -> Proposal:
        """Propose draft tokens for each sequence, within the limits of policy, context and remaining tokens.

        Args:
            rows: The active sequences.
            load: The load of the forward pass.
            chosen: The number of draft tokens by slot. By default the policy chooses.
        """
        remaining = self.remaining_draft_tokens(rows)
        if self.drafter is None or (self.free and self.policy.idle):
            return self._no_draft(rows, load)
        if self.free:
            limits = [min(self.policy.max_draft_tokens, most) for most in remaining]
            return self._propose_free(rows, load, limits)
        chosen = self.choose(rows, load) if chosen is None else chosen
        limits = [min(chosen.get(row.slot, 0), most) for row, most in zip(rows, remaining, strict=True)]
        if max(limits) < 1:
            return self._no_draft(rows, load)
        state = self.state(rows, limits)
        draft = self._call_drafter(state, limits)
        self._last_drafted = [(row, len(row.tokens)) for row in rows]
        uninterrupted = draft.steps is None  # the policy did not stop the drafter
        return Proposal(
            self._truncated(draft, limits),
            load,
            state,
            limits if uninterrupted else list(draft.lengths or limits),
            max(limits) if draft.steps is None else draft.steps,
        )

    def _propose_free(self, rows: Sequence[SequenceState], load: Load, limits: list[int]) -> Proposal:
        """Return a free drafter's tokens, as many of them as the policy chooses."""
        if max(limits) < 1:
            return self._no_draft(rows, load)
        state = self.state(rows, limits)
        draft = self._call_drafter(state, limits)
        if draft.logits is not None:
            raise ValueError(
                f"draft: {type(self.drafter).__name__} is free and samples its tokens. How many are scored "
                "would depend on them, which biases the output. Only a drafter that chooses may be free"
            )
        available = list(draft.lengths or [draft.tokens.shape[1]] * len(rows))
        confidence = draft.confidence or [1.0] * len(rows)
        slots = [row.slot for row in rows]
        chosen = self.policy.choose(slots, load=load, hint=Hint(available, confidence))
        unscored: list[int | None] = [
            proposal[g] if g < most else None
            for proposal, g, most in zip(draft.tokens.tolist(), chosen, available, strict=True)
        ]
        return Proposal(self._truncated(draft, chosen), load, state, unscored=unscored)

    def _num_unread(self, rows: Sequence[SequenceState]) -> int:
        """Count the tokens that a drafter which is not free has not seen yet."""
        if self.drafter is None or self.free:
            return 0
        # Tokens that follow from its last draft count as read. They may not be known yet.
        self._num_read |= {row.slot: (row, len(row.tokens)) for row, _ in self._last_drafted}
        self._last_drafted = [
            (row, length) for row, length in self._last_drafted if len(row.tokens) == length
        ]
        num_read = (self._num_read.get(row.slot, (None, 0)) for row in rows)
        return sum(
            len(row.tokens) - (read if owner is row else 0)
            for row, (owner, read) in zip(rows, num_read, strict=True)
        )

    def propose_unscored(self, rows: Sequence[SequenceState]) -> list[int | None]:
        """Return the next token that a free drafter proposes for each sequence, without scoring it."""
        assert self.drafter is not None
        proposals = self.drafter.propose(self.state(rows, [1] * len(rows), torch.device("cpu")), 1)
        lengths = proposals.lengths or [1] * len(rows)
        return [
            tokens[0] if length else None
            for tokens, length in zip(proposals.tokens.tolist(), lengths, strict=True)
        ]

    def _call_drafter(self, state: State, limits: list[int]) -> Draft:
        assert self.drafter is not None
        draft = self.drafter.propose(state, max(limits))
        check_draft(draft, self.drafter, len(limits), self.scorer.vocab_size, self.scorer.device)
        proposed = [draft.tokens.shape[1]] * len(limits) if draft.lengths is None else map(int, draft.lengths)
        return replace(draft, lengths=[min(pair) for pair in zip(limits, proposed, strict=True)])

    @staticmethod
    def _truncated(draft: Draft, limits: list[int]) -> Draft:
        """Return the first draft tokens of each sequence, at most its limit."""
        lengths = [min(pair) for pair in zip(limits, draft.lengths or limits, strict=True)]
        g = max(lengths)
        logits = None if draft.logits is None else draft.logits[:, :g]
        precomputed = None if draft.precomputed is None else draft.precomputed.first(g)
        return Draft(draft.tokens[:, :g], logits, lengths, precomputed)

    def _no_draft(self, rows: Sequence[SequenceState], load: Load) -> Proposal:
        return Proposal(Draft.chosen([[] for _ in rows], self.scorer.device), load)

    def state(
        self, rows: Sequence[SequenceState], limits: list[int], device: torch.device | None = None
    ) -> State:
        """Return the drafter's input for these sequences."""
        device = device or self.scorer.device
        own = [row.sampling if row.draft_sampling is None else row.draft_sampling for row in rows]
        return State(
            [row.slot for row in rows],
            [row.tokens for row in rows],
            [row.prompt_length for row in rows],
            # A processor must not learn from rejected draft tokens, so it works on a copy.
            [one.fork() if one.processors else one for one in own],
            seeds(rows, device),
            limits,
            self.scorer.vocab_size,
            device,
            self.rule.name == "match",
            [row.source for row in rows],
            self.policy.enough if self.policy.asks else None,
        )


def seeds(rows: Sequence[SequenceState], device: torch.device) -> Tensor:
    """Return the seeds of sequences, ``[R]``."""
    return on_device([row.seed for row in rows], torch.int64, device)

"""Drafting: a drafter proposes as many tokens as the draft-length policy chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.draft.base import Draft, Drafter, State, check_draft
from outpace.engine.sequence import Row
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
        asked: Draft tokens of each sequence that were paid for, whether they were proposed or not.
        steps: Steps of the drafter. 0 if it is free.
        spare: For each sequence the draft token after those in the draft, if there is one.
    """

    draft: Draft
    load: Load
    state: State | None = None
    asked: Sequence[int] = ()
    steps: int = 0
    spare: Sequence[int | None] = ()

    def done(
        self, rows: Sequence[Row], accepted: Sequence[int], next_token: Sequence[int], spent: dict[str, float]
    ) -> StepOutcome:
        """Return the outcome of the step, as the draft-length policy observes it."""
        return StepOutcome(
            [row.slot for row in rows],
            list(self.draft.lengths or [0] * len(rows)),
            accepted,
            self.draft.tokens.shape[1],
            self.load,
            sum(spent.values()),
            spent["draft"] if self.state is not None else 0.0,
            self.steps,
            asked=self.asked,
            unused=right(self.spare, next_token) if self.spare else (),
        )


def right(proposals: Sequence[int | None], tokens: Sequence[int]) -> list[bool | None]:
    """Return whether each draft token equals the token that came; None where there was none."""
    return [None if one is None else one == token for one, token in zip(proposals, tokens, strict=True)]


class Proposer:
    """A drafter and a draft-length policy, which together draft for sequences.

    A free drafter proposes first, and the policy then chooses how many of its tokens are scored.
    """

    def __init__(
        self, scorer: CausalScorer, drafter: Drafter | None, length: DraftLengthPolicy, rule: Rule
    ) -> None:
        self.scorer, self.drafter, self.length, self.rule = scorer, drafter, length, rule
        self.free = bool(getattr(drafter, "free", False))
        self._asked_last: Sequence[tuple[Row, int]] = ()  # sequences of the last draft, and their lengths
        self._read: dict[int, tuple[Row, int]] = {}  # by slot: a sequence, and its tokens that were read

    def load(
        self,
        rows: Sequence[Row],
        batch: int | None = None,
        ready: frozenset[int] | None = None,
        coming: int = 0,
        way: str = "",
    ) -> Load:
        """Return the load of the next forward pass.

        Args:
            rows: The active sequences.
            batch: Slots that the forward pass covers, if some of them are idle.
            ready: Draft lengths that need no capture, if others do.
            coming: Steps that are under way.
            way: The executor. Times measured in one executor do not hold for the other.
        """
        longest, room = max(len(row.tokens) for row in rows), tuple(self.room(rows, coming))
        return Load(batch or len(rows), longest, self._unread(rows), ready, room, way)

    def room(self, rows: Sequence[Row], coming: int = 0) -> list[int]:
        """Return the draft tokens that each sequence can use after the steps that are under way."""
        return [
            min(row.max_new_tokens - row.stats.new_tokens, self.scorer.context - len(row.tokens)) - 1 - coming
            for row in rows
        ]

    def choose(self, rows: Sequence[Row], load: Load) -> dict[int, int]:
        """Return the number of draft tokens that the policy chooses for each slot.

        This is for drafters that are not free.
        """
        if self.drafter is None:
            return {}
        slots = [row.slot for row in rows]
        return dict(zip(slots, self.length.choose(slots, load=load), strict=True))

    def propose(self, rows: Sequence[Row], load: Load, chosen: Mapping[int, int] | None = None) -> Proposal:
        """Propose draft tokens for each sequence, within the limits of policy, context and remaining tokens.

        Args:
            rows: The active sequences.
            load: The load of the forward pass.
            chosen: The number of draft tokens by slot. By default the policy chooses.
        """
        room = self.room(rows)
        if self.drafter is None or (self.free and self.length.idle):
            return self._nothing(rows, load)
        if self.free:
            return self._taken(rows, load, [min(self.length.max_draft_tokens, most) for most in room])
        chosen = self.choose(rows, load) if chosen is None else chosen
        limits = [min(chosen.get(row.slot, 0), most) for row, most in zip(rows, room, strict=True)]
        if max(limits) < 1:
            return self._nothing(rows, load)
        state = self.state(rows, limits)
        draft = self._asked(state, limits)
        self._asked_last = [(row, len(row.tokens)) for row in rows]
        alone = draft.steps is None  # the drafter ended by itself; the policy did not stop it
        return Proposal(
            self._first(draft, limits),
            load,
            state,
            limits if alone else list(draft.lengths or limits),
            max(limits) if draft.steps is None else draft.steps,
        )

    def _taken(self, rows: Sequence[Row], load: Load, room: list[int]) -> Proposal:
        """Return a free drafter's tokens, as many of them as the policy chooses."""
        if max(room) < 1:
            return self._nothing(rows, load)
        state = self.state(rows, room)
        draft = self._asked(state, room)
        if draft.logits is not None:
            raise ValueError(
                f"draft: {type(self.drafter).__name__} is free and draws its tokens; how many are used would "
                "depend on them, which biases the output. Only a drafter that chooses may be free"
            )
        there = list(draft.lengths or [draft.tokens.shape[1]] * len(rows))
        confidence = draft.confidence or [1.0] * len(rows)
        slots = [row.slot for row in rows]
        chosen = self.length.choose(slots, load=load, hint=Hint(there, confidence))
        spare: list[int | None] = [
            proposal[g] if g < most else None
            for proposal, g, most in zip(draft.tokens.tolist(), chosen, there, strict=True)
        ]
        return Proposal(self._first(draft, chosen), load, state, spare=spare)

    def _unread(self, rows: Sequence[Row]) -> int:
        """Count the tokens that a drafter which is not free has not seen yet."""
        if self.drafter is None or self.free:
            return 0
        # Tokens that follow from its last draft count as read. They may not be known yet.
        self._read |= {row.slot: (row, len(row.tokens)) for row, _ in self._asked_last}
        self._asked_last = [(row, length) for row, length in self._asked_last if len(row.tokens) == length]
        seen = (self._read.get(row.slot, (None, 0)) for row in rows)
        return sum(
            len(row.tokens) - (read if whose is row else 0)
            for row, (whose, read) in zip(rows, seen, strict=True)
        )

    def aside(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the next token that a free drafter would propose for each sequence, for the record."""
        assert self.drafter is not None
        proposals = self.drafter.propose(self.state(rows, [1] * len(rows), torch.device("cpu")), 1)
        lengths = proposals.lengths or [1] * len(rows)
        return [row[0] if n else None for row, n in zip(proposals.tokens.tolist(), lengths, strict=True)]

    def _asked(self, state: State, limits: list[int]) -> Draft:
        assert self.drafter is not None
        draft = self.drafter.propose(state, max(limits))
        check_draft(draft, self.drafter, len(limits), self.scorer.vocab_size, self.scorer.device)
        given = [draft.tokens.shape[1]] * len(limits) if draft.lengths is None else map(int, draft.lengths)
        return replace(draft, lengths=[min(pair) for pair in zip(limits, given, strict=True)])

    @staticmethod
    def _first(draft: Draft, limits: list[int]) -> Draft:
        """Return the first draft tokens of each sequence, at most its limit."""
        lengths = [min(pair) for pair in zip(limits, draft.lengths or limits, strict=True)]
        g = max(lengths)
        logits = None if draft.logits is None else draft.logits[:, :g]
        told = None if draft.told is None else draft.told.first(g)
        return Draft(draft.tokens[:, :g], logits, lengths, told)

    def _nothing(self, rows: Sequence[Row], load: Load) -> Proposal:
        return Proposal(Draft.chosen([[] for _ in rows], self.scorer.device), load)

    def state(self, rows: Sequence[Row], limits: list[int], device: torch.device | None = None) -> State:
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
            self.length.enough if self.length.asks else None,
        )


def seeds(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Return the seeds of sequences, ``[R]``."""
    return on_device([row.seed for row in rows], torch.int64, device)

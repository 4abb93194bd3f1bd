"""Drafting: a drafter proposes as many tokens as the draft-length policy chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.draft.base import Draft, Drafter, State, check_draft
from outpace.engine.sequence import SequenceState, seeds
from outpace.models.scorer import Scorer
from outpace.policy import DraftLengthPolicy, Load


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a step, before the target scores them.

    Attributes:
        draft: The draft tokens.
        state: The drafter's input. None if the drafter was not called.
        requested: Number of draft tokens requested of the drafter, per sequence. If it made fewer draft
            steps: the number that it proposed. Empty for a free drafter.
        unscored: Per sequence, the first token that a free drafter proposed and the policy did not choose.
            None if the policy chose all.
    """

    draft: Draft
    state: State | None = None
    requested: Sequence[int] = ()
    unscored: Sequence[int | None] = ()


def matches(proposals: Sequence[int | None], tokens: Sequence[int]) -> list[bool | None]:
    """Return whether each proposed token equals the generated token; None where nothing was proposed."""
    return [
        None if proposal is None else proposal == token
        for proposal, token in zip(proposals, tokens, strict=True)
    ]


class Proposer:
    """A drafter and a draft-length policy, which together propose draft tokens.

    The policy chooses how many tokens the drafter proposes. On the host, a free drafter (``Drafter.free``)
    proposes first, and the policy then chooses how many of its tokens the target scores.

    Args:
        scorer: The target.
        drafter: The drafter, or None.
        policy: The draft-length policy.
    """

    def __init__(self, scorer: Scorer, drafter: Drafter | None, policy: DraftLengthPolicy) -> None:
        self.scorer, self.drafter, self.policy = scorer, drafter, policy
        self.free = drafter is not None and drafter.free
        # Sequences of the last draft, each with its number of tokens at that time
        self._last_drafted: Sequence[tuple[SequenceState, int]] = ()
        # The seeds of the last step's sequences, and the same as a tensor
        self._seeds: tuple[list[int], Tensor] | None = None
        # By slot: a sequence, and the number of its tokens that the drafter has processed
        self._num_read: dict[int, tuple[SequenceState, int]] = {}

    def load(self, sequences: Sequence[SequenceState], in_flight: int) -> Load:
        """Return the size and limits of the target's next forward pass.

        Args:
            sequences: The active sequences.
            in_flight: Number of steps in flight, each of which adds at least one token.
        """
        longest = max(len(one.tokens) for one in sequences)
        # Each step in flight adds at least one token, and the target adds one itself.
        certain, context = in_flight + 1, self.scorer.context
        remaining = tuple(
            min(one.max_new_tokens - one.stats.new_tokens, context - len(one.tokens)) - certain
            for one in sequences
        )
        return Load(len(sequences), longest, self._num_unread(sequences), remaining_draft_tokens=remaining)

    def choose(self, sequences: Sequence[SequenceState], load: Load) -> dict[int, int]:
        """Return the number of draft tokens that the policy chooses for each slot.

        Without a drafter, the result is empty. A free drafter on the host proposes first, in ``propose``.

        Args:
            sequences: The active sequences.
            load: The size and limits of the target's next forward pass.
        """
        if self.drafter is None:
            return {}
        chosen = {one.slot: one.num_draft_tokens or 0 for one in sequences}
        return chosen | self._chosen_by_policy(sequences, load)

    def _chosen_by_policy(
        self, sequences: Sequence[SequenceState], load: Load, proposed: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Return the policy's choice for the slots whose requests leave the number to it.

        The policy sees all sequences, those with a number of their own limited to it.
        """
        if all(one.num_draft_tokens is not None for one in sequences):
            return {}
        if any(one.num_draft_tokens is not None for one in sequences) and load.remaining_draft_tokens:
            pairs = zip(sequences, load.remaining_draft_tokens, strict=True)
            limited = (
                most if one.num_draft_tokens is None else min(most, one.num_draft_tokens)
                for one, most in pairs
            )
            load = replace(load, remaining_draft_tokens=tuple(limited))
        chosen = self.policy.choose([one.slot for one in sequences], load=load, proposed=proposed)
        pairs = zip(sequences, chosen, strict=True)
        return {one.slot: g for one, g in pairs if one.num_draft_tokens is None}

    def is_idle(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether a free drafter need not propose now."""
        own = [one.num_draft_tokens for one in sequences]
        return not any(own) and (self.policy.idle or None not in own)

    def propose(
        self, sequences: Sequence[SequenceState], load: Load, chosen: Mapping[int, int] | None = None
    ) -> Proposal:
        """Propose draft tokens for each sequence, within the limits of policy, context and remaining tokens.

        Args:
            sequences: The active sequences.
            load: The size and limits of the target's forward pass, with no step in flight.
            chosen: The number of draft tokens by slot. By default the policy chooses it.
        """
        if self.drafter is None or (self.free and self.is_idle(sequences)):
            return self.without_draft(sequences)
        if self.free:
            most = 0 if self.policy.idle else self.policy.max_draft_tokens
            own = ((one.slot, one.num_draft_tokens) for one in sequences)
            chosen = {slot: most if g is None else g for slot, g in own}
        elif chosen is None:
            chosen = self.choose(sequences, load)
        remaining = zip(sequences, load.remaining_draft_tokens or (), strict=True)
        limits = [min(chosen.get(one.slot, one.num_draft_tokens or 0), most) for one, most in remaining]
        if max(limits) < 1:
            return self.without_draft(sequences)
        state = self.state(sequences, limits)
        draft = self._call_drafter(state, limits)
        if self.free:
            return self._choose_from(sequences, draft, state, load)
        self._last_drafted = [(one, len(one.tokens)) for one in sequences]
        requested = limits
        if draft.steps is not None:  # its context may be full
            requested = list(draft.lengths or limits)
        return Proposal(self._truncated(draft, limits), state, requested)

    def _choose_from(
        self, sequences: Sequence[SequenceState], draft: Draft, state: State, load: Load
    ) -> Proposal:
        """Return as many draft tokens of a free drafter as requests set or the policy chooses."""
        if draft.logits is not None:
            raise ValueError(
                f"draft: got {type(self.drafter).__name__}, which has free = True and returns logits; a free "
                "drafter must return logits=None. The policy sees its tokens before it decides how many to "
                "score, and for sampled tokens this would bias the output"
            )
        available = list(draft.lengths or [draft.tokens.shape[1]] * len(state.slots))
        by_policy = {} if self.policy.idle else self._chosen_by_policy(sequences, load, available)
        chosen = [
            by_policy.get(one.slot, 0) if one.num_draft_tokens is None else proposed  # at most its own number
            for one, proposed in zip(sequences, available, strict=True)
        ]
        unscored: list[int | None] = [
            proposal[g] if g < most else None
            for proposal, g, most in zip(draft.tokens.tolist(), chosen, available, strict=True)
        ]
        return Proposal(self._truncated(draft, chosen), state, unscored=unscored)

    def _num_unread(self, sequences: Sequence[SequenceState]) -> int:
        """Return the number of tokens, over all sequences, that the drafter has not processed yet.

        Sources that its encoder has not processed count, too. A free drafter needs no catch-up, so the number
        is 0.
        """
        if self.drafter is None or self.free:
            return 0
        # The outcome of the last draft counts as processed, also if it is not committed yet.
        self._num_read |= {one.slot: (one, len(one.tokens)) for one, _ in self._last_drafted}
        self._last_drafted = [
            (one, length) for one, length in self._last_drafted if len(one.tokens) == length
        ]
        num_read = (self._num_read.get(one.slot, (None, 0)) for one in sequences)
        scorer = self.drafter.scorer
        sources = dict.fromkeys(one.source for one in sequences)  # samples may share one
        unencoded = 0 if scorer is None else sum(map(scorer.num_unencoded, sources))
        return unencoded + sum(
            len(one.tokens) - (read if owner is one else 0)
            for one, (owner, read) in zip(sequences, num_read, strict=True)
        )

    def propose_unscored(self, sequences: Sequence[SequenceState]) -> list[int | None]:
        """Return the next token that a free drafter proposes for each sequence; the target scores none."""
        assert self.drafter is not None
        proposals = self.drafter.propose(self.state(sequences, [1] * len(sequences), torch.device("cpu")), 1)
        lengths = proposals.lengths or [1] * len(sequences)
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

    def without_draft(self, sequences: Sequence[SequenceState]) -> Proposal:
        """Return a proposal without draft tokens."""
        return Proposal(Draft.chosen([[] for _ in sequences]))

    def state(
        self, sequences: Sequence[SequenceState], limits: list[int], device: torch.device | None = None
    ) -> State:
        """Return the drafter's input.

        Args:
            sequences: The sequences.
            limits: Most draft tokens of each sequence.
            device: Device of the draft tokens. By default the target's.
        """
        device = device or self.scorer.device
        own = [one.sampling if one.draft_sampling is None else one.draft_sampling for one in sequences]
        return State(
            [one.slot for one in sequences],
            [one.tokens for one in sequences],
            [one.prompt_length for one in sequences],
            # Processors may keep state, which must not depend on rejected draft tokens: drafting uses copies.
            [one.fork() if one.processors else one for one in own],
            self._seed_tensor(sequences, device),
            limits,
            self.scorer.vocab_size,
            device,
            [one.match for one in sequences],
            [one.source for one in sequences],
        )

    def _seed_tensor(self, sequences: Sequence[SequenceState], device: torch.device) -> Tensor:
        """Return the seeds of the sequences ``[R]``, copied to the device when they change."""
        current = [one.seed for one in sequences]
        if self._seeds is None or current != self._seeds[0] or self._seeds[1].device != device:
            self._seeds = current, seeds(sequences, device)
        return self._seeds[1]

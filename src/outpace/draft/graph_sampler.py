"""Sampler of draft tokens inside a graph: the counterpart of ``DraftSampler`` in the graph executor."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.draft.base import DraftTensors, GraphState, fit
from outpace.verification import Block, SampledTokens, edit_rows, sample_rows, verify_rows
from outpace.verification.rules import MATCH


class GraphSampler:
    """Sampler of draft tokens, one position at a time.

    Args:
        state: The sequences.
        sparse: Whether the draft's logits may be -inf for most tokens, so that bias or allowed tokens may
            leave no token. A draft ends before such a position.
    """

    def __init__(self, state: GraphState, sparse: bool = False) -> None:
        self.state = state
        self.tokens: list[Tensor] = []  # of each position, [B]
        self._logits: list[Tensor] = []  # of each position, [B, 1, V]
        self._drawn: list[SampledTokens] = []  # results of sampling with the drafter's own noise
        self._possible: list[Tensor] | None = [] if sparse or state.edits is not None else None

    def sample_next(self, q: Tensor) -> Tensor:
        """Sample the next token of each sequence ``[B]``.

        With the target's noise, the drafter is likelier to sample the target's token.

        Args:
            q: Logits ``[B, n, V]`` of the draft, of which the last position counts.
        """
        state, i = self.state, len(self.tokens)
        q = fit(q[:, -1:], state.vocab_size)
        if state.edits is not None:
            drafted = torch.stack(self.tokens, dim=1) if self.tokens else state.token_ids[:, :0]
            q = edit_rows(q, state.edits, drafted)
        if self._possible is not None:
            self._possible.append(q[:, 0].amax(-1) > -torch.inf)
        self._logits.append(q)
        token = self._own(q) if state.own_noise is not False else None
        if state.own_noise is not True:
            self._drawn.append(sample_rows(q[:, 0], state.seeds, state.lengths, i, state.sampling))
            drawn = self._drawn[-1].tokens
            if token is None or isinstance(state.own_noise, bool):
                token = drawn
            else:
                token = torch.where(state.own_noise, token, drawn)
        assert token is not None
        self.tokens.append(token)
        return token

    def _own(self, q: Tensor) -> Tensor:
        """Sample with the noise of the target."""
        state = self.state
        block = Block(
            tokens=state.last[:, :0], draft_logits=None, target_logits=q, draft_lse=None, seeds=state.seeds,
            starts=state.lengths + len(self.tokens),
        )  # fmt: skip
        return verify_rows(block, MATCH, 1.0, state.sampling, None).next_token

    def draft(self) -> DraftTensors:
        """Return the sampled tokens."""
        logits = torch.cat(self._logits, dim=1) if self._drawn else None
        lengths = None
        if self._possible is not None:
            lengths = torch.stack(self._possible, dim=1).long().cumprod(1).sum(1)
        tokens, sampling = torch.stack(self.tokens, dim=1), self.state.sampling
        return DraftTensors(tokens, logits, self._drawn, lengths, sampling)

    def repeated(self, g: int) -> DraftTensors:
        """Return a draft of g copies of the token sampled so far, to compile kernels with."""
        one = self.draft()
        logits = None if one.logits is None else one.logits.repeat(1, g, 1)
        tokens = one.tokens.expand(-1, g).contiguous()
        return DraftTensors(tokens, logits, [*one.drawn] * g, one.lengths, one.sampling)

"""Sampler of draft tokens inside a graph: the counterpart of ``DraftSampler`` in the graph executor."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.draft.base import DraftTensors, GraphState, fit
from outpace.verification import Block, SampledTokens, Verdict, edit_rows, sample_rows, verify_rows
from outpace.verification.rules import MATCH


class GraphSampler:
    """Sampler of draft tokens, one position at a time.

    A sequence's draft ends before the first position with NaN or without a possible token.

    Args:
        state: The sequences.
    """

    def __init__(self, state: GraphState) -> None:
        self.state = state
        self.tokens: list[Tensor] = []  # of each position, [B]
        self._logits: list[Tensor] = []  # of each position, [B, 1, V]; none if all noise is the target's
        self._drawn: list[SampledTokens] = []  # of each position, where the noise is the drafter's own
        self._bad: list[Tensor] = []  # of each position, [B]: True if no token was possible

    def sample_next(self, q: Tensor) -> Tensor:
        """Sample the next token of each sequence ``[B]``.

        With the target's noise, the drafter is likelier to sample the target's token.

        Args:
            q: Logits ``[B, n, V]`` of the draft, of which the last position counts.
        """
        state, own = self.state, self.state.own_noise
        q = fit(q[:, -1:], state.vocab_size)
        if state.edits is not None:
            drafted = torch.stack(self.tokens, dim=1) if self.tokens else state.token_ids[:, :0]
            q = edit_rows(q, state.edits, drafted)
        if own is True:
            verdict = self._with_own_noise(q)
            token = verdict.next_token
            self._bad.append(verdict.bad)
        else:
            drawn = sample_rows(q[:, 0], state.seeds, state.lengths, len(self.tokens), state.sampling)
            self._drawn.append(drawn)
            self._logits.append(q)
            token = drawn.tokens
            if own is not False:
                token = torch.where(own, self._with_own_noise(q).next_token, token)
        self.tokens.append(token)
        return token

    def _with_own_noise(self, q: Tensor) -> Verdict:
        """Sample with the noise of the target."""
        state = self.state
        block = Block(
            tokens=state.last[:, :0], draft_logits=None, target_logits=q, draft_lse=None, seeds=state.seeds,
            starts=state.lengths + len(self.tokens),
        )  # fmt: skip
        return verify_rows(block, MATCH, 1.0, state.sampling, None)

    def draft(self) -> DraftTensors:
        """Return the sampled tokens."""
        logits = torch.cat(self._logits, dim=1) if self._logits else None
        if self._drawn:
            usable = torch.stack([one.lse for one in self._drawn], dim=1).isfinite()
        else:
            usable = ~torch.stack(self._bad, dim=1)
        lengths = usable.long().cumprod(1).sum(1)
        tokens = torch.stack(self.tokens, dim=1)
        return DraftTensors(tokens, logits, self._drawn, lengths, self.state.sampling)

    def repeated(self, g: int) -> DraftTensors:
        """Return a draft of g copies of the token sampled so far, to compile kernels with."""
        for values in (self.tokens, self._logits, self._drawn, self._bad):
            values *= g
        return self.draft()

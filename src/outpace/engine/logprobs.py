"""Log-probabilities, scores and logits of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.draft.base import Draft
from outpace.engine.sequence import SequenceState
from outpace.sampling import Prefix, SamplingParams, process, warp
from outpace.verification import Verdict


class Logprobs(NamedTuple):
    """Log-probabilities at the n positions of a step.

    Attributes:
        own: Those of the new tokens ``[R, n]``.
        values: Those of the likeliest tokens ``[R, n, k]``, the likeliest first.
        ids: Ids of these tokens ``[R, n, k]``.
    """

    own: Tensor
    values: Tensor
    ids: Tensor


def adjusted_logits(sequences: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Tensor:
    """Return the logits ``[R, g+1, V]`` that tokens are sampled from, without a change of any processor.

    Greedy decoding counts as temperature 1 without top-k, top-p and min-p.

    Args:
        sequences: The sequences.
        draft: Their draft tokens.
        logits: The target's own logits.
    """
    samplings = [one.sampling.fork() for one in sequences]
    prefix = Prefix.padded(
        [one.tokens for one in sequences], [one.prompt_length for one in sequences], logits.device
    )
    scored = (
        on_device([length + 1 for length in draft.lengths], torch.int64, logits.device)
        if draft.lengths
        else None
    )
    scores, _ = process(logits, samplings, prefix, draft.tokens, scored, until_rejected=True)
    return warp(scores, before_argmax(samplings))


def before_argmax(samplings: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Return temperature and filters, with the model's own distribution for greedy decoding."""
    return [SamplingParams() if one.greedy else one.shape for one in samplings]


def outcome_tokens(drafted: Tensor, verdict: Verdict) -> Tensor:
    """Return draft tokens with the next token after the accepted ones, ``[R, g+1]``."""
    tokens = torch.cat((drafted, verdict.next_token[:, None]), dim=1)
    return tokens.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])


@dataclass(frozen=True)
class Values:
    """Results at the n positions of a step that sequences requested; None: not requested.

    Attributes:
        logprobs: Log-probabilities.
        scores: Logits ``[R, n, V]`` after all sampling parameters.
        logits: The target's own logits ``[R, n, V]``.
    """

    logprobs: Logprobs | None = None
    scores: Tensor | None = None
    logits: Tensor | None = None

    @classmethod
    def of(cls, scores: Tensor, logits: Tensor, tokens: Tensor, top: int | None, stored: bool) -> Values:
        """Return results, of which scores and logits are kept if they are ``stored``.

        Args:
            scores: Logits ``[R, n, V]`` after all sampling parameters.
            logits: The target's own logits ``[R, n, V]``.
            tokens: The new tokens ``[R, n]``.
            top: Number of the likeliest tokens that get log-probabilities. None: no log-probabilities.
            stored: Whether a sequence requested scores or logits.
        """
        logprobs = None
        if top is not None:
            every = scores.log_softmax(-1)
            values, ids = every.topk(min(top, scores.shape[-1]))
            logprobs = Logprobs(every.gather(-1, tokens[..., None]).squeeze(-1), values, ids)
        return cls(logprobs, *((scores, logits.float()) if stored else (None, None)))

    def with_logprobs_on(self, device: str) -> Values:
        """Return the same with log-probabilities on a device."""
        if self.logprobs is None:
            return self
        return replace(self, logprobs=Logprobs(*(one.to(device) for one in self.logprobs)))

    def store(self, sequence: SequenceState, count: int, row: int) -> None:
        """Store the results of a sequence's ``count`` new tokens in row ``row``, if it requested them."""
        if sequence.top is not None and self.logprobs is not None:
            own, values, ids = (each[row, :count].tolist() for each in self.logprobs)
            sequence.logprobs += own
            pairs = zip(ids, values, strict=True) if sequence.top else ()
            sequence.top_logprobs += [dict(list(zip(*pair, strict=True))[: sequence.top]) for pair in pairs]
        for stored, kept in ((sequence.scores, self.scores), (sequence.logits, self.logits)):
            if stored is not None and kept is not None:
                stored.extend(kept[row, :count].to(torch.float32, copy=True))

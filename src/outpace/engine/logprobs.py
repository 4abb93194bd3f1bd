"""Log-probabilities, scores and logits of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
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


def logprobs_of(scores: Tensor, tokens: Tensor, most: int) -> Logprobs:
    """Return log-probabilities of tokens.

    Args:
        scores: Logits ``[R, n, V]`` after all sampling parameters.
        tokens: The new tokens ``[R, n]``.
        most: Number of the likeliest tokens.
    """
    logprobs = scores.log_softmax(-1)
    values, ids = logprobs.topk(min(most, scores.shape[-1]))
    return Logprobs(logprobs.gather(-1, tokens[..., None]).squeeze(-1), values, ids)


def store_logprobs(sequence: SequenceState, count: int, logprobs: Logprobs, row: int) -> None:
    """Store the log-probabilities of a sequence's new tokens, if it requested them.

    Args:
        sequence: The sequence.
        count: Number of its new tokens.
        logprobs: Log-probabilities of all sequences, on the CPU.
        row: The sequence's row there.
    """
    if sequence.top is None:
        return
    sequence.logprobs.extend(logprobs.own[row, :count].tolist())
    if sequence.top:
        values, ids = (each[row, :count, : sequence.top].tolist() for each in (logprobs.values, logprobs.ids))
        sequence.top_logprobs += [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


def store_values(
    sequence: SequenceState, count: int, scores: Tensor | None, logits: Tensor | None, row: int
) -> None:
    """Store scores and logits of a sequence's new tokens, if it requested them."""
    for stored, values in ((sequence.scores, scores), (sequence.logits, logits)):
        if stored is not None and values is not None:
            stored.extend(values[row, :count].to(torch.float32, copy=True))

"""Scores and log-probabilities of generated tokens, after all sampling parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.draft.base import Draft, one_for_all
from outpace.engine.sequence import SequenceState
from outpace.sampling import Prefix, SamplingParams, process, warp
from outpace.verification import Verdict


def adjusted_logits(
    logits: Tensor, samplings: list[SamplingParams], prefix: Prefix | None, draft: Draft
) -> Tensor:
    """Return the logits ``[R, g+1, V]`` that tokens are sampled from.

    Greedy decoding counts as temperature 1 without top-k, top-p and min-p.
    """
    before_argmax = [
        dataclasses.replace(forked, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        if forked.greedy
        else forked
        for forked in (sampling.fork() for sampling in one_for_all(samplings))
    ]
    scored = on_device([length + 1 for length in draft.lengths or []], torch.int64, logits.device)
    scores, _ = process(logits, before_argmax, prefix, draft.tokens, scored, until_rejected=True)
    return warp(scores, before_argmax)


def store_scores(
    sequences: Sequence[SequenceState], verdict: Verdict, logits: Tensor, scores: Tensor | None
) -> None:
    """Store scores and logits of the new tokens in the sequences that requested them."""
    for i, (sequence, accepted) in enumerate(zip(sequences, verdict.accepted.tolist(), strict=True)):
        for stored, values in ((sequence.scores, scores), (sequence.logits, logits)):
            if stored is not None and values is not None:
                stored.extend(values[i, : accepted + 1].to(torch.float32, copy=True))


def store_logprobs(
    sequences: Sequence[SequenceState], draft: Draft, verdict: Verdict, scores: Tensor
) -> None:
    """Store the log-probabilities of the new tokens in the sequences that requested them."""
    scores = scores.log_softmax(-1)
    tokens = torch.cat((draft.tokens, draft.tokens.new_zeros(len(sequences), 1)), dim=1)
    tokens = tokens.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
    own = scores.gather(-1, tokens[..., None]).squeeze(-1).tolist()
    most = max(one.top or 0 for one in sequences)
    values, ids = (top.tolist() for top in scores.topk(most)) if most else ([], [])
    for i, (sequence, accepted) in enumerate(zip(sequences, verdict.accepted.tolist(), strict=True)):
        if sequence.top is None:
            continue
        sequence.logprobs.extend(own[i][: accepted + 1])
        for j in range(accepted + 1 if sequence.top else 0):
            sequence.top_logprobs.append(dict(zip(ids[i][j][: sequence.top], values[i][j], strict=False)))

"""Log-probabilities of what came out, under the adjusted target."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from outpace.arguments import on_device
from outpace.draft.base import Draft
from outpace.rows import Row
from outpace.sampling import Prefix, Sampling, process, warp
from outpace.verify import Verdict


def log_probabilities(
    logits: Tensor, samplings: list[Sampling], prefix: Prefix | None, draft: Draft
) -> Tensor:
    """Of every token at every position, `[R, g+1, V]`; greedy rows as they are before the argmax."""
    soft = [
        dataclasses.replace(one, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if one.greedy else one
        for one in (sampling.fork() for sampling in samplings)
    ]
    scored = on_device([length + 1 for length in draft.lengths or []], torch.int64, logits.device)
    scores, _ = process(logits, soft, prefix, draft.tokens, scored)
    return warp(scores, soft).log_softmax(-1)


def note(rows: list[Row], draft: Draft, verdict: Verdict, scores: Tensor) -> None:
    """Write down the log-probabilities of what the rows won."""
    tokens = torch.cat((draft.tokens, draft.tokens.new_zeros(len(rows), 1)), dim=1)
    tokens = tokens.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
    own = scores.gather(-1, tokens[..., None]).squeeze(-1).tolist()
    most = max(row.top or 0 for row in rows)
    values, ids = (top.tolist() for top in scores.topk(most)) if most else ([], [])
    for i, (row, kept) in enumerate(zip(rows, verdict.accepted.tolist(), strict=True)):
        if row.top is None:
            continue
        row.logprobs.extend(own[i][: kept + 1])
        for j in range(kept + 1 if row.top else 0):
            row.top_logprobs.append(dict(zip(ids[i][j][: row.top], values[i][j], strict=False)))

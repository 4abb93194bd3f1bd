"""Kernels of rule ``match`` and of decoding without speculation.

The target's own samples are a race: the largest logit plus Gumbel noise wins. Draft tokens are accepted while
they are the winners.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import (
    CUT,
    NONE,
    gumbel_logits,
    is_invalid_row,
    load_adjusted,
    load_key,
    load_temperature,
    pick,
    store_verdict,
)
from outpace.verification.kernels.workspace import (
    ANY_ALIGNMENT,
    NOT_SPECIALIZED,
    load_row_stats,
    workspace_parts,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def race(
    target, lengths, seeds, starts, p_params, workspace, seed: tl.int64, start: tl.int64, B, g, V, splits,
    p_row,
    p_position, temperature,
    SPLIT: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr,
):  # fmt: skip
    """Store the token with the largest logit plus Gumbel noise, for every split of every position."""
    maxima, values, split_argmax, parts, part_argmax, counter, row_stats, chunks = workspace_parts(
        workspace, B, g, g + 1, splits
    )
    pid = tl.program_id(0)
    s = pid % splits
    row = pid // splits
    b, i = (row // (g + 1)).to(tl.int64), row % (g + 1)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    if i <= length:
        inv_temperature, greedy = load_temperature(p_params, temperature, b, ADJUST)
        ids = s * SPLIT + tl.arange(0, SPLIT)
        cut, tie, unusable = 0.0, 0, False
        if ADJUST == CUT:
            max_logit, log_sum, cut, tie = load_row_stats(row_stats, row.to(tl.int64), row >= 0)
            unusable = ~(tl.abs(log_sum) < float("inf"))  # a cut hides NaN and +inf
        x = load_adjusted(
            target + b * p_row + i.to(tl.int64) * p_position, ids, V, inv_temperature, cut, tie, ADJUST
        )
        split_max, value = gumbel_logits(
            x, s, load_key(seeds, seed, b), load_key(starts, start, b) + i, greedy, SPLIT
        )
        at = row.to(tl.int64) * splits + s
        best = tl.max(value, axis=0)
        unusable |= tl.sum((x != x).to(tl.int32), axis=0) > 0
        tl.store(maxima + at, tl.where(unusable, float("nan"), split_max))
        tl.store(values + at, best)
        tl.store(
            split_argmax + at, tl.min(tl.where(value == best, ids, NONE), axis=0).to(tl.float32, bitcast=True)
        )


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def compare(
    tokens, lengths, invalid, workspace, accepted, next_token, bad, B, g, V, splits,
    G: tl.constexpr, S: tl.constexpr, LENGTHS: tl.constexpr, HAS_INVALID: tl.constexpr,
):  # fmt: skip
    """Accept draft tokens while they are the target's own samples.

    G is the power of two that holds g + 1 positions here.
    """
    maxima, values, split_argmax, parts, part_argmax, counter, row_stats, chunks = workspace_parts(
        workspace, B, g, g + 1, splits
    )
    b = tl.program_id(0).to(tl.int64)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    bad_length = (length < 0) | (length > g)
    length = tl.minimum(tl.maximum(length, 0), g)
    i, t = tl.arange(0, G), tl.arange(0, S)
    at = (b * (g + 1) + i)[:, None] * splits + t[None, :]
    mask = (i <= length)[:, None] & (t < splits)[None, :]
    m = tl.load(maxima + at, mask=mask, other=-float("inf"))
    max_logit = tl.max(m, axis=1)
    unusable = tl.sum((m != m).to(tl.int32), axis=1) > 0
    unusable |= ~(tl.abs(max_logit) < float("inf"))
    value = tl.load(values + at, mask=mask, other=-float("inf")) + (m - max_logit[:, None])
    value = tl.where(m == -float("inf"), -float("inf"), value)
    top = tl.load(split_argmax + at, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    target_token = tl.min(tl.where(value == tl.max(value, axis=1)[:, None], top, NONE), axis=1)
    token = tl.load(tokens + b * g + i, mask=i < length, other=-1)
    bad_token = (i < length) & ((token < 0) | (token >= V))
    accept = (i < length) & (token == target_token) & ~unusable
    n = tl.min(tl.where(accept, length, tl.minimum(i, length)), axis=0)
    is_invalid = is_invalid_row(bad_token, bad_length, invalid, b, HAS_INVALID)
    is_unusable = pick(unusable.to(tl.int32), i, n) > 0
    store_verdict(accepted, next_token, bad, b, is_invalid, is_unusable, n, pick(target_token, i, n))

"""Kernels of rule ``match`` and of decoding without speculation.

The target's own samples are a race: the largest logit plus Gumbel noise wins. Draft tokens are accepted while
they are the winners.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import CUT, NONE, coolness_of, key_of, logits_of, pick, raced
from outpace.verification.kernels.rooms import SIZES, SMALL, facts_of, rooms


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def race(
    target, lengths, seeds, starts, knobs, work, seed: tl.int64, start: tl.int64, B, g, V, splits, p_row,
    p_position, heat,
    SPLIT: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr,
):  # fmt: skip
    """Sample the target's own token in every split of every position.

    It is the one with the largest logit plus Gumbel noise.
    """
    maxima, values, tops, parts, heads, counter, facts, chunks = rooms(work, B, g, g + 1, splits)
    pid = tl.program_id(0)
    s = pid % splits
    row = pid // splits
    b, i = (row // (g + 1)).to(tl.int64), row % (g + 1)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    if i <= length:
        coolness, greedy = coolness_of(knobs, heat, b, ADJUST)
        ids = s * SPLIT + tl.arange(0, SPLIT)
        cut, tie, broken = 0.0, 0, False
        if ADJUST == CUT:
            most, log, cut, tie = facts_of(facts, row.to(tl.int64), row >= 0)
            broken = ~(tl.abs(log) < float("inf"))  # a cut hides NaN and +inf
        x = logits_of(target + b * p_row + i.to(tl.int64) * p_position, ids, V, coolness, cut, tie, ADJUST)
        top, value = raced(x, s, key_of(seeds, seed, b), key_of(starts, start, b) + i, greedy, SPLIT)
        at = row.to(tl.int64) * splits + s
        best = tl.max(value, axis=0)
        broken |= tl.sum((x != x).to(tl.int32), axis=0) > 0
        tl.store(maxima + at, tl.where(broken, float("nan"), top))
        tl.store(values + at, best)
        tl.store(tops + at, tl.min(tl.where(value == best, ids, NONE), axis=0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def compare(
    tokens, lengths, given_up, work, accepted, next_token, bad, B, g, V, splits,
    G: tl.constexpr, S: tl.constexpr, LENGTHS: tl.constexpr, GIVEN_UP: tl.constexpr,
):  # fmt: skip
    """Accept draft tokens while they are the target's own samples.

    G holds g + 1 positions here.
    """
    maxima, values, tops, parts, heads, counter, facts, chunks = rooms(work, B, g, g + 1, splits)
    b = tl.program_id(0).to(tl.int64)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    strange = (length < 0) | (length > g)
    length = tl.minimum(tl.maximum(length, 0), g)
    i, t = tl.arange(0, G), tl.arange(0, S)
    at = (b * (g + 1) + i)[:, None] * splits + t[None, :]
    mask = (i <= length)[:, None] & (t < splits)[None, :]
    m = tl.load(maxima + at, mask=mask, other=-float("inf"))
    most = tl.max(m, axis=1)
    broken = tl.sum((m != m).to(tl.int32), axis=1) > 0
    broken |= ~(tl.abs(most) < float("inf"))
    value = tl.load(values + at, mask=mask, other=-float("inf")) + (m - most[:, None])
    value = tl.where(m == -float("inf"), -float("inf"), value)
    top = tl.load(tops + at, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    own = tl.min(tl.where(value == tl.max(value, axis=1)[:, None], top, NONE), axis=1)
    token = tl.load(tokens + b * g + i, mask=i < length, other=-1)
    outside = (i < length) & ((token < 0) | (token >= V))
    kept = (i < length) & (token == own) & ~broken
    n = tl.min(tl.where(kept, length, tl.minimum(i, length)), axis=0)
    lost = tl.sum(((broken & (i <= n)) | outside).to(tl.int32), axis=0) > 0
    lost |= strange
    if GIVEN_UP:
        lost |= tl.load(given_up + b) != 0
    tl.store(accepted + b, tl.where(lost, 0, n))
    tl.store(next_token + b, tl.where(lost, 0, pick(own, i, n)))
    tl.store(bad + b, lost)

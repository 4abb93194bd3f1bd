"""Sampling of draft tokens as one kernel.

It takes logits and returns the tokens, with what verification needs to know about q.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import (
    CUT,
    DRAFT,
    NONE,
    coolness_of,
    drawn_at,
    exponentials,
    first_beyond,
    first_max,
    key_of,
    pick,
    raw,
    tempered,
    uniforms,
)
from outpace.verification.kernels.threshold import (
    cut_of_many,
    facts,
    from_list,
    knobs_of,
    weight_of,
    whole_row,
)

SMALL = ["seeds", "starts", "knobs", "work", "tokens", "lse", "cuts", "ties"]
SIZES = ["splits", "seed", "start", "step"]


@triton.jit
def staying(z, ids, cut, tie, most, coolness):
    """Return the weights of the survivors, and 0 for the others."""
    stays = (z > cut) | ((z == cut) & (ids >= tie))
    return tl.where(stays, weight_of(z, most, coolness), 0.0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def draw(
    logits, seeds, starts, knobs, work, tokens, lse, cuts, ties, seed: tl.int64, start: tl.int64, step, V,
    splits, line, heat, top_k, limit, min_p,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr, S: tl.constexpr,
    ADJUST: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Sample one draft token per row, with one block per row.

    A pass over the row computes its sums. Then come the cut and the inverse CDF, first over splits, then
    within one.
    """
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * line
    coolness, greedy = coolness_of(knobs, heat, b, ADJUST)
    maxima = work + b * (splits * (3 + SPLIT // CHUNK) + 2 * FEW)
    sums, heads, chunks = maxima + splits, maxima + 2 * splits, maxima + 3 * splits
    for s in tl.range(splits, num_stages=3):
        ids = s * SPLIT + tl.arange(0, SPLIT)
        z = raw(row, ids, V)
        top, e = exponentials(tempered(z, coolness, ADJUST))
        tl.store(maxima + s, top)
        tl.store(sums + s, tl.sum(e, axis=0))
        if ADJUST:
            first = first_max(tempered(z, coolness, ADJUST), ids)
            tl.store(heads + s, first.to(tl.float32, bitcast=True))
        if ADJUST == CUT:
            heights = tl.max(tl.reshape(z, [SPLIT // CHUNK, CHUNK]), axis=1)
            tl.store(chunks + s * (SPLIT // CHUNK) + tl.arange(0, SPLIT // CHUNK), heights)
    tl.debug_barrier()
    few = chunks + splits * (SPLIT // CHUNK)
    cut, tie, listed = -float("inf"), 0, 0
    if ADJUST == CUT:
        most, mass, cut, tie, listed = facts(
            row, chunks, few, maxima, sums, knobs, heat, top_k, limit, min_p, b, V, splits,
            S, S * (SPLIT // CHUNK), CHUNK, WIDE, FEW, SHIFT,
        )  # fmt: skip
        if listed < 0:
            unused, greedy, k, most_lost, least_p = knobs_of(knobs, heat, top_k, limit, min_p, b)
            cut, tie, mass = cut_of_many(
                row, V, most, mass, coolness, k, most_lost, least_p, cut, tie, WIDE, SHIFT
            )
    else:
        most, mass = whole_row(maxima, sums, splits, S)
    start = key_of(starts, start, b)
    u, other = uniforms(key_of(seeds, seed, b), start + step, start, DRAFT)
    t = tl.arange(0, S)
    m = tl.load(maxima + t, mask=t < splits, other=-float("inf"))
    if listed > 0:
        z, ids = from_list(few, tl.arange(0, FEW), listed, V, FEW)
        token = drawn_at(staying(z, ids, cut, tie, most, coolness), ids, u * mass.to(tl.float64))
    elif cut > -float("inf"):
        # The sums of the survivors in each split are not known.
        token, last = tl.full([], NONE, tl.int32), tl.full([], 0, tl.int32)
        level = u * mass.to(tl.float64)
        for first in range(0, V, WIDE):
            ids = first + tl.arange(0, WIDE)
            weight = staying(raw(row, ids, V), ids, cut, tie, most, coolness)
            token = tl.minimum(token, first_beyond(weight, ids, level))
            last = tl.maximum(last, tl.max(tl.where(weight > 0, ids, 0), axis=0))
            level -= tl.sum(weight, axis=0).to(tl.float64)
        token = tl.where(token == NONE, last, token)
    else:
        part = tl.load(sums + t, mask=t < splits, other=0.0)
        part = tl.where(part == 0, 0.0, part * tl.exp(m - most)).to(tl.float64)
        cdf = tl.cumsum(part, axis=0)
        level = u * tl.sum(part, axis=0)
        split = tl.min(tl.where((cdf > level) & (part > 0), t, S), axis=0)
        split = tl.where(split == S, tl.max(tl.where(part > 0, t, 0), axis=0), split)
        ids = split * SPLIT + tl.arange(0, SPLIT)
        weight = tl.exp(tempered(raw(row, ids, V), coolness, ADJUST) - most)
        token = drawn_at(weight, ids, level - (pick(cdf, t, split) - pick(part, t, split)))
    sum_of_all = most.to(tl.float64) + tl.log(mass).to(tl.float64)
    if ADJUST:
        # A greedy row takes the first of the largest, and has a point mass there.
        head = tl.load(heads + t, mask=t < splits, other=0.0).to(tl.int32, bitcast=True)
        surest = tl.min(tl.where(m == tl.max(m, axis=0), head, NONE), axis=0)
        token = tl.where(greedy, surest, token)
        sum_of_all = tl.where(greedy, 0.0, sum_of_all)
        tie = tl.where(greedy, surest, tie)
    sound = (mass > 0) & (mass < float("inf"))
    tl.store(tokens + b, tl.where(sound, token, 0))
    tl.store(lse + b, tl.where(sound, sum_of_all, float("nan")))
    if ADJUST:
        tl.store(cuts + b, cut)
        tl.store(ties + b, tie)

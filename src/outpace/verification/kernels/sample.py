"""Sampling of draft tokens as one kernel.

It also stores the logsumexp, the cut and the tie of each row, which verification can use again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import (
    CUT,
    DRAFT,
    NONE,
    apply_temperature,
    branch_stream,
    exponentials,
    first_beyond,
    first_max,
    load_key,
    load_logits,
    load_temperature,
    pick,
    sample_at,
    uniforms,
)
from outpace.verification.kernels.threshold import (
    combine_row,
    compute_row_stats,
    cut_from_row,
    from_list,
    load_params,
    weight_of,
)

ANY_ALIGNMENT = ["seeds", "starts", "p_params", "workspace", "tokens", "lse", "cuts", "ties"]
NOT_SPECIALIZED = ["splits", "seed", "start", "step", "depth", "node"]


@triton.jit
def survivor_weights(z, ids, cut, tie, max_logit, inv_temperature):
    """Return the weights of the survivors, and 0 for the others."""
    survives = (z > cut) | ((z == cut) & (ids >= tie))
    return tl.where(survives, weight_of(z, max_logit, inv_temperature), 0.0)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def sample_draft(
    logits, seeds, starts, p_params, workspace, tokens, lse, cuts, ties, seed: tl.int64, start: tl.int64,
    step, depth, node, V, splits, line, temperature, top_k, drop_limit, min_p,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, SCAN_TILE: tl.constexpr, MAX_LISTED: tl.constexpr,
    S: tl.constexpr,
    ADJUST: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Sample one draft token per row, with one block per row.

    A pass over the row computes its sums. Then come the cut and the inverse CDF, first over splits, then
    within one.
    """
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * line
    inv_temperature, greedy = load_temperature(p_params, temperature, b, ADJUST)
    maxima = workspace + b * (splits * (3 + SPLIT // CHUNK) + 2 * MAX_LISTED)
    sums, split_argmax, chunks = maxima + splits, maxima + 2 * splits, maxima + 3 * splits
    for s in tl.range(splits, num_stages=3):
        ids = s * SPLIT + tl.arange(0, SPLIT)
        z = load_logits(row, ids, V)
        top, e = exponentials(apply_temperature(z, inv_temperature, ADJUST))
        tl.store(maxima + s, top)
        tl.store(sums + s, tl.sum(e, axis=0))
        if ADJUST:
            first = first_max(apply_temperature(z, inv_temperature, ADJUST), ids)
            tl.store(split_argmax + s, first.to(tl.float32, bitcast=True))
        if ADJUST == CUT:
            heights = tl.max(tl.reshape(z, [SPLIT // CHUNK, CHUNK]), axis=1)
            tl.store(chunks + s * (SPLIT // CHUNK) + tl.arange(0, SPLIT // CHUNK), heights)
    tl.debug_barrier()
    token_list = chunks + splits * (SPLIT // CHUNK)
    cut, tie, num_listed = -float("inf"), 0, 0
    if ADJUST == CUT:
        max_logit, mass, cut, tie, num_listed = compute_row_stats(
            row, chunks, token_list, maxima, sums, p_params, temperature, top_k, drop_limit, min_p, b, V,
            splits,
            S, S * (SPLIT // CHUNK), CHUNK, SCAN_TILE, MAX_LISTED, SHIFT,
        )  # fmt: skip
        if num_listed < 0:
            unused, greedy, k, row_drop_limit, row_min_p = load_params(
                p_params, temperature, top_k, drop_limit, min_p, b
            )
            cut, tie, mass = cut_from_row(
                row,
                V,
                max_logit,
                mass,
                inv_temperature,
                k,
                row_drop_limit,
                row_min_p,
                cut,
                tie,
                SCAN_TILE,
                SHIFT,
            )
    else:
        max_logit, mass = combine_row(maxima, sums, splits, S)
    start = load_key(starts, start, b)
    stream = branch_stream(DRAFT, depth, node)
    u, unused_uniform = uniforms(load_key(seeds, seed, b), start + step, start, stream)
    t = tl.arange(0, S)
    m = tl.load(maxima + t, mask=t < splits, other=-float("inf"))
    if num_listed > 0:
        z, ids = from_list(token_list, tl.arange(0, MAX_LISTED), num_listed, V, MAX_LISTED)
        token = sample_at(
            survivor_weights(z, ids, cut, tie, max_logit, inv_temperature), ids, u * mass.to(tl.float64)
        )
    elif cut > -float("inf"):
        # The sums of the survivors in each split are not known.
        token, last = tl.full([], NONE, tl.int32), tl.full([], 0, tl.int32)
        level = u * mass.to(tl.float64)
        for first in range(0, V, SCAN_TILE):
            ids = first + tl.arange(0, SCAN_TILE)
            weight = survivor_weights(load_logits(row, ids, V), ids, cut, tie, max_logit, inv_temperature)
            token = tl.minimum(token, first_beyond(weight, ids, level))
            last = tl.maximum(last, tl.max(tl.where(weight > 0, ids, 0), axis=0))
            level -= tl.sum(weight, axis=0).to(tl.float64)
        token = tl.where(token == NONE, last, token)
    else:
        part = tl.load(sums + t, mask=t < splits, other=0.0)
        part = tl.where(part == 0, 0.0, part * tl.exp(m - max_logit)).to(tl.float64)
        cdf = tl.cumsum(part, axis=0)
        level = u * tl.sum(part, axis=0)
        split = tl.min(tl.where((cdf > level) & (part > 0), t, S), axis=0)
        split = tl.where(split == S, tl.max(tl.where(part > 0, t, 0), axis=0), split)
        ids = split * SPLIT + tl.arange(0, SPLIT)
        weight = tl.exp(apply_temperature(load_logits(row, ids, V), inv_temperature, ADJUST) - max_logit)
        token = sample_at(weight, ids, level - (pick(cdf, t, split) - pick(part, t, split)))
    log_sum_exp = max_logit.to(tl.float64) + tl.log(mass).to(tl.float64)
    if ADJUST:
        # A greedy row takes the first of the largest, and has a point mass there.
        argmax = tl.load(split_argmax + t, mask=t < splits, other=0.0).to(tl.int32, bitcast=True)
        argmax_token = tl.min(tl.where(m == tl.max(m, axis=0), argmax, NONE), axis=0)
        token = tl.where(greedy, argmax_token, token)
        log_sum_exp = tl.where(greedy, 0.0, log_sum_exp)
        tie = tl.where(greedy, argmax_token, tie)
    has_softmax = (mass > 0) & (mass < float("inf"))
    tl.store(tokens + b, tl.where(has_softmax, token, 0))
    tl.store(lse + b, tl.where(has_softmax, log_sum_exp, float("nan")))
    if ADJUST:
        tl.store(cuts + b, cut)
        tl.store(ties + b, tie)

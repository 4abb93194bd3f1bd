"""Kernels between ``scan`` and ``finish`` that find the cuts of top-k, top-p and min-p.

``narrow`` finds the cut of every row that has filters. Where more tokens may survive than it can list,
``widen`` reads the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import CUT
from outpace.verification.kernels.threshold import NUM_ROW_STATS, compute_row_stats, cut_from_row, load_params
from outpace.verification.kernels.workspace import (
    ANY_ALIGNMENT,
    NOT_SPECIALIZED,
    load_num_listed,
    load_row_stats,
    locate_row,
    store_row_stats,
    token_list_at,
    workspace_parts,
)


@triton.jit
def cut_row(lengths, B, g, P, skipped, LENGTHS: tl.constexpr):
    """Return the row whose cut this block finds.

    The results are the row's index, sequence and position, whether it is the draft's, and whether the
    sequence has that position.
    """
    row = tl.program_id(0) + skipped
    b, i, is_draft = locate_row(row, B, g, P)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    return row.to(tl.int64), b, i, is_draft, i < length + (P - g) * (1 - is_draft)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def narrow(
    target, draft, lengths, p_params, q_params, workspace, B, g, V, splits,
    p_row, p_position, q_row, q_position, temperature, top_k, drop_limit, min_p, q_temperature, q_top_k,
    q_drop_limit, q_min_p,
    skipped,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, SCAN_TILE: tl.constexpr, MAX_LISTED: tl.constexpr,
    S: tl.constexpr,
    LENGTHS: tl.constexpr,
    ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr, SHIFT: tl.constexpr, SHIFT_Q: tl.constexpr,
):  # fmt: skip
    """Store the statistics of every row that has filters, with one block per row, the target's rows first.

    The first ``skipped`` rows have no filters.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, split_argmax, parts, part_argmax, counter, row_stats, chunks = workspace_parts(
        workspace, B, g, P, splits
    )
    at, b, i, is_draft, in_use = cut_row(lengths, B, g, P, skipped, LENGTHS)
    m, w, c = maxima + at * splits, sums + at * splits, chunks + at * splits * (SPLIT // CHUNK)
    token_list = token_list_at(chunks, at, B, g, P, splits, SPLIT // CHUNK, MAX_LISTED)
    if in_use:
        if is_draft == 0:
            if ADJUST == CUT:
                max_logit, mass, cut, tie, num_listed = compute_row_stats(
                    target + b * p_row + i.to(tl.int64) * p_position, c, token_list, m, w, p_params,
                    temperature, top_k, drop_limit, min_p, b, V, splits,
                    S, S * (SPLIT // CHUNK), CHUNK, SCAN_TILE, MAX_LISTED, SHIFT,
                )  # fmt: skip
                store_row_stats(row_stats + NUM_ROW_STATS * at, max_logit, mass, cut, tie, num_listed)
        else:
            if ADJUST_Q == CUT:
                max_logit, mass, cut, tie, num_listed = compute_row_stats(
                    draft + b * q_row + i.to(tl.int64) * q_position, c, token_list, m, w, q_params,
                    q_temperature, q_top_k, q_drop_limit, q_min_p, b, V, splits,
                    S, S * (SPLIT // CHUNK), CHUNK, SCAN_TILE, MAX_LISTED, SHIFT_Q,
                )  # fmt: skip
                store_row_stats(row_stats + NUM_ROW_STATS * at, max_logit, mass, cut, tie, num_listed)


@triton.jit
def widen_row(
    logits, row_stats, at, filters, temperature, top_k, drop_limit, min_p, b, V,
    ROW_TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Store the statistics of one row, from all of its logits."""
    max_logit, mass, bound, highest = load_row_stats(row_stats, at, at >= 0)
    inv_temperature, greedy, k, row_drop_limit, row_min_p = load_params(
        filters, temperature, top_k, drop_limit, min_p, b
    )
    cut, tie, survivor_mass = cut_from_row(
        logits, V, max_logit, mass, inv_temperature, k, row_drop_limit, row_min_p, bound, highest,
        ROW_TILE, SHIFT,
    )  # fmt: skip
    none_listed = tl.full([], 0, tl.int32)
    store_row_stats(row_stats + NUM_ROW_STATS * at, max_logit, survivor_mass, cut, tie, none_listed)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def widen(
    target, draft, lengths, p_params, q_params, workspace, B, g, V, splits,
    p_row, p_position, q_row, q_position, temperature, top_k, drop_limit, min_p, q_temperature, q_top_k,
    q_drop_limit, q_min_p,
    skipped,
    ROW_TILE: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr,
    SHIFT: tl.constexpr, SHIFT_Q: tl.constexpr,
):  # fmt: skip
    """Store the statistics of rows in which too many tokens may survive for ``narrow`` to list.

    Most launches find no such row.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, split_argmax, parts, part_argmax, counter, row_stats, chunks = workspace_parts(
        workspace, B, g, P, splits
    )
    at, b, i, is_draft, in_use = cut_row(lengths, B, g, P, skipped, LENGTHS)
    if in_use:
        if load_num_listed(row_stats, at) < 0:
            if is_draft == 0:
                if ADJUST == CUT:
                    widen_row(
                        target + b * p_row + i.to(tl.int64) * p_position, row_stats, at, p_params,
                        temperature, top_k, drop_limit, min_p, b, V, ROW_TILE, SHIFT,
                    )  # fmt: skip
            else:
                if ADJUST_Q == CUT:
                    widen_row(
                        draft + b * q_row + i.to(tl.int64) * q_position, row_stats, at, q_params,
                        q_temperature, q_top_k, q_drop_limit, q_min_p, b, V, ROW_TILE, SHIFT_Q,
                    )  # fmt: skip

"""Rules as fused Triton kernels on float16, bfloat16 or float32 logits, without host synchronization.

There are two launches, or four with top-k, top-p or min-p. Every row of logits is divided into splits. Their
size depends on V alone, so a row's verdict does not depend on its neighbours.

The first kernel, ``scan``, reads the drafted positions once. It stores the maximum and the sum of
exponentials of each split. In the last kernel, ``finish``, every block combines these numbers, a few hundred
in a fixed order. So it knows how many draft tokens are accepted. It then sums the weights of its split of the
one row that the next token comes from. The last block to finish samples the token.

With top-k, top-p or min-p, the kernels of ``cut`` find each row's cut between the two. ``scan`` also sets
the counters of ``finish`` to 0. So there is no state between calls, and a CUDA graph can capture all
launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import (
    ACCEPT,
    BLOCK,
    CUT,
    NONE,
    SIGMOID,
    apply_temperature,
    argmax_of,
    branch_stream,
    combine_splits,
    exponentials,
    first_max,
    gumbel_logits,
    is_invalid_row,
    load_adjusted,
    load_key,
    load_logits,
    load_splits,
    load_temperature,
    next_token_weights,
    pick,
    sample_at,
    scaled_sigmoid,
    store_verdict,
    uniforms,
)
from outpace.verification.kernels.workspace import (
    ANY_ALIGNMENT,
    NOT_SPECIALIZED,
    load_num_listed,
    load_row_stats,
    locate_row,
    token_list_at,
    workspace_parts,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def scan(
    target, draft, lengths, p_params, q_params, workspace, B, g, V, splits,
    p_row, p_position, q_row, q_position, temperature, q_temperature,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr,
    ADJUST_Q: tl.constexpr, GREEDY: tl.constexpr, GREEDY_Q: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Store maximum, sum of exponentials and argmax of every split, and the maxima of its chunks.

    Rows of p come first, then rows of q, one for each drafted position. If p has filters, the position after
    the draft tokens is a row of p, too.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, split_argmax, parts, part_argmax, counter, row_stats, chunks = workspace_parts(
        workspace, B, g, P, splits
    )
    pid = tl.program_id(0)
    s = pid % splits
    row = pid // splits
    b, i, is_draft = locate_row(row, B, g, P)
    if pid < B:
        tl.store(counter + pid, 0.0)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    if i < length + (P - g) * (1 - is_draft):
        ids = s * SPLIT + tl.arange(0, SPLIT)
        if is_draft == 0:
            inv_temperature, greedy = load_temperature(p_params, temperature, b, ADJUST)
            z = load_logits(target + b * p_row + i.to(tl.int64) * p_position, ids, V)
            x = apply_temperature(z, inv_temperature, ADJUST)
        else:
            inv_temperature, greedy = load_temperature(q_params, q_temperature, b, ADJUST_Q)
            z = load_logits(draft + b * q_row + i.to(tl.int64) * q_position, ids, V)
            x = apply_temperature(z, inv_temperature, ADJUST_Q)
        top, e = exponentials(x)
        at = row.to(tl.int64) * splits + s
        tl.store(maxima + at, top)
        tl.store(sums + at, tl.sum(e, axis=0))
        if GREEDY or GREEDY_Q:
            tl.store(split_argmax + at, first_max(x, ids).to(tl.float32, bitcast=True))
        if CHUNKED:
            each = SPLIT // CHUNK
            heights = tl.max(tl.reshape(z, [SPLIT // CHUNK, CHUNK]), axis=1)
            tl.store(chunks + at * each + tl.arange(0, SPLIT // CHUNK), heights)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def finish(
    target, draft, tokens, lengths, draft_lse, draft_cut, draft_tie, seeds, starts, invalid, p_params,
    q_params, workspace, accepted, next_token, bad, seed: tl.int64, start: tl.int64, B, g, V, splits,
    p_row, p_position, q_row, q_position, temperature, q_temperature, lenience, alpha, width, tiles, depth,
    SPLIT: tl.constexpr, CHUNKS: tl.constexpr, MAX_LISTED: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    RULE: tl.constexpr, HAS_Q: tl.constexpr, HAS_LSE: tl.constexpr, HAS_CUT: tl.constexpr,
    LENGTHS: tl.constexpr, HAS_INVALID: tl.constexpr, ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr,
    GREEDY: tl.constexpr, GREEDY_Q: tl.constexpr, LENIENT: tl.constexpr,
):  # fmt: skip
    """Decide how many draft tokens are accepted, and sample the token after them.

    There is one block per split of the row that the next token comes from. Under rule block there is one per
    split of every row, since its accepted length depends on the residual of each.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, split_argmax, parts, part_argmax, counter, row_stats, chunks = workspace_parts(
        workspace, B, g, P, splits
    )
    pid = tl.program_id(0)
    blocks = tl.cdiv(splits, tiles)
    rows = 1
    if RULE == BLOCK:
        rows = g + 1
    row = pid // blocks
    b = (row // rows).to(tl.int64)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    bad_length = (length < 0) | (length > g)
    length = tl.minimum(tl.maximum(length, 0), g)
    seed, start = load_key(seeds, seed, b), load_key(starts, start, b)
    inv_temperature, greedy = load_temperature(p_params, temperature, b, ADJUST)
    q_inv_temperature, q_greedy = load_temperature(q_params, q_temperature, b, ADJUST_Q)
    p_rows, q_rows = target + b * p_row, draft + b * q_row

    # Probabilities of the draft tokens
    i = tl.arange(0, G)
    drafted = i < length
    token = tl.load(tokens + b * g + i, mask=drafted, other=0)
    bad_token = drafted & ((token < 0) | (token >= V))
    token = tl.where(bad_token, 0, token)
    p_cut, q_cut = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
    p_tie, q_tie = tl.zeros([G], tl.int32), tl.zeros([G], tl.int32)
    q_first = B * P + b * g
    # All loads come before anything is combined, so that they overlap.
    if ADJUST == CUT:
        max_logit, log_sum, p_cut, p_tie = load_row_stats(row_stats, b * P + i, drafted)
    elif RULE != SIGMOID:
        split_maxima, split_sums = load_splits(maxima, sums, b * P, i, splits, drafted, S)
    if HAS_Q:
        if HAS_CUT:
            q_cut = tl.load(draft_cut + b * g + i, mask=drafted, other=0.0)
            q_tie = tl.load(draft_tie + b * g + i, mask=drafted, other=0)
        elif ADJUST_Q == CUT:
            q_max_logit, q_log_sum, q_cut, q_tie = load_row_stats(row_stats, q_first + i, drafted)
        elif RULE != SIGMOID and not HAS_LSE:
            q_split_maxima, q_split_sums = load_splits(maxima, sums, q_first, i, splits, drafted, S)
        if HAS_LSE:
            lse = tl.load(draft_lse + b * g + i, mask=drafted, other=0.0)
    bounds = tl.where(drafted, V, 0)
    x = load_adjusted(
        p_rows + i.to(tl.int64) * p_position, token, bounds, inv_temperature, p_cut, p_tie, ADJUST
    )
    if HAS_Q:
        y = load_adjusted(
            q_rows + i.to(tl.int64) * q_position, token, bounds, q_inv_temperature, q_cut, q_tie, ADJUST_Q
        )
    accept_stream = branch_stream(ACCEPT, depth, 0)
    r, u = uniforms(seed, start + i, start, accept_stream)

    unusable = bad_token
    if RULE == SIGMOID:
        if ADJUST == CUT:  # a cut hides NaN and +inf
            unusable |= ~(tl.abs(log_sum) < float("inf"))
        max_logit, log_sum = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
        px = scaled_sigmoid(x, alpha, width)
        unusable |= px != px
    else:
        if ADJUST != CUT:
            max_logit, log_sum = combine_splits(split_maxima, split_sums)
        unusable |= ~(tl.abs(log_sum) < float("inf"))
        px = tl.exp((x - max_logit) - log_sum)
        if GREEDY:
            top = argmax_of(maxima, split_argmax, b * P, i, splits, drafted, S)
            greedy_px = (token == top).to(tl.float32)
            if LENIENT:
                greedy_px = (x >= max_logit + tl.log(lenience)).to(tl.float32)
            px = tl.where(greedy, greedy_px, px)
    qx = tl.full([G], 1.0, tl.float32)
    q_top = tl.full([G], 0, tl.int32)
    if HAS_Q:
        bad_q = i < 0
        if ADJUST_Q == CUT and not HAS_CUT:
            bad_q |= ~(tl.abs(q_log_sum) < float("inf"))  # a cut hides NaN and +inf
        if HAS_LSE:
            # As a sum of two float32, since one alone rounds a large logsumexp too much
            q_max_logit = lse.to(tl.float32)
            q_log_sum = (lse - q_max_logit.to(tl.float64)).to(tl.float32)
            bad_q |= ~(tl.abs(q_max_logit) < float("inf"))
        elif ADJUST_Q != CUT:
            if RULE == SIGMOID:
                q_max_logit, q_log_sum = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
            else:
                q_max_logit, q_log_sum = combine_splits(q_split_maxima, q_split_sums)
                bad_q |= ~(tl.abs(q_log_sum) < float("inf"))
        if RULE == SIGMOID:
            qx = scaled_sigmoid(y, alpha, width)
            unusable |= bad_q | (qx != qx)
        else:
            if HAS_LSE:
                bad_q |= ~(y < float("inf"))
            if GREEDY:
                bad_q &= greedy == 0  # a greedy row does not depend on q
            unusable |= bad_q
            qx = tl.exp((y - q_max_logit) - q_log_sum)
            if GREEDY_Q:
                if HAS_CUT:  # a greedy drafter stores its token there
                    q_top = q_tie
                else:
                    q_top = argmax_of(maxima, split_argmax, q_first, i, splits, drafted, S)
                qx = tl.where(q_greedy, (token == q_top).to(tl.float32), qx)
    else:
        q_max_logit, q_log_sum = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
    if GREEDY:
        qx = tl.where(greedy, 0.0, qx)  # a greedy row accepts the argmax whatever q was
    unusable &= drafted
    if RULE == BLOCK:  # the block ends before the first unusable logits
        length = tl.min(tl.where(unusable, i, length), axis=0)
        drafted = i < length
    px64, qx64 = px.to(tl.float64), qx.to(tl.float64)

    carry = tl.full([G], 1.0, tl.float64)  # rule block: probability that the first i may be accepted,
    after = tl.full([G], 1.0, tl.float64)  # and that the first i + 1 may be
    n = length
    if RULE == BLOCK:
        n = row % rows
        so_far = tl.full([], 1.0, tl.float64)
        for j in range(g):
            a, c = pick(px64, i, j), pick(qx64, i, j)
            carry = tl.where(i == j, so_far, carry)
            so_far = tl.where((so_far > 0) & (a > 0), tl.minimum(so_far * a / c, 1.0), 0.0)
            after = tl.where(i == j, so_far, after)
    else:
        accept = (r * (lenience * qx64) <= px64) & (px64 > 0) & ~unusable
        n = tl.min(tl.where(accept & drafted, length, tl.minimum(i, length)), axis=0)
    scale = tl.full([], 1.0, tl.float32)
    if RULE == BLOCK:
        scale = pick(carry, i, n).to(tl.float32)

    # The row after n draft tokens
    token_n, q_top_n = pick(token, i, n), pick(q_top, i, n)
    max_logit_n, log_sum_n = pick(max_logit, i, n), pick(log_sum, i, n)
    q_max_logit_n, q_log_sum_n = pick(q_max_logit, i, n), pick(q_log_sum, i, n)
    q_cut_n, q_tie_n = pick(q_cut, i, n), pick(q_tie, i, n)
    p_cut_n, p_tie_n = 0.0, 0
    spread: tl.constexpr = True  # whether all blocks share the row
    if ADJUST == CUT:
        p_max_logit_n, p_log_sum_n, p_cut_n, p_tie_n = load_row_stats(row_stats, b * P + n, n <= length)
        if RULE != BLOCK:
            num_listed = load_num_listed(row_stats, b * P + n)
            if LENGTHS:
                num_listed = tl.where(length == 0, 0, num_listed)  # no draft: Gumbel noise, no list
            spread = num_listed == 0
            if (num_listed > 0) & (pid % blocks == 0):
                # The survivors are a short list, and one block samples from it.
                token_list = token_list_at(chunks, b * P + n, B, g, P, splits, CHUNKS, MAX_LISTED)
                index = tl.arange(0, MAX_LISTED)
                ids = tl.load(token_list + index, mask=index < num_listed, other=0.0).to(
                    tl.int32, bitcast=True
                )
                ids = tl.where(index < num_listed, ids, V)
                reference, w, p, z = next_token_weights(
                    p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, ids, V,
                    n, length, token_n, max_logit_n, log_sum_n, q_max_logit_n, q_log_sum_n, p_cut_n, p_tie_n,
                    q_cut_n, q_tie_n,
                    scale, inv_temperature, q_inv_temperature, q_greedy, q_top_n,
                    alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
                )  # fmt: skip
                w = tl.where(tl.sum(w, axis=0) == 0, p, w)
                total = tl.sum(w, axis=0).to(tl.float64)
                unused_uniform, level = uniforms(seed, start + n, start, accept_stream)
                is_invalid = is_invalid_row(bad_token, bad_length, invalid, b, HAS_INVALID)
                is_unusable = pick(unusable.to(tl.int32), i, n) > 0
                is_unusable |= ~((total > 0) & (total < float("inf")))
                is_unusable |= ~(tl.abs(p_log_sum_n) < float("inf"))
                sampled = sample_at(w, ids, level * total)
                store_verdict(accepted, next_token, bad, b, is_invalid, is_unusable, n, sampled)
    if spread:
        if n <= length:
            for tile in range(tiles):
                s = pid % blocks * tiles + tile
                ids = s * SPLIT + tl.arange(0, SPLIT)
                reference, w, p, z = next_token_weights(
                    p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, ids, V,
                    n, length, token_n, max_logit_n, log_sum_n, q_max_logit_n, q_log_sum_n, p_cut_n, p_tie_n,
                    q_cut_n, q_tie_n,
                    scale, inv_temperature, q_inv_temperature, q_greedy, q_top_n,
                    alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
                )  # fmt: skip
                at = row.to(tl.int64) * splits + s
                inside = s < splits
                tl.store(parts + 4 * at, reference, mask=inside)
                tl.store(parts + 4 * at + 1, tl.sum(w, axis=0), mask=inside)
                tl.store(parts + 4 * at + 2, tl.sum(p, axis=0), mask=inside)
                if GREEDY or LENGTHS:
                    largest_value = tl.max(z, axis=0)
                    argmax = first_max(z, ids)
                    if LENGTHS:
                        if length == 0:  # decoding without speculation, whatever the rule
                            summit, value = gumbel_logits(z, s, seed, start, greedy, SPLIT)
                            argmax = first_max(value, ids)
                            largest_value = tl.max(value, axis=0)
                    tl.store(parts + 4 * at + 3, largest_value, mask=inside)
                    tl.store(part_argmax + at, argmax.to(tl.float32, bitcast=True), mask=inside)
        done = tl.atomic_add(counter + b, 1.0, sem="acq_rel")
        if done == blocks * rows - 1:
            # The last block knows all splits
            t = tl.arange(0, S)
            first = b * rows * splits
            if RULE == BLOCK:
                # The residual of each prefix, and so whether it passes
                where = first + i[:, None] * splits + t[None, :]
                part_mask = drafted[:, None] & (t < splits)[None, :]
                left = tl.sum(
                    tl.load(parts + 4 * where + 1, mask=part_mask, other=0.0, cache_modifier=".cg").to(
                        tl.float64
                    ),
                    axis=1,
                )
                h = tl.where((left == 0) & (carry == 1), 1.0, left / (left + (1 - carry)))
                # Prefix j is row j, tested with the uniform of its last draft token
                rest, unused_uniforms = uniforms(seed, start + i - 1, start, accept_stream)
                passed = drafted & (i > 0) & (rest <= h)
                all_pass = (length > 0) & (pick(r, i, length - 1) <= pick(after, i, length - 1))
                n = tl.max(tl.where(passed, i, 0), axis=0)
                n = tl.where(all_pass, length, n)
                first += n * splits
            mask = t < splits
            m = tl.load(parts + 4 * (first + t), mask=mask, other=-float("inf"), cache_modifier=".cg")
            w_sums = tl.load(parts + 4 * (first + t) + 1, mask=mask, other=0.0, cache_modifier=".cg")
            p_sums = tl.load(parts + 4 * (first + t) + 2, mask=mask, other=0.0, cache_modifier=".cg")
            peak = tl.max(tl.where(w_sums > 0, m, -float("inf")), axis=0)
            peak = tl.where(peak == -float("inf"), 0.0, peak)
            factor = tl.where(w_sums == 0, 0.0, tl.exp(m - peak))
            empty = tl.sum(w_sums, axis=0) == 0
            # If p equals q up to rounding, there is no residual. Then p is used
            mass = tl.where(empty, p_sums, w_sums * factor).to(tl.float64)
            cdf = tl.cumsum(mass, axis=0)
            total = tl.sum(mass, axis=0)
            is_invalid = is_invalid_row(bad_token, bad_length, invalid, b, HAS_INVALID)
            sound = total
            if GREEDY:
                sound = tl.where(greedy, tl.sum(p_sums, axis=0).to(tl.float64), total)
            is_unusable = ~((sound > 0) & (sound < float("inf")))
            is_unusable |= pick(unusable.to(tl.int32), i, n) > 0
            unused_uniform, level = uniforms(seed, start + n, start, accept_stream)
            level = level * total
            chosen = tl.min(tl.where((cdf > level) & (mass > 0), t, S), axis=0)
            chosen = tl.where(chosen == S, tl.max(tl.where(mass > 0, t, 0), axis=0), chosen)
            level = level - (pick(cdf, t, chosen) - pick(mass, t, chosen))
            level = level / tl.where(empty, 1.0, pick(factor, t, chosen)).to(tl.float64)
            if RULE == BLOCK:
                token_n, q_top_n = pick(token, i, n), pick(q_top, i, n)
                max_logit_n, log_sum_n = pick(max_logit, i, n), pick(log_sum, i, n)
                q_max_logit_n, q_log_sum_n = pick(q_max_logit, i, n), pick(q_log_sum, i, n)
                scale = pick(carry, i, n).to(tl.float32)
                q_cut_n, q_tie_n = pick(q_cut, i, n), pick(q_tie, i, n)
                if ADJUST == CUT:
                    p_max_logit_n, p_log_sum_n, p_cut_n, p_tie_n = load_row_stats(
                        row_stats, b * P + n, n <= length
                    )
            if ADJUST == CUT:  # a cut hides NaN and +inf
                is_unusable |= ~(tl.abs(p_log_sum_n) < float("inf"))
            places = chosen * SPLIT + tl.arange(0, SPLIT)
            base, weight, chance, logit = next_token_weights(
                p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, places, V,
                n, length, token_n, max_logit_n, log_sum_n, q_max_logit_n, q_log_sum_n, p_cut_n, p_tie_n,
                q_cut_n, q_tie_n,
                scale, inv_temperature, q_inv_temperature, q_greedy, q_top_n,
                alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
            )  # fmt: skip
            weight = tl.where(empty, chance, weight)
            sampled = sample_at(weight, places, level)
            if GREEDY or LENGTHS:
                largest = tl.load(
                    parts + 4 * (first + t) + 3, mask=mask, other=-float("inf"), cache_modifier=".cg"
                )
                found = tl.load(part_argmax + first + t, mask=mask, other=0.0, cache_modifier=".cg")
                if LENGTHS:  # logits with Gumbel noise are relative to their split's maximum
                    above = tl.where(m == -float("inf"), -float("inf"), m - tl.max(m, axis=0))
                    largest = tl.where(length == 0, largest + above, largest)
                argmax_token = tl.min(
                    tl.where(largest == tl.max(largest, axis=0), found.to(tl.int32, bitcast=True), NONE),
                    axis=0,
                )
                sampled = tl.where(greedy | (length == 0), argmax_token, sampled)
            store_verdict(accepted, next_token, bad, b, is_invalid, is_unusable, n, sampled)

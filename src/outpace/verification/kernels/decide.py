"""Rules as fused Triton kernels: straight from 16-bit logits, two launches, no waiting host.

Every row of logits is divided into splits. Their size depends on V alone, so a row's verdict does not depend
on its neighbours.

The first kernel, ``scan``, reads the drafted positions once. It stores the maximum and the sum of
exponentials of each split. In the second, ``finish``, every block combines these numbers, a few hundred in a
fixed order. So it knows how many draft tokens are accepted. It then sums the weights of its split of the one
row that the next token comes from. The last block to finish samples the token.

With top-k, top-p or min-p, ``narrow`` and ``widen`` find each row's cut between the two. Each kernel clears
the workspace of the next. So there is no state between calls, and all can be captured in a CUDA graph.
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
    argmax_of,
    coolness_of,
    drawn_at,
    exponentials,
    first_max,
    key_of,
    logits_of,
    pick,
    raced,
    raw,
    softmax_of,
    splits_of,
    squash,
    tempered,
    uniforms,
    weights_of,
)
from outpace.verification.kernels.rooms import (
    SIZES,
    SMALL,
    facts_of,
    list_of,
    listed_of,
    note,
    place_of,
    rooms,
)
from outpace.verification.kernels.threshold import FACTS, cut_of_many, knobs_of
from outpace.verification.kernels.threshold import facts as facts_of_row


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def scan(
    target, draft, lengths, knobs, q_knobs, work, B, g, V, splits,
    p_row, p_position, q_row, q_position, heat, q_heat,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr,
    ADJUST_Q: tl.constexpr, GREEDY: tl.constexpr, GREEDY_Q: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Store maximum, sum of exponentials and argmax of every split, and the maxima of its chunks.

    p rows come first, then q rows. Rows are the drafted positions. Where they are cut, the target's position
    after them is a row, too.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, tops, parts, heads, counter, facts, chunks = rooms(work, B, g, P, splits)
    pid = tl.program_id(0)
    s = pid % splits
    row = pid // splits
    b, i, q_side = place_of(row, B, g, P)
    if pid < B:
        tl.store(counter + pid, 0.0)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    if i < length + (P - g) * (1 - q_side):
        ids = s * SPLIT + tl.arange(0, SPLIT)
        if q_side == 0:
            coolness, greedy = coolness_of(knobs, heat, b, ADJUST)
            z = raw(target + b * p_row + i.to(tl.int64) * p_position, ids, V)
            x = tempered(z, coolness, ADJUST)
        else:
            coolness, greedy = coolness_of(q_knobs, q_heat, b, ADJUST_Q)
            z = raw(draft + b * q_row + i.to(tl.int64) * q_position, ids, V)
            x = tempered(z, coolness, ADJUST_Q)
        top, e = exponentials(x)
        at = row.to(tl.int64) * splits + s
        tl.store(maxima + at, top)
        tl.store(sums + at, tl.sum(e, axis=0))
        if GREEDY or GREEDY_Q:
            tl.store(tops + at, first_max(x, ids).to(tl.float32, bitcast=True))
        if CHUNKED:
            each = SPLIT // CHUNK
            heights = tl.max(tl.reshape(z, [SPLIT // CHUNK, CHUNK]), axis=1)
            tl.store(chunks + at * each + tl.arange(0, SPLIT // CHUNK), heights)


@triton.jit
def cut_row(lengths, B, g, P, skipped, LENGTHS: tl.constexpr):
    """Return the row that a block cuts.

    It returns the row's index, sequence and position, whether it is the draft's, and whether there is
    anything in it.
    """
    row = tl.program_id(0) + skipped
    b, i, q_side = place_of(row, B, g, P)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    return row.to(tl.int64), b, i, q_side, i < length + (P - g) * (1 - q_side)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def narrow(
    target, draft, lengths, knobs, q_knobs, work, B, g, V, splits,
    p_row, p_position, q_row, q_position, heat, top_k, limit, min_p, q_heat, q_top_k, q_limit, q_min_p,
    skipped,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr, S: tl.constexpr,
    LENGTHS: tl.constexpr,
    ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr, SHIFT: tl.constexpr, SHIFT_Q: tl.constexpr,
):  # fmt: skip
    """Store the facts of every row that is cut, with one block per row, the target's first.

    The first ``skipped`` rows are not cut.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, tops, parts, heads, counter, facts, chunks = rooms(work, B, g, P, splits)
    at, b, i, q_side, there = cut_row(lengths, B, g, P, skipped, LENGTHS)
    m, w, c = maxima + at * splits, sums + at * splits, chunks + at * splits * (SPLIT // CHUNK)
    few = list_of(chunks, at, B, g, P, splits, SPLIT // CHUNK, FEW)
    if there:
        if q_side == 0:
            if ADJUST == CUT:
                most, mass, cut, tie, listed = facts_of_row(
                    target + b * p_row + i.to(tl.int64) * p_position, c, few, m, w, knobs,
                    heat, top_k, limit, min_p, b, V, splits,
                    S, S * (SPLIT // CHUNK), CHUNK, WIDE, FEW, SHIFT,
                )  # fmt: skip
                note(facts + FACTS * at, most, mass, cut, tie, listed)
        else:
            if ADJUST_Q == CUT:
                most, mass, cut, tie, listed = facts_of_row(
                    draft + b * q_row + i.to(tl.int64) * q_position, c, few, m, w, q_knobs,
                    q_heat, q_top_k, q_limit, q_min_p, b, V, splits,
                    S, S * (SPLIT // CHUNK), CHUNK, WIDE, FEW, SHIFT_Q,
                )  # fmt: skip
                note(facts + FACTS * at, most, mass, cut, tie, listed)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def widen(
    target, draft, lengths, knobs, q_knobs, work, B, g, V, splits,
    p_row, p_position, q_row, q_position, heat, top_k, limit, min_p, q_heat, q_top_k, q_limit, q_min_p,
    skipped,
    MANY: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr,
    SHIFT: tl.constexpr, SHIFT_Q: tl.constexpr,
):  # fmt: skip
    """Store the facts of rows in which too many tokens may survive for ``narrow`` to list.

    Most launches find no such row.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, tops, parts, heads, counter, facts, chunks = rooms(work, B, g, P, splits)
    at, b, i, q_side, there = cut_row(lengths, B, g, P, skipped, LENGTHS)
    if there:
        if listed_of(facts, at) < 0:
            most, mass, bound, highest = facts_of(facts, at, at >= 0)
            if q_side == 0:
                if ADJUST == CUT:
                    coolness, greedy, k, most_lost, least_p = knobs_of(knobs, heat, top_k, limit, min_p, b)
                    cut, tie, kept = cut_of_many(
                        target + b * p_row + i.to(tl.int64) * p_position, V, most, mass, coolness,
                        k, most_lost, least_p, bound, highest, MANY, SHIFT,
                    )  # fmt: skip
                    note(facts + FACTS * at, most, kept, cut, tie, tl.full([], 0, tl.int32))
            else:
                if ADJUST_Q == CUT:
                    coolness, greedy, k, most_lost, least_p = knobs_of(
                        q_knobs, q_heat, q_top_k, q_limit, q_min_p, b
                    )
                    cut, tie, kept = cut_of_many(
                        draft + b * q_row + i.to(tl.int64) * q_position, V, most, mass, coolness,
                        k, most_lost, least_p, bound, highest, MANY, SHIFT_Q,
                    )  # fmt: skip
                    note(facts + FACTS * at, most, kept, cut, tie, tl.full([], 0, tl.int32))


@triton.jit
def spoiled(unusable, outside, strange, given_up, b, GIVEN_UP: tl.constexpr):
    """Return whether a row is bad, by logits that its verdict depends on or by its inputs."""
    lost = (tl.sum((unusable | outside).to(tl.int32), axis=0) > 0) | strange
    if GIVEN_UP:
        lost |= tl.load(given_up + b) != 0
    return lost


@triton.jit
def tell(accepted, next_token, bad, b, lost, n, token):
    """Store the verdict of a row, with zeros if it is bad."""
    tl.store(accepted + b, tl.where(lost, 0, n))
    tl.store(next_token + b, tl.where(lost, 0, token))
    tl.store(bad + b, lost)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def finish(
    target, draft, tokens, lengths, draft_lse, draft_cut, draft_tie, seeds, starts, given_up, knobs, q_knobs,
    work, accepted, next_token, bad, seed: tl.int64, start: tl.int64, B, g, V, splits,
    p_row, p_position, q_row, q_position, heat, q_heat, lenience, alpha, width, tiles,
    SPLIT: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    RULE: tl.constexpr, HAS_Q: tl.constexpr, HAS_LSE: tl.constexpr, HAS_CUT: tl.constexpr,
    LENGTHS: tl.constexpr, GIVEN_UP: tl.constexpr, ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr,
    GREEDY: tl.constexpr, GREEDY_Q: tl.constexpr, LENIENT: tl.constexpr,
):  # fmt: skip
    """Decide how many draft tokens are accepted, and sample the token after them.

    There is one block per split of the row that the next token comes from. Under rule block there is one per
    split of every row, since its accepted length depends on the residual of each.
    """
    P = g
    if ADJUST == CUT:
        P = g + 1
    maxima, sums, tops, parts, heads, counter, facts, chunks = rooms(work, B, g, P, splits)
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
    strange = (length < 0) | (length > g)
    length = tl.minimum(tl.maximum(length, 0), g)
    seed, start = key_of(seeds, seed, b), key_of(starts, start, b)
    coolness, greedy = coolness_of(knobs, heat, b, ADJUST)
    q_coolness, q_greedy = coolness_of(q_knobs, q_heat, b, ADJUST_Q)
    p_rows, q_rows = target + b * p_row, draft + b * q_row

    # Probabilities of the draft tokens
    i = tl.arange(0, G)
    drafted = i < length
    token = tl.load(tokens + b * g + i, mask=drafted, other=0)
    outside = drafted & ((token < 0) | (token >= V))
    token = tl.where(outside, 0, token)
    p_cut, q_cut = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
    p_tie, q_tie = tl.zeros([G], tl.int32), tl.zeros([G], tl.int32)
    q_first = B * P + b * g
    # All loads come before anything is combined, so that they overlap.
    if ADJUST == CUT:
        most, log, p_cut, p_tie = facts_of(facts, b * P + i, drafted)
    elif RULE != SIGMOID:
        tops_of, parts_of = splits_of(maxima, sums, b * P, i, splits, drafted, S)
    if HAS_Q:
        if HAS_CUT:
            q_cut = tl.load(draft_cut + b * g + i, mask=drafted, other=0.0)
            q_tie = tl.load(draft_tie + b * g + i, mask=drafted, other=0)
        elif ADJUST_Q == CUT:
            q_most, q_log, q_cut, q_tie = facts_of(facts, q_first + i, drafted)
        elif RULE != SIGMOID and not HAS_LSE:
            q_tops_of, q_parts_of = splits_of(maxima, sums, q_first, i, splits, drafted, S)
        if HAS_LSE:
            stored = tl.load(draft_lse + b * g + i, mask=drafted, other=0.0)
    bounds = tl.where(drafted, V, 0)
    x = logits_of(p_rows + i.to(tl.int64) * p_position, token, bounds, coolness, p_cut, p_tie, ADJUST)
    if HAS_Q:
        y = logits_of(q_rows + i.to(tl.int64) * q_position, token, bounds, q_coolness, q_cut, q_tie, ADJUST_Q)
    r, u = uniforms(seed, start + i, start, ACCEPT)

    unusable = outside
    if RULE == SIGMOID:
        if ADJUST == CUT:  # a cut hides NaN and +inf
            unusable |= ~(tl.abs(log) < float("inf"))
        most, log = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
        px = squash(x, alpha, width)
        unusable |= px != px
    else:
        if ADJUST != CUT:
            most, log = softmax_of(tops_of, parts_of)
        unusable |= ~(tl.abs(log) < float("inf"))
        px = tl.exp((x - most) - log)
        if GREEDY:
            top = argmax_of(maxima, tops, b * P, i, splits, drafted, S)
            sure = (token == top).to(tl.float32)
            if LENIENT:
                sure = (x >= most + tl.log(lenience)).to(tl.float32)
            px = tl.where(greedy, sure, px)
    qx = tl.full([G], 1.0, tl.float32)
    q_top = tl.full([G], 0, tl.int32)
    if HAS_Q:
        no_q = i < 0
        if ADJUST_Q == CUT and not HAS_CUT:
            no_q |= ~(tl.abs(q_log) < float("inf"))  # a cut hides NaN and +inf
        if HAS_LSE:
            # In two parts, since a large number swallows the digits of what it is relative to
            q_most = stored.to(tl.float32)
            q_log = (stored - q_most.to(tl.float64)).to(tl.float32)
            no_q |= ~(tl.abs(q_most) < float("inf"))
        elif ADJUST_Q != CUT:
            if RULE == SIGMOID:
                q_most, q_log = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
            else:
                q_most, q_log = softmax_of(q_tops_of, q_parts_of)
                no_q |= ~(tl.abs(q_log) < float("inf"))
        if RULE == SIGMOID:
            qx = squash(y, alpha, width)
            unusable |= no_q | (qx != qx)
        else:
            if HAS_LSE:
                no_q |= ~(y < float("inf"))
            if GREEDY:
                no_q &= greedy == 0  # a greedy row does not depend on q
            unusable |= no_q
            qx = tl.exp((y - q_most) - q_log)
            if GREEDY_Q:
                if HAS_CUT:  # a greedy drafter stores its token there
                    q_top = q_tie
                else:
                    q_top = argmax_of(maxima, tops, q_first, i, splits, drafted, S)
                qx = tl.where(q_greedy, (token == q_top).to(tl.float32), qx)
    else:
        q_most, q_log = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
    if GREEDY:
        qx = tl.where(greedy, 0.0, qx)  # a greedy row accepts the argmax whatever q was
    unusable &= drafted
    px64, qx64 = px.to(tl.float64), qx.to(tl.float64)

    carry = tl.full([G], 1.0, tl.float64)  # rule block: probability that the first i may be accepted
    after = tl.full([G], 1.0, tl.float64)  # and the first i + 1
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
        keep = (r * (lenience * qx64) <= px64) & (px64 > 0) & ~unusable
        n = tl.min(tl.where(keep & drafted, length, tl.minimum(i, length)), axis=0)
    scale = tl.full([], 1.0, tl.float32)
    if RULE == BLOCK:
        scale = pick(carry, i, n).to(tl.float32)

    # The row after n draft tokens
    token_n, q_top_n = pick(token, i, n), pick(q_top, i, n)
    most_n, log_n = pick(most, i, n), pick(log, i, n)
    q_most_n, q_log_n = pick(q_most, i, n), pick(q_log, i, n)
    q_cut_n, q_tie_n = pick(q_cut, i, n), pick(q_tie, i, n)
    p_cut_n, p_tie_n = 0.0, 0
    spread: tl.constexpr = True  # over all blocks
    if ADJUST == CUT:
        p_most_n, p_log_n, p_cut_n, p_tie_n = facts_of(facts, b * P + n, n <= length)
        if RULE != BLOCK:
            listed = listed_of(facts, b * P + n)
            if LENGTHS:
                listed = tl.where(length == 0, 0, listed)  # without draft tokens there is a race
            spread = listed == 0
            if (listed > 0) & (pid % blocks == 0):
                # The survivors are a short list, and one block samples from it.
                few = list_of(chunks, b * P + n, B, g, P, splits, CHUNKS, FEW)
                place = tl.arange(0, FEW)
                ids = tl.load(few + place, mask=place < listed, other=0.0).to(tl.int32, bitcast=True)
                ids = tl.where(place < listed, ids, V)
                reference, w, p, z = weights_of(
                    p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, ids, V,
                    n, length, token_n, most_n, log_n, q_most_n, q_log_n, p_cut_n, p_tie_n, q_cut_n, q_tie_n,
                    scale, coolness, q_coolness, q_greedy, q_top_n,
                    alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
                )  # fmt: skip
                w = tl.where(tl.sum(w, axis=0) == 0, p, w)
                total = tl.sum(w, axis=0).to(tl.float64)
                unwanted, level = uniforms(seed, start + n, start, ACCEPT)
                lost = spoiled(unusable & (i <= n), outside, strange, given_up, b, GIVEN_UP)
                lost |= ~((total > 0) & (total < float("inf"))) | ~(tl.abs(p_log_n) < float("inf"))
                tell(accepted, next_token, bad, b, lost, n, drawn_at(w, ids, level * total))
    if spread:
        if n <= length:
            for tile in range(tiles):
                s = pid % blocks * tiles + tile
                ids = s * SPLIT + tl.arange(0, SPLIT)
                reference, w, p, z = weights_of(
                    p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, ids, V,
                    n, length, token_n, most_n, log_n, q_most_n, q_log_n, p_cut_n, p_tie_n, q_cut_n, q_tie_n,
                    scale, coolness, q_coolness, q_greedy, q_top_n,
                    alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
                )  # fmt: skip
                at = row.to(tl.int64) * splits + s
                inside = s < splits
                tl.store(parts + 4 * at, reference, mask=inside)
                tl.store(parts + 4 * at + 1, tl.sum(w, axis=0), mask=inside)
                tl.store(parts + 4 * at + 2, tl.sum(p, axis=0), mask=inside)
                if GREEDY or LENGTHS:
                    height = tl.max(z, axis=0)
                    head = first_max(z, ids)
                    if LENGTHS:
                        if length == 0:  # decoding without speculation, whatever the rule
                            summit, value = raced(z, s, seed, start, greedy, SPLIT)
                            head = first_max(value, ids)
                            height = tl.max(value, axis=0)
                    tl.store(parts + 4 * at + 3, height, mask=inside)
                    tl.store(heads + at, head.to(tl.float32, bitcast=True), mask=inside)
        done = tl.atomic_add(counter + b, 1.0, sem="acq_rel")
        if done == blocks * rows - 1:
            # The last block knows all splits
            t = tl.arange(0, S)
            first = b * rows * splits
            if RULE == BLOCK:
                # The residual of each prefix, and so whether it passes
                where = first + i[:, None] * splits + t[None, :]
                there = drafted[:, None] & (t < splits)[None, :]
                left = tl.sum(
                    tl.load(parts + 4 * where + 1, mask=there, other=0.0, cache_modifier=".cg").to(
                        tl.float64
                    ),
                    axis=1,
                )
                h = tl.where((left == 0) & (carry == 1), 1.0, left / (left + (1 - carry)))
                # Prefix j is row j, tested with the uniform of its last draft token
                rest, unused = uniforms(seed, start + i - 1, start, ACCEPT)
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
            # p and q equal up to rounding leave no residual; then p is as good
            mass = tl.where(empty, p_sums, w_sums * factor).to(tl.float64)
            cdf = tl.cumsum(mass, axis=0)
            total = tl.sum(mass, axis=0)
            # Rule block's verdict depends on every drafted position, the others' on those up to n
            unusable &= (i <= n) | (RULE == BLOCK)
            lost = spoiled(unusable, outside, strange, given_up, b, GIVEN_UP)
            sound = total
            if GREEDY:
                sound = tl.where(greedy, tl.sum(p_sums, axis=0).to(tl.float64), total)
            lost |= ~((sound > 0) & (sound < float("inf")))
            unwanted, level = uniforms(seed, start + n, start, ACCEPT)
            level = level * total
            chosen = tl.min(tl.where((cdf > level) & (mass > 0), t, S), axis=0)
            chosen = tl.where(chosen == S, tl.max(tl.where(mass > 0, t, 0), axis=0), chosen)
            level = level - (pick(cdf, t, chosen) - pick(mass, t, chosen))
            level = level / tl.where(empty, 1.0, pick(factor, t, chosen)).to(tl.float64)
            if RULE == BLOCK:
                token_n, q_top_n = pick(token, i, n), pick(q_top, i, n)
                most_n, log_n = pick(most, i, n), pick(log, i, n)
                q_most_n, q_log_n = pick(q_most, i, n), pick(q_log, i, n)
                scale = pick(carry, i, n).to(tl.float32)
                q_cut_n, q_tie_n = pick(q_cut, i, n), pick(q_tie, i, n)
                if ADJUST == CUT:
                    p_most_n, p_log_n, p_cut_n, p_tie_n = facts_of(facts, b * P + n, n <= length)
            if ADJUST == CUT:  # a cut hides NaN and +inf
                lost |= ~(tl.abs(p_log_n) < float("inf"))
            places = chosen * SPLIT + tl.arange(0, SPLIT)
            base, weight, chance, logit = weights_of(
                p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, places, V,
                n, length, token_n, most_n, log_n, q_most_n, q_log_n, p_cut_n, p_tie_n, q_cut_n, q_tie_n,
                scale, coolness, q_coolness, q_greedy, q_top_n,
                alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
            )  # fmt: skip
            weight = tl.where(empty, chance, weight)
            drawn = drawn_at(weight, places, level)
            if GREEDY or LENGTHS:
                largest = tl.load(
                    parts + 4 * (first + t) + 3, mask=mask, other=-float("inf"), cache_modifier=".cg"
                )
                found = tl.load(heads + first + t, mask=mask, other=0.0, cache_modifier=".cg")
                if LENGTHS:  # values of a race are relative to their split's maximum
                    above = tl.where(m == -float("inf"), -float("inf"), m - tl.max(m, axis=0))
                    largest = tl.where(length == 0, largest + above, largest)
                surest = tl.min(
                    tl.where(largest == tl.max(largest, axis=0), found.to(tl.int32, bitcast=True), NONE),
                    axis=0,
                )
                drawn = tl.where(greedy | (length == 0), surest, drawn)
            tell(accepted, next_token, bad, b, lost, n, drawn)

"""The rules as fused Triton kernels: straight from 16-bit logits, two launches, no waiting host.

Every row of logits is cut into splits, whose size depends on V alone, so that a row's verdict does not
depend on its neighbours. The first launch reads the drafted positions once and leaves of each split its
maximum and its sum of exponentials. In the second, every block puts those together again (a few hundred
numbers, always in the same order), knows how far the drafts are kept, and sums the weights of its split of
the one row that the next token comes from; the last block to finish draws it. What one launch needs zeroed
the one before it zeroes, so there is no state between calls, and both can be captured in a CUDA graph.

Names: p rows are the target's, q rows the draft's; x a logit after temperature; G and S the powers of two
that hold g and the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.random import Stream

ACCEPT = tl.constexpr(int(Stream.ACCEPT) // 2)
TARGET = tl.constexpr(int(Stream.TARGET) // 2)
RULES = {"token": 0, "sigmoid": 1, "block": 2}
SIGMOID, BLOCK = tl.constexpr(RULES["sigmoid"]), tl.constexpr(RULES["block"])
NONE = tl.constexpr(2**31 - 1)  # no token
SMALL = [  # tensors whose alignment does not matter
    "lengths", "seeds", "starts", "given_up", "tokens", "draft_lse", "knobs", "q_knobs", "accepted",
    "next_token", "bad", "work",
]  # fmt: skip
# What may change from call to call without a kernel being compiled anew
SIZES = ["B", "g", "splits", "tiles", "seed", "start"]


# Pieces of kernels


@triton.jit
def uniforms(seed, position, start, stream):
    """The two float64 uniforms of a key, as in `outpace.random`."""
    c1, c2 = position.to(tl.uint32), start.to(tl.uint32)
    zero = c1 * 0
    a, b, c, d = tl.philox(seed, zero, c1, c2 + zero, zero + stream)
    first = ((a >> 6).to(tl.float64) * 67108864.0 + (b >> 6).to(tl.float64) + 0.5) * 2.220446049250313e-16
    second = ((c >> 6).to(tl.float64) * 67108864.0 + (d >> 6).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return first, second


@triton.jit
def key_of(each, one, b):
    """A row's own number, where there is one per row."""
    if each is not None:
        one = tl.load(each + b)
    return one


@triton.jit
def exponential(u):
    """-log1p(-u) of a float32. Small u, which win races, go through the series of 2 artanh(u / (2 - u)): the
    device's logarithm near 1 is too rough for them."""
    z = u / (2.0 - u)
    y = z * z
    series = 2.0 * z * (1.0 + y * (0.33333334 + y * (0.2 + y * (0.14285715 + y * 0.11111111))))
    return tl.where(u < 0.25, series, -tl.log(1.0 - u))


@triton.jit
def logits_of(row, ids, V, temperature, ADJUST: tl.constexpr):
    """Logits after temperature, float32; nothing past V."""
    x = tl.load(row + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    if ADJUST:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return x


@triton.jit
def temperature_of(knobs, b, stride, ADJUST: tl.constexpr):
    """What to divide by, and whether the row is greedy instead."""
    temperature = 1.0
    greedy = False
    if ADJUST:
        temperature = tl.load(knobs + b * stride)
        greedy = temperature == 0.0
        temperature = tl.where(greedy, 1.0, temperature)
    return temperature, greedy


@triton.jit
def exponentials(x):
    """A split's maximum, and exp(x - maximum): all 0 where nothing is possible, NaN from NaN or +inf."""
    top = tl.max(x, axis=0)
    return top, tl.exp(x - tl.where(top == -float("inf"), 0.0, top))


@triton.jit
def together(maxima, sums, row, i, splits, drafted, S: tl.constexpr):
    """Of rows `row + i`, from their splits, `[G]`: the maximum, the logsumexp relative to it (added to a
    large maximum it would lose its digits), and which have no softmax."""
    s = tl.arange(0, S)
    at = (row + i)[:, None] * splits + s[None, :]
    mask = drafted[:, None] & (s < splits)[None, :]
    m = tl.load(maxima + at, mask=mask, other=-float("inf"))
    total = tl.load(sums + at, mask=mask, other=0.0)
    most = tl.max(tl.where(total > 0, m, -float("inf")), axis=1)
    most = tl.where(most == -float("inf"), 0.0, most)
    # A split with nothing possible has sum 0; NaN stays NaN.
    mass = tl.sum(tl.where(total == 0, 0.0, total * tl.exp(m - most[:, None])), axis=1)
    return most, tl.log(mass), ~((mass > 0) & (mass < float("inf")))


@triton.jit
def argmax_of(maxima, tops, row, i, splits, drafted, S: tl.constexpr):
    """The token with the largest logit `[G]` of rows `row + i`; the first among equals."""
    s = tl.arange(0, S)
    at = (row + i)[:, None] * splits + s[None, :]
    mask = drafted[:, None] & (s < splits)[None, :]
    m = tl.load(maxima + at, mask=mask, other=-float("inf"))
    top = tl.load(tops + at, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    return tl.min(tl.where(m == tl.max(m, axis=1)[:, None], top, NONE), axis=1)


@triton.jit
def pick(vector, index, n):
    """vector[n], or 0 where there is no n."""
    return tl.sum(tl.where(index == n, vector, 0), axis=0)


@triton.jit
def squash(x, alpha, width):
    """The sigmoid that stands for a probability; NaN where there can be none."""
    return tl.where(x == float("inf"), float("nan"), tl.sigmoid((x - alpha) / width))


@triton.jit
def weights_of(
    p_row, q_row, ids, V, n, length, token, top_p, log_p, top_q, log_q,
    scale, temperature, q_temperature, q_greedy, q_top,
    alpha, width, RULE: tl.constexpr, HAS_Q: tl.constexpr, ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr,
):  # fmt: skip
    """Of one split of row n: a reference, weights of the next token relative to its exponential, and p."""
    x = logits_of(p_row, ids, V, temperature, ADJUST)
    reference = tl.full([], 0.0, tl.float32)
    if n < length:
        if RULE == SIGMOID:
            p = squash(x, alpha, width)
        else:
            p = tl.exp((x - top_p) - log_p)
        if HAS_Q:
            y = logits_of(q_row, ids, V, q_temperature, ADJUST_Q)
            if RULE == SIGMOID:
                q = squash(y, alpha, width)
            else:
                q = tl.exp((y - top_q) - log_q)
                q = tl.where(y == float("inf"), float("nan"), q)  # beside a stored logsumexp it would pass
                q = tl.where(q_greedy, (ids == q_top).to(tl.float32), q)
            w = scale * p - q
            w = tl.where(w < 0, 0.0, w)  # NaN stays
        else:
            w = tl.where(ids == token, 0.0, scale * p)
    else:
        reference, p = exponentials(x)
        if RULE == SIGMOID:
            if length > 0:
                reference = tl.full([], 0.0, tl.float32)
                p = squash(x, alpha, width)
        w = p
    return reference, w, p, x


@triton.jit
def raced(x, s, seed, position, greedy, SPLIT: tl.constexpr):
    """A split's maximum, and its logits plus the target stream's Gumbel noise, relative to that maximum so
    that large logits do not swallow the noise's digits."""
    # Four tokens share a block of noise: each key is computed once and its words dealt out.
    c0 = (s * (SPLIT // 4) + tl.arange(0, SPLIT // 4)).to(tl.uint32)
    zero = c0 * 0
    a, b, c, d = tl.philox(seed, c0, zero + position.to(tl.uint32), zero, zero + TARGET)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    top = tl.max(x, axis=0)
    noise = tl.where(greedy, 0.0, -tl.log(exponential(u)))
    return top, x - tl.where(top == -float("inf"), 0.0, top) + noise


@triton.jit
def first_max(x, ids):
    return tl.min(tl.where(x == tl.max(x, axis=0), ids, NONE), axis=0)


@triton.jit
def rooms(work, B, g, splits):
    """Where in the workspace the kernels leave what: `room` says how much there is."""
    cells = (2 * B * g * splits).to(tl.int64)
    rows = ((g + 1) * B * splits).to(tl.int64)
    parts = work + 3 * cells
    return work, work + cells, work + 2 * cells, parts, parts + 4 * rows, parts + 5 * rows


def room(B: int, g: int, splits: int) -> int:
    """Floats that the kernels need beside their inputs."""
    return 6 * B * g * splits + 5 * (g + 1) * B * splits + B


# Kernels


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def scan(
    target, draft, lengths, knobs, q_knobs, work, B, g, V, splits,
    p_row, p_position, q_row, q_position, knob, q_knob,
    SPLIT: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exponentials and argmax of every split of the drafted positions, p rows then q rows."""
    maxima, sums, tops, parts, heads, counter = rooms(work, B, g, splits)
    pid = tl.program_id(0)
    s = pid % splits
    row = pid // splits
    q_side = row // (B * g)
    b = (row % (B * g) // g).to(tl.int64)
    i = row % g
    if pid < B:
        tl.store(counter + pid, 0.0)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    if i < length:
        ids = s * SPLIT + tl.arange(0, SPLIT)
        if q_side == 0:
            temperature, greedy = temperature_of(knobs, b, knob, ADJUST)
            x = logits_of(target + b * p_row + i.to(tl.int64) * p_position, ids, V, temperature, ADJUST)
        else:
            temperature, greedy = temperature_of(q_knobs, b, q_knob, ADJUST_Q)
            x = logits_of(draft + b * q_row + i.to(tl.int64) * q_position, ids, V, temperature, ADJUST_Q)
        top, e = exponentials(x)
        at = row.to(tl.int64) * splits + s
        tl.store(maxima + at, top)
        tl.store(sums + at, tl.sum(e, axis=0))
        if ADJUST or ADJUST_Q:
            tl.store(tops + at, first_max(x, ids).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def finish(
    target, draft, tokens, lengths, draft_lse, seeds, starts, given_up, knobs, q_knobs, work,
    accepted, next_token, bad, seed: tl.int64, start: tl.int64, B, g, V, splits,
    p_row, p_position, q_row, q_position, knob, q_knob, lenience, alpha, width, tiles,
    SPLIT: tl.constexpr, G: tl.constexpr, S: tl.constexpr, RULE: tl.constexpr, HAS_Q: tl.constexpr,
    HAS_LSE: tl.constexpr, LENGTHS: tl.constexpr, GIVEN_UP: tl.constexpr, ADJUST: tl.constexpr,
    ADJUST_Q: tl.constexpr, LENIENT: tl.constexpr,
):  # fmt: skip
    """How many drafts stay, and the token after them.

    One block per split of the row that the next token comes from; under rule block, of every row, since its
    cut depends on what each of them leaves over.
    """
    maxima, sums, tops, parts, heads, counter = rooms(work, B, g, splits)
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
    temperature, greedy = temperature_of(knobs, b, knob, ADJUST)
    q_temperature, q_greedy = temperature_of(q_knobs, b, q_knob, ADJUST_Q)
    p_rows, q_rows = target + b * p_row, draft + b * q_row

    # What the drafts are worth
    i = tl.arange(0, G)
    drafted = i < length
    token = tl.load(tokens + b * g + i, mask=drafted, other=0)
    outside = drafted & ((token < 0) | (token >= V))
    token = tl.where(outside, 0, token)
    r, u = uniforms(seed, start + i, start, ACCEPT)
    x = logits_of(p_rows + i.to(tl.int64) * p_position, token, tl.where(drafted, V, 0), temperature, ADJUST)
    qx = tl.full([G], 1.0, tl.float32)
    q_most = tl.zeros([G], tl.float32)
    q_log = tl.zeros([G], tl.float32)
    q_top = tl.full([G], 0, tl.int32)
    unusable = outside
    if RULE == SIGMOID:
        most = tl.zeros([G], tl.float32)
        log = tl.zeros([G], tl.float32)
        px = squash(x, alpha, width)
        unusable |= px != px
    else:
        most, log, no_p = together(maxima, sums, b * g, i, splits, drafted, S)
        px = tl.exp((x - most) - log)
        unusable |= no_p
        if ADJUST:
            top = argmax_of(maxima, tops, b * g, i, splits, drafted, S)
            sure = (token == top).to(tl.float32)
            if LENIENT:
                sure = (x >= most + tl.log(lenience)).to(tl.float32)
            px = tl.where(greedy, sure, px)
    if HAS_Q:
        y = logits_of(
            q_rows + i.to(tl.int64) * q_position, token, tl.where(drafted, V, 0), q_temperature, ADJUST_Q
        )
        if RULE == SIGMOID:
            qx = squash(y, alpha, width)
            unusable |= qx != qx
        else:
            if HAS_LSE:
                q_most = tl.load(draft_lse + b * g + i, mask=drafted, other=0.0)
                no_q = ~(tl.abs(q_most) < float("inf")) | ~(y < float("inf"))
            else:
                q_most, q_log, no_q = together(maxima, sums, (B + b) * g, i, splits, drafted, S)
            if ADJUST:
                no_q &= greedy == 0  # a greedy row does not depend on q
            unusable |= no_q
            qx = tl.exp((y - q_most) - q_log)
            if ADJUST_Q:
                q_top = argmax_of(maxima, tops, (B + b) * g, i, splits, drafted, S)
                qx = tl.where(q_greedy, (token == q_top).to(tl.float32), qx)
    if ADJUST:
        qx = tl.where(greedy, 0.0, qx)  # a greedy row keeps the sure token whatever q was
    unusable &= drafted
    px64, qx64 = px.to(tl.float64), qx.to(tl.float64)

    carry = tl.full([G], 1.0, tl.float64)  # rule block: with what probability the first i drafts may stay
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

    # These splits of the row after n drafts
    token_n, q_top_n = pick(token, i, n), pick(q_top, i, n)
    most_n, log_n = pick(most, i, n), pick(log, i, n)
    q_most_n, q_log_n = pick(q_most, i, n), pick(q_log, i, n)
    if n <= length:
        for tile in range(tiles):
            s = pid % blocks * tiles + tile
            ids = s * SPLIT + tl.arange(0, SPLIT)
            reference, w, p, z = weights_of(
                p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, ids, V, n, length,
                token_n, most_n, log_n, q_most_n, q_log_n,
                scale, temperature, q_temperature, q_greedy, q_top_n,
                alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
            )  # fmt: skip
            at = row.to(tl.int64) * splits + s
            inside = s < splits
            tl.store(parts + 4 * at, reference, mask=inside)
            tl.store(parts + 4 * at + 1, tl.sum(w, axis=0), mask=inside)
            tl.store(parts + 4 * at + 2, tl.sum(p, axis=0), mask=inside)
            if ADJUST or LENGTHS:
                height = tl.max(z, axis=0)
                head = first_max(z, ids)
                if LENGTHS:
                    if length == 0:  # plain decoding, whatever the rule
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
            # What each prefix leaves over, and so whether it passes
            where = first + i[:, None] * splits + t[None, :]
            there = drafted[:, None] & (t < splits)[None, :]
            left = tl.sum(
                tl.load(parts + 4 * where + 1, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64),
                axis=1,
            )
            h = tl.where((left == 0) & (carry == 1), 1.0, left / (left + (1 - carry)))
            # Prefix j is row j, tested with the uniform of its last draft
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
        # p and q equal up to rounding leave nothing over; then p is as good
        mass = tl.where(empty, p_sums, w_sums * factor).to(tl.float64)
        cdf = tl.cumsum(mass, axis=0)
        total = tl.sum(mass, axis=0)
        # Rule block's cut depends on every drafted position, the others' on those up to it
        lost = tl.sum((unusable & ((i <= n) | (RULE == BLOCK))).to(tl.int32), axis=0) > 0
        lost |= (tl.sum(outside.to(tl.int32), axis=0) > 0) | strange
        sound = total
        if ADJUST:
            sound = tl.where(greedy, tl.sum(p_sums, axis=0).to(tl.float64), total)
        lost |= ~((sound > 0) & (sound < float("inf")))
        if GIVEN_UP:
            lost |= tl.load(given_up + b) != 0
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
        places = chosen * SPLIT + tl.arange(0, SPLIT)
        base, weight, chance, logit = weights_of(
            p_rows + n.to(tl.int64) * p_position, q_rows + n.to(tl.int64) * q_position, places, V, n, length,
            token_n, most_n, log_n, q_most_n, q_log_n,
            scale, temperature, q_temperature, q_greedy, q_top_n,
            alpha, width, RULE, HAS_Q, ADJUST, ADJUST_Q,
        )  # fmt: skip
        weight = tl.where(empty, chance, weight)
        reached = (tl.cumsum(weight, axis=0).to(tl.float64) > level) & (weight > 0)
        drawn = tl.min(tl.where(reached, places, NONE), axis=0)
        drawn = tl.where(drawn == NONE, tl.max(tl.where(weight > 0, places, 0), axis=0), drawn)
        if ADJUST or LENGTHS:
            largest = tl.load(
                parts + 4 * (first + t) + 3, mask=mask, other=-float("inf"), cache_modifier=".cg"
            )
            found = tl.load(heads + first + t, mask=mask, other=0.0, cache_modifier=".cg")
            if LENGTHS:  # values of a race are relative to their split's maximum
                above = tl.where(m == -float("inf"), -float("inf"), m - tl.max(m, axis=0))
                largest = tl.where(length == 0, largest + above, largest)
            surest = tl.min(
                tl.where(largest == tl.max(largest, axis=0), found.to(tl.int32, bitcast=True), NONE), axis=0
            )
            drawn = tl.where(greedy | (length == 0), surest, drawn)
        tl.store(accepted + b, tl.where(lost, 0, n))
        tl.store(next_token + b, tl.where(lost, 0, drawn))
        tl.store(bad + b, lost)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def race(
    target, lengths, seeds, starts, knobs, work, seed: tl.int64, start: tl.int64, B, g, V, splits, p_row,
    p_position, knob,
    SPLIT: tl.constexpr, LENGTHS: tl.constexpr, ADJUST: tl.constexpr,
):  # fmt: skip
    """The target's own draw in every split of every position: the largest logit plus Gumbel noise."""
    cells = ((g + 1) * B * splits).to(tl.int64)
    maxima, values, tops = work, work + cells, work + 2 * cells
    pid = tl.program_id(0)
    s = pid % splits
    row = pid // splits
    b, i = (row // (g + 1)).to(tl.int64), row % (g + 1)
    length = g
    if LENGTHS:
        length = tl.load(lengths + b).to(tl.int32)
    if i <= length:
        temperature, greedy = temperature_of(knobs, b, knob, ADJUST)
        ids = s * SPLIT + tl.arange(0, SPLIT)
        x = logits_of(target + b * p_row + i.to(tl.int64) * p_position, ids, V, temperature, ADJUST)
        top, value = raced(x, s, key_of(seeds, seed, b), key_of(starts, start, b) + i, greedy, SPLIT)
        at = row.to(tl.int64) * splits + s
        best = tl.max(value, axis=0)
        broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
        tl.store(maxima + at, tl.where(broken, float("nan"), top))
        tl.store(values + at, best)
        tl.store(tops + at, tl.min(tl.where(value == best, ids, NONE), axis=0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL)
def compare(
    tokens, lengths, given_up, work, accepted, next_token, bad, B, g, V, splits,
    G: tl.constexpr, S: tl.constexpr, LENGTHS: tl.constexpr, GIVEN_UP: tl.constexpr,
):  # fmt: skip
    """Keep drafts while they are the target's own draws. G holds g + 1 positions here."""
    cells = ((g + 1) * B * splits).to(tl.int64)
    maxima, values, tops = work, work + cells, work + 2 * cells
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

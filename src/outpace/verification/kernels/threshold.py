"""Top-k, top-p and min-p without sorting: the smallest logit that survives in each row, its cut.

A pass over the row stores the maximum of every chunk of a few tokens. The k largest maxima are k tokens, so
no token below the k-th of them is among the k likeliest. For top-p alone, as many of the likeliest tokens as
can be listed are tried. So only a few chunks are read again, and only a few of their tokens are listed. Each
listed token is compared with every other, as integers that compare as the logits do. That gives the number of
tokens at least as likely, and their total weight. If too many tokens may survive for that, passes over the
whole row find the cut.

Two numbers describe the survivors: logits above ``cut``, and those equal to it from the id ``tie`` on, by the
tie rule of ``outpace.sampling``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import KNOBS, coolness_of, raw, tempered

FACTS = tl.constexpr(5)  # of a row: maximum, logsumexp of the survivors relative to it, cut, tie, listed
TILE = tl.constexpr(16)  # listed tokens that all others are compared with at once


@triton.jit
def order_of(z, SHIFT: tl.constexpr):
    """Return integers, called orders, that compare as the numbers do.

    They leave out the bits that the logits' dtype does not have.
    """
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)  # -0 equals 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def number_of(order, SHIFT: tl.constexpr):
    """Return the number of an order: the inverse of ``order_of``."""
    bits = (order << SHIFT) | tl.where(order < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(z, most, coolness):
    """Return a logit's exponential, relative to the row's maximum."""
    return tl.exp(tempered(z, coolness, 1) - most)


@triton.jit
def from_chunks(row, chunks, CHUNK: tl.constexpr, first, count, V, N: tl.constexpr):
    """Return logits and ids of N of the tokens in a list of chunks."""
    place = first + tl.arange(0, N)
    there = place < count
    chunk = tl.load(chunks + place // CHUNK, mask=there, other=0.0).to(tl.int32, bitcast=True)
    ids = tl.where(there, chunk * CHUNK + place % CHUNK, V)
    return raw(row, ids, V), ids


@triton.jit
def from_list(few, place, listed, V, FEW: tl.constexpr):
    """Return logits and ids of listed tokens, at indices of any shape."""
    there = place < listed
    ids = tl.load(few + place, mask=there, other=0.0).to(tl.int32, bitcast=True)
    z = tl.load(few + FEW + place, mask=there, other=-float("inf"))
    return z, tl.where(there, ids, V)


@triton.jit
def bars_of(lower, upper):
    """Return four orders that divide an interval into five parts.

    They lie past ``upper`` where there are fewer parts.
    """
    step = (upper - lower + 5) // 5
    over = upper + 1
    return (
        tl.minimum(lower + step, over).to(tl.int32),
        tl.minimum(lower + 2 * step, over).to(tl.int32),
        tl.minimum(lower + 3 * step, over).to(tl.int32),
        tl.minimum(lower + 4 * step, over).to(tl.int32),
    )


@triton.jit
def between(lower, upper, reached):
    """Return the part of an interval that is left if ``reached`` of its four bars are reached."""
    step = (upper - lower + 5) // 5
    return lower + step * reached, tl.minimum(upper, lower + step * (reached + 1) - 1)


@triton.jit
def crowded(orders, k, enough, low, high):
    """Return an order between low and high that at least k of the orders reach.

    No more than ``enough`` of them reach it, if there is such an order. It is low if there is none with k.
    There must be fewer than 65536 orders.
    """
    lower, upper = low.to(tl.int64), high.to(tl.int64)
    there = enough + 1
    while (lower < upper) & (there > enough):
        a, b, c, d = bars_of(lower, upper)
        # Four counts in one sum
        packed = (orders >= a).to(tl.int64) + ((orders >= b).to(tl.int64) << 16)
        packed += ((orders >= c).to(tl.int64) << 32) + ((orders >= d).to(tl.int64) << 48)
        found = tl.sum(packed, axis=0)
        reached = 0
        for bar in tl.static_range(4):
            count = ((found >> (16 * bar)) & 0xFFFF).to(tl.float32)
            if count >= k:
                reached = bar + 1
                there = count
        lower, upper = between(lower, upper, reached)
    return lower.to(tl.int32)


@triton.jit
def likeliest(most, coolness, min_p, low, high, SHIFT: tl.constexpr):
    """Return the lowest order between low and high that is min_p times as likely as the likeliest."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if weight_of(number_of(middle.to(tl.int32), SHIFT), most, coolness) >= min_p:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def least_that_may_stay(tops, weights, limit, most, coolness, low, high, SHIFT: tl.constexpr):
    """Return the highest order below which all tokens may be dropped.

    A dropped token weighs no more than the maximum of its chunk, nor than the order. The sum of these bounds,
    times the size of a chunk, is within the limit.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        place = middle.to(tl.int32)
        each = weight_of(number_of(place, SHIFT), most, coolness)
        if tl.sum(tl.where(tops < place, weights, tl.minimum(weights, each)), axis=0) <= limit:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def listing(
    row, chunks, count, few, V, low,
    CHUNK: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """List the tokens of the listed chunks from order ``low`` on, sorted by id.

    It returns their number, or more than FEW if there are too many.
    """
    filled, first = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while (first < count) & (filled <= FEW):
        z, ids = from_chunks(row, chunks, CHUNK, first, count, V, WIDE)
        fits = order_of(z, SHIFT) >= low
        slot = tl.cumsum(fits.to(tl.int32), axis=0) - 1 + filled
        fits_in = fits & (slot < FEW)
        tl.store(few + slot, ids.to(tl.float32, bitcast=True), mask=fits_in)
        tl.store(few + FEW + slot, z, mask=fits_in)
        filled += tl.sum(fits.to(tl.int32), axis=0)
        first += WIDE
    tl.debug_barrier()
    return filled


@triton.jit
def cut_of_few(
    few, listed, V, most, mass, coolness, k, limit, low, likely,
    FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return cut, tie and weight of the survivors of a short list.

    Each token of the list is compared with each.
    """
    z, ids = from_list(few, tl.arange(0, FEW)[:, None], listed, V, FEW)
    order, weight = order_of(z, SHIFT), weight_of(z, most, coolness)
    number = tl.zeros([FEW, TILE], tl.float32)  # number of tokens at least as likely
    weighs = tl.zeros([FEW, TILE], tl.float32)
    for first in range(0, listed, TILE):
        other, unused = from_list(few, first + tl.arange(0, TILE)[None, :], listed, V, FEW)
        likelier = order_of(other, SHIFT) >= order
        number += likelier.to(tl.float32)
        weighs += tl.where(likelier, weight_of(other, most, coolness), 0.0)
    number = tl.sum(number, axis=1, keep_dims=True)
    weighs = tl.sum(weighs, axis=1, keep_dims=True)
    cut, tie = low, tl.full([], 0, tl.int32)
    if k > 0:
        cut = all_max(tl.where(number >= k, tl.maximum(order, low), low))
        mass = all_sum(tl.where(order >= cut, weight, 0.0))
    kept = mass
    if limit >= 0:
        # A value is dropped if it and all below it weigh no more than the limit.
        cut = all_max(tl.where(weighs >= mass - limit * mass, tl.maximum(order, cut), cut))
        kept = all_sum(tl.where(order >= cut, weight, 0.0))
        equal = order == cut
        gone, each = goners(cut, all_sum(equal.to(tl.float32)), kept, mass, limit, most, coolness, SHIFT)
        if gone > 0:
            kept -= gone * each
            rank = tl.cumsum(equal.to(tl.int32), axis=0)
            tie = all_max(tl.where(equal & (rank == gone.to(tl.int32) + 1), ids, 0))
    if (likely > cut) | ((k <= 0) & (limit < 0)):
        cut, tie = likely, tie * 0
        kept = all_sum(tl.where(order >= cut, weight, 0.0))
    return cut, tie, kept


@triton.jit
def goners(cut, equals, kept, mass, limit, most, coolness, SHIFT: tl.constexpr):
    """Return the number of tokens equal to the cut that are dropped, and the weight of each.

    Smaller ids are dropped first. One token survives.
    """
    each = weight_of(number_of(cut, SHIFT), most, coolness)
    return tl.minimum(tl.floor((limit * mass - (mass - kept)) / each), equals - 1), each


@triton.jit
def all_max(x):
    """Return the maximum of a matrix."""
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def all_sum(x):
    """Return the sum of a matrix."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def tally(row, V, a, b, c, d, weigh, most, coolness, MANY: tl.constexpr, SHIFT: tl.constexpr):
    """Return the number of a row's tokens that reach each of four orders, or their weight."""
    from_a, from_b = tl.zeros([MANY], tl.float32), tl.zeros([MANY], tl.float32)
    from_c, from_d = tl.zeros([MANY], tl.float32), tl.zeros([MANY], tl.float32)
    for first in tl.range(0, V, MANY, num_stages=3):
        z = raw(row, first + tl.arange(0, MANY), V)
        order = order_of(z, SHIFT)
        each = tl.where(weigh, weight_of(z, most, coolness), 1.0)
        from_a += tl.where(order >= a, each, 0.0)
        from_b += tl.where(order >= b, each, 0.0)
        from_c += tl.where(order >= c, each, 0.0)
        from_d += tl.where(order >= d, each, 0.0)
    return tl.sum(from_a, axis=0), tl.sum(from_b, axis=0), tl.sum(from_c, axis=0), tl.sum(from_d, axis=0)


@triton.jit
def weight_from(row, V, cut, most, coolness, MANY: tl.constexpr, SHIFT: tl.constexpr):
    """Return the weight of a row's tokens above the cut, and the number of those equal to it."""
    weight, equals = tl.zeros([MANY], tl.float32), tl.zeros([MANY], tl.float32)
    for first in tl.range(0, V, MANY, num_stages=3):
        z = raw(row, first + tl.arange(0, MANY), V)
        order = order_of(z, SHIFT)
        weight += tl.where(order > cut, weight_of(z, most, coolness), 0.0)
        equals += (order == cut).to(tl.float32)
    return tl.sum(weight, axis=0), tl.sum(equals, axis=0)


@triton.jit
def cut_of_many(
    row, V, most, mass, coolness, k, limit, min_p, bound, highest, MANY: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Return cut, tie and weight of the survivors, by passes over the whole row.

    The passes are for top-k, then top-p, then min-p. ``bound`` and ``highest`` are what ``threshold`` returns
    where it listed nothing.
    """
    low = order_of(bound, SHIFT)
    likely = low
    if min_p > 0:
        likely = likeliest(most, coolness, min_p, low, highest, SHIFT)
    kept = mass
    cut, tie = low, tl.full([], 0, tl.int32)
    for phase in range(3):
        lower, upper, asked = cut.to(tl.int64), highest.to(tl.int64), k
        wanted = k > 0
        if phase == 1:
            wanted, asked = limit >= 0, mass - limit * mass
        if phase == 2:
            wanted = (min_p > 0) & ((likely > cut) | ((k <= 0) & (limit < 0)))
            lower, upper = likely.to(tl.int64), likely.to(tl.int64)
        if wanted:
            while lower < upper:
                a, b, c, d = bars_of(lower, upper)
                from_a, from_b, from_c, from_d = tally(
                    row, V, a, b, c, d, phase == 1, most, coolness, MANY, SHIFT
                )
                reached = ((from_a >= asked) & (a <= upper)).to(tl.int64)
                reached += ((from_b >= asked) & (b <= upper)).to(tl.int64)
                reached += ((from_c >= asked) & (c <= upper)).to(tl.int64)
                reached += ((from_d >= asked) & (d <= upper)).to(tl.int64)
                lower, upper = between(lower, upper, reached)
            cut, tie = lower.to(tl.int32), tie * 0
            above, equals = weight_from(row, V, cut, most, coolness, MANY, SHIFT)
            kept = above + equals * weight_of(number_of(cut, SHIFT), most, coolness)
            if phase == 0:
                mass = kept
            if phase == 1:
                gone, each = goners(cut, equals, kept, mass, limit, most, coolness, SHIFT)
                if gone > 0:
                    kept = above + (equals - gone) * each
                    tie = tie_of(row, V, cut, gone.to(tl.int32), MANY, SHIFT)
    return number_of(cut, SHIFT), tie, kept


@triton.jit
def tie_of(row, V, cut, gone, MANY: tl.constexpr, SHIFT: tl.constexpr):
    """Return the first id that survives among those equal to the cut, of which ``gone`` are dropped."""
    tie, seen = tl.full([], 0, tl.int32), 0
    for first in range(0, V, MANY):
        ids = first + tl.arange(0, MANY)
        tied = (order_of(raw(row, ids, V), SHIFT) == cut).to(tl.int32)
        stays = (tl.cumsum(tied, axis=0) + seen == gone + 1) & (tied == 1)
        tie = tl.maximum(tie, tl.max(tl.where(stays, ids, 0), axis=0))
        seen += tl.sum(tied, axis=0)
    return tie


@triton.jit
def threshold(
    row, chunks, few, V, most, mass, coolness, k, limit, min_p,
    C: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return cut, tie, sum of exponentials of the survivors, and the number of tokens listed in few.

    The list holds all survivors. If there are too many to list, the number is -1, and ``cut_of_many`` has to
    find the cut. It lies between the number and the order that are returned in place of cut and tie.

    chunks holds the maximum of each of the row's chunks, up to C of them. The indices of those that matter
    replace them. few has space for FEW tokens and their logits. most is the row's maximum after temperature.
    mass is its sum of exponentials relative to that.
    """
    there = tl.arange(0, C)
    real = there < tl.cdiv(V, CHUNK)
    maxima = tl.load(chunks + there, mask=real, other=-float("inf"))
    tops = order_of(maxima, SHIFT)
    lowest = order_of(tl.full([], -float("inf"), tl.float32), SHIFT) + 1  # -inf lies below
    highest = tl.max(tops, axis=0)

    likely = lowest
    if min_p > 0:
        likely = likeliest(most, coolness, min_p, lowest, highest, SHIFT)

    # With top-k or min-p alone, no token below this order can survive; with top-p it is a first try.
    least = tl.maximum(tl.min(tl.where(real, tops, highest), axis=0), lowest)
    bound = likely
    if k > 0:
        enough = tl.maximum(k, tl.minimum(2 * k, 0.7 * FEW))
        bound = crowded(tops, k, enough, tl.where(k <= tl.cdiv(V, CHUNK), least, lowest), highest)
    elif limit >= 0:
        few_of = tl.full([], FEW // 4, tl.float32)
        bound = tl.maximum(likely, crowded(tops, few_of, 2 * few_of, least, highest))

    # List the chunks that reach it, in order, and then their tokens that do.
    reach = (tops >= bound) & real
    rank = tl.cumsum(reach.to(tl.int32), axis=0) - 1
    count = (tl.max(rank, axis=0) + 1) * CHUNK
    tl.debug_barrier()  # all threads have read
    tl.store(chunks + rank, there.to(tl.float32, bitcast=True), mask=reach)
    tl.debug_barrier()
    listed = listing(row, chunks, count, few, V, bound, CHUNK, WIDE, FEW, SHIFT)
    if (k <= 0) & (limit >= 0) & (listed <= FEW) & (bound > likely):
        z, ids = from_list(few, tl.arange(0, FEW), listed, V, FEW)
        if tl.sum(weight_of(z, most, coolness), axis=0) < mass - limit * mass:  # others survive, too
            listed = listed * 0 + FEW + 1
    cut, tie = bound, highest
    if listed <= FEW:
        cut, tie, mass = cut_of_few(few, listed, V, most, mass, coolness, k, limit, bound, likely, FEW, SHIFT)
    else:
        listed = tl.full([], -1, tl.int32)
        if (k <= 0) & (limit >= 0):
            weights = tl.where(real, weight_of(maxima, most, coolness), 0.0)
            cut = least_that_may_stay(
                tops, weights, limit * mass / CHUNK, most, coolness, lowest, highest, SHIFT
            )
            cut = tl.maximum(cut, likely)
    return number_of(cut, SHIFT), tie, mass, listed


@triton.jit
def whole_row(maxima, sums, splits, S: tl.constexpr):
    """Return the maximum of one row, and the sum of exponentials relative to it, from its splits."""
    s = tl.arange(0, S)
    m = tl.load(maxima + s, mask=s < splits, other=-float("inf"))
    total = tl.load(sums + s, mask=s < splits, other=0.0)
    most = tl.max(tl.where(total > 0, m, -float("inf")), axis=0)
    most = tl.where(most == -float("inf"), 0.0, most)
    return most, tl.sum(tl.where(total == 0, 0.0, total * tl.exp(m - most)), axis=0)


@triton.jit
def knobs_of(knobs, heat, k, limit, min_p, b):
    """Return a row's own sampling parameters, or those of all rows."""
    coolness, greedy = coolness_of(knobs, heat, b, 1)
    if knobs is not None:
        k = tl.load(knobs + KNOBS * b + 1)
        limit = tl.load(knobs + KNOBS * b + 2)
        min_p = tl.load(knobs + KNOBS * b + 3)
    return coolness, greedy, k, limit, min_p


@triton.jit
def facts(
    row, chunks, few, maxima, sums, knobs, heat, k, limit, min_p, b, V, splits,
    S: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the maximum of one row, and the results of ``threshold`` for it.

    They are the sum of exponentials of the survivors relative to the maximum, cut, tie, and the number of
    listed tokens. That number is 0 where all tokens survive.
    """
    coolness, greedy, k, limit, min_p = knobs_of(knobs, heat, k, limit, min_p, b)
    most, mass = whole_row(maxima, sums, splits, S)
    cut, tie = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32)
    listed = tl.full([], 0, tl.int32)
    sound = (mass > 0) & (mass < float("inf"))
    wanted = (k > 0) | (limit >= 0) | (min_p > 0)
    if sound & wanted & (greedy == 0):
        cut, tie, mass, listed = threshold(
            row, chunks, few, V, most, mass, coolness, k, limit, min_p, C, CHUNK, WIDE, FEW, SHIFT
        )
    return most, mass, cut, tie, listed

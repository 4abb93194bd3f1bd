"""Top-k, top-p and min-p without sorting: of each row, the least logit that stays.

A pass over the row leaves the maximum of every chunk of a few tokens. The k largest of those are k tokens, so
no token below the k-th of them is among the k likeliest; likewise, they say how much all tokens below a place
can weigh at most, and where that is within what top-p drops, all of them go. So only a few chunks are looked
at again, as integers that compare as the logits do, and a search finds the cut among them. What is left is
described by two numbers: logits above `cut` stay, and those just on it from the id `tie` on, by the tie rule
of `outpace.sampling`. A k above the number of chunks has no bound, and its search goes over the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verify.kernels.pieces import KNOBS, coolness_of, raw, tempered

FACTS = tl.constexpr(4)  # of a row: its maximum, the logsumexp of what stays relative to it, cut, tie
PIVOTS = tl.constexpr(4)  # places tried at once in a search


@triton.jit
def order_of(z, SHIFT: tl.constexpr):
    """Integers that compare as the numbers do, without the bits that the logits' type does not have."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)  # -0 equals 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def number_of(order, SHIFT: tl.constexpr):
    bits = (order << SHIFT) | tl.where(order < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def candidates(row, listed, CHUNK_OR_1, first, count, V, N: tl.constexpr):
    """Logits and ids of up to N of the tokens that matter, from a list of them or of their chunks."""
    place = first + tl.arange(0, N)
    there = place < count
    ids = tl.load(listed + place // CHUNK_OR_1, mask=there, other=0.0).to(tl.int32, bitcast=True)
    ids = ids * CHUNK_OR_1 + place % CHUNK_OR_1
    return raw(row, tl.where(there, ids, V), V), ids


@triton.jit
def weighed(z, most, coolness, WEIGH: tl.constexpr):
    """What each logit counts for: its exponential, or one."""
    if WEIGH:
        return tl.exp(tempered(z, coolness, 1) - most)
    return tl.where(z == -float("inf"), 0.0, 1.0)


@triton.jit
def tally(
    orders, weights, places, row, listed, chunk, count, V, most, coolness,
    N: tl.constexpr, SHIFT: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """How much lies at or above each of the places. The first N candidates are at hand; others are read."""
    total = tl.sum(tl.where(orders[None, :] >= places[:, None], weights[None, :], 0.0), axis=1)
    for first in range(N, count, N):
        z, ids = candidates(row, listed, chunk, first, count, V, N)
        theirs, weigh = order_of(z, SHIFT), weighed(z, most, coolness, WEIGH)
        total += tl.sum(tl.where(theirs[None, :] >= places[:, None], weigh[None, :], 0.0), axis=1)
    return total


@triton.jit
def search(
    orders, weights, asked, enough, low, high, row, listed, chunk, count, V, most, coolness,
    N: tl.constexpr, SHIFT: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """The highest place between low and high at or above which lies as much as asked, or a lower one with no
    more than enough; low if there is none."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    pivot = tl.arange(0, PIVOTS) + 1
    there = tl.full([], float("inf"), tl.float32)
    while (low < high) & (there > enough):
        step = (high - low + PIVOTS + 1) // (PIVOTS + 1)
        places = tl.minimum(low + step * pivot, high + 1).to(tl.int32)
        found = tally(orders, weights, places, row, listed, chunk, count, V, most, coolness, N, SHIFT, WEIGH)
        fits = (found >= asked) & (places <= high)
        there = tl.minimum(there, tl.min(tl.where(fits, found, float("inf")), axis=0))
        reached = tl.sum(fits.to(tl.int64), axis=0)
        high = tl.minimum(high, low + step * (reached + 1) - 1)
        low = low + step * reached
    return low.to(tl.int32)


@triton.jit
def likeliest(most, coolness, min_p, low, high, SHIFT: tl.constexpr):
    """The lowest place between low and high whose number is min_p times as likely as the likeliest."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if tl.exp(tempered(number_of(middle.to(tl.int32), SHIFT), coolness, 1) - most) >= min_p:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def least_that_may_stay(
    tops, weights, limit, most, coolness, low, high, SHIFT: tl.constexpr
):  # fmt: skip
    """The highest place below which all may go: no token of a chunk weighs more than its maximum does, nor
    than the place; so much for each, times the chunk's size, is within the limit."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        place = middle.to(tl.int32)
        each = tl.exp(tempered(number_of(place, SHIFT), coolness, 1) - most)
        if tl.sum(tl.where(tops < place, weights, tl.minimum(weights, each)), axis=0) <= limit:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def threshold(
    row, chunks, few, V, most, mass, coolness, k, limit, min_p,
    C: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, FEW: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Cut, tie and the sum of exponentials of what stays; then a list of the tokens that may, or of their
    chunks: where it is, how many tokens an entry stands for, and how many there are of those.

    chunks holds the maximum of each of the row's chunks, up to C of them; in their place come the numbers of
    those that matter. few has room for FEW tokens. most is the row's maximum after coolness, mass its sum
    of exponentials relative to that.
    """
    there = tl.arange(0, C)
    real = there < tl.cdiv(V, CHUNK)
    maxima = tl.load(chunks + there, mask=real, other=-float("inf"))
    tops = order_of(maxima, SHIFT)
    lowest = order_of(tl.full([], -float("inf"), tl.float32), SHIFT)
    highest = tl.max(tops, axis=0)

    likely = lowest
    if min_p > 0:
        likely = likeliest(most, coolness, min_p, lowest, highest, SHIFT)

    # A bound: nothing below it can stay
    bound = lowest
    if k > 0:
        least = tl.where(k <= tl.cdiv(V, CHUNK), tl.min(tl.where(real, tops, highest), axis=0), lowest)
        votes = tl.where(maxima == -float("inf"), 0.0, 1.0)
        bound = search(
            tops, votes, k, 2 * k, least, highest, row, chunks, 1, 0, V, most, coolness, C, SHIFT, False
        )
    else:
        if limit >= 0:
            weights = tl.where(real, tl.exp(tempered(maxima, coolness, 1) - most), 0.0)
            bound = least_that_may_stay(
                tops, weights, limit * mass / CHUNK, most, coolness, lowest, highest, SHIFT
            )
        bound = tl.maximum(bound, likely)

    # The chunks that reach it, in order
    reach = (tops >= bound) & real
    rank = tl.cumsum(reach.to(tl.int32), axis=0) - 1
    count = (tl.max(rank, axis=0) + 1) * CHUNK
    tl.debug_barrier()  # all have read
    tl.store(chunks + rank, there.to(tl.float32, bitcast=True), mask=reach)
    tl.debug_barrier()

    # And of those the tokens that do, if they are few
    filled = 0
    for first in range(0, count, WIDE):
        z, ids = candidates(row, chunks, CHUNK, first, count, V, WIDE)
        reach_it = (order_of(z, SHIFT) >= bound) & (z > -float("inf"))
        slot = tl.cumsum(reach_it.to(tl.int32), axis=0) - 1 + filled
        tl.store(few + slot, ids.to(tl.float32, bitcast=True), mask=reach_it & (slot < FEW))
        filled += tl.sum(reach_it.to(tl.int32), axis=0)
    tl.debug_barrier()
    listed, chunk = chunks, CHUNK
    if filled <= FEW:
        listed, chunk, count = few, 1, filled
    z, ids = candidates(row, listed, chunk, 0, count, V, N)
    orders, weights = order_of(z, SHIFT), weighed(z, most, coolness, True)
    ones = weighed(z, most, coolness, False)

    cut = bound
    if k > 0:
        cut = search(
            orders, ones, k, 0.0, bound, highest, row, listed, chunk, count, V, most, coolness,
            N, SHIFT, False,
        )  # fmt: skip
    tie = tl.full([], 0, tl.int32)
    place = tl.arange(0, PIVOTS)  # the cut itself, and just above it
    both = tally(orders, weights, cut + place, row, listed, chunk, count, V, most, coolness, N, SHIFT, True)
    mass = tl.where(k > 0, tl.sum(tl.where(place == 0, both, 0.0), axis=0), mass)
    if limit >= 0:
        # A value goes if it and all below it weigh no more than the limit.
        cut = search(
            orders, weights, mass - limit * mass, 0.0, cut, highest, row, listed, chunk, count, V, most,
            coolness, N, SHIFT, True,
        )  # fmt: skip
        both = tally(
            orders, weights, cut + place, row, listed, chunk, count, V, most, coolness, N, SHIFT, True
        )
        counts = tally(
            orders, ones, cut + place, row, listed, chunk, count, V, most, coolness, N, SHIFT, False
        )
        # Equals at the cut go one by one, smaller ids first, and one stays.
        equals = tl.sum(tl.where(place == 0, counts, tl.where(place == 1, -counts, 0.0)), axis=0)
        from_cut = tl.sum(tl.where(place == 0, both, 0.0), axis=0)
        each = tl.exp(tempered(number_of(cut, SHIFT), coolness, 1) - most)
        gone = tl.minimum(tl.floor((limit * mass - (mass - from_cut)) / each), equals - 1)
        if gone > 0:
            seen = 0
            for first in range(0, count, N):
                z, ids = candidates(row, listed, chunk, first, count, V, N)
                tied = (order_of(z, SHIFT) == cut).to(tl.int32)
                last = (tl.cumsum(tied, axis=0) + seen == gone.to(tl.int32) + 1) & (tied == 1)
                tie = tl.maximum(tie, tl.max(tl.where(last, ids, 0), axis=0))
                seen += tl.sum(tied, axis=0)
            both = both - tl.where(place == 0, gone * each, 0.0)
    kept = tl.sum(tl.where(place == 0, both, 0.0), axis=0)
    if likely > cut:
        cut, tie = likely, tie * 0
        both = tally(
            orders, weights, cut + place, row, listed, chunk, count, V, most, coolness, N, SHIFT, True
        )
        kept = tl.sum(tl.where(place == 0, both, 0.0), axis=0)
    return number_of(cut, SHIFT), tie, kept, listed, chunk, count


@triton.jit
def whole_row(maxima, sums, splits, S: tl.constexpr):
    """Of one row, from its splits: the maximum, and the sum of exponentials relative to it."""
    s = tl.arange(0, S)
    m = tl.load(maxima + s, mask=s < splits, other=-float("inf"))
    total = tl.load(sums + s, mask=s < splits, other=0.0)
    most = tl.max(tl.where(total > 0, m, -float("inf")), axis=0)
    most = tl.where(most == -float("inf"), 0.0, most)
    return most, tl.sum(tl.where(total == 0, 0.0, total * tl.exp(m - most)), axis=0)


@triton.jit
def facts(
    row, chunks, few, maxima, sums, knobs, heat, k, limit, min_p, b, V, splits,
    S: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr,
    FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Of one row: the maximum, the sum of exponentials of what stays relative to it, cut and tie, and the
    list that `threshold` made, empty where all stays; by the row's own knobs, or by those of all."""
    coolness, greedy = coolness_of(knobs, heat, b, 1)
    if knobs is not None:
        k = tl.load(knobs + KNOBS * b + 1)
        limit = tl.load(knobs + KNOBS * b + 2)
        min_p = tl.load(knobs + KNOBS * b + 3)
    most, mass = whole_row(maxima, sums, splits, S)
    cut, tie = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32)
    listed, chunk, count = chunks, CHUNK, 0
    sound = (mass > 0) & (mass < float("inf"))
    wanted = (k > 0) | (limit >= 0) | (min_p > 0)
    if sound & wanted & (greedy == 0):
        cut, tie, mass, listed, chunk, count = threshold(
            row, chunks, few, V, most, mass, coolness, k, limit, min_p, C, CHUNK, WIDE, N, FEW, SHIFT
        )
    return most, mass, cut, tie, listed, chunk, count

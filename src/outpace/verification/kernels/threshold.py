"""Top-k, top-p and min-p without sorting: the smallest logit that survives in each row, its cut.

A pass over the row stores the maximum of every chunk of a few tokens. The k largest maxima are k tokens, so
no token below the k-th of them is among the k likeliest. For top-p alone, the first attempt lists about as
many of the likeliest tokens as fit. So only a few chunks are read again, and only a few of their tokens are
listed. Each listed token is compared with every other, as integers that compare as the logits do. That gives
the number of tokens at least as likely, and their total weight. If too many tokens may survive for a list,
passes over the whole row find the cut.

Two numbers describe the survivors: logits above ``cut``, and those equal to it from the id ``tie`` on, by the
tie rule of ``outpace.sampling``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.pieces import NUM_PARAMS, apply_temperature, load_logits, load_temperature

NUM_ROW_STATS = tl.constexpr(
    5
)  # of a row: maximum, logsumexp of the survivors relative to it, cut, tie, tokens listed
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
def weight_of(z, max_logit, inv_temperature):
    """Return a logit's exponential, relative to the row's maximum."""
    return tl.exp(apply_temperature(z, inv_temperature, 1) - max_logit)


@triton.jit
def from_chunks(row, chunks, CHUNK: tl.constexpr, first, count, V, N: tl.constexpr):
    """Return logits and ids of N of the tokens in a list of chunks."""
    index = first + tl.arange(0, N)
    valid = index < count
    chunk = tl.load(chunks + index // CHUNK, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    ids = tl.where(valid, chunk * CHUNK + index % CHUNK, V)
    return load_logits(row, ids, V), ids


@triton.jit
def from_list(token_list, index, num_listed, V, MAX_LISTED: tl.constexpr):
    """Return logits and ids of listed tokens, at indices of any shape."""
    valid = index < num_listed
    ids = tl.load(token_list + index, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    z = tl.load(token_list + MAX_LISTED + index, mask=valid, other=-float("inf"))
    return z, tl.where(valid, ids, V)


@triton.jit
def pivots_of(lower, upper):
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
def subinterval(lower, upper, reached):
    """Return the part of an interval that is left if ``reached`` of its four pivots are reached."""
    step = (upper - lower + 5) // 5
    return lower + step * reached, tl.minimum(upper, lower + step * (reached + 1) - 1)


@triton.jit
def order_reached_by(orders, k, max_count, low, high):
    """Return an order between low and high that at least k of the orders reach.

    No more than ``max_count`` of them reach it, if there is such an order. It is low if there is none with k.
    There must be fewer than 65536 orders.
    """
    lower, upper = low.to(tl.int64), high.to(tl.int64)
    count_reached = max_count + 1
    while (lower < upper) & (count_reached > max_count):
        a, b, c, d = pivots_of(lower, upper)
        # Four counts in one sum
        packed = (orders >= a).to(tl.int64) + ((orders >= b).to(tl.int64) << 16)
        packed += ((orders >= c).to(tl.int64) << 32) + ((orders >= d).to(tl.int64) << 48)
        found = tl.sum(packed, axis=0)
        reached = 0
        for pivot in tl.static_range(4):
            count = ((found >> (16 * pivot)) & 0xFFFF).to(tl.float32)
            if count >= k:
                reached = pivot + 1
                count_reached = count
        lower, upper = subinterval(lower, upper, reached)
    return lower.to(tl.int32)


@triton.jit
def min_p_order(max_logit, inv_temperature, min_p, low, high, SHIFT: tl.constexpr):
    """Return the lowest order between low and high at least min_p times as likely as the likeliest."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if weight_of(number_of(middle.to(tl.int32), SHIFT), max_logit, inv_temperature) >= min_p:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def max_droppable_order(
    orders, weights, drop_limit, max_logit, inv_temperature, low, high, SHIFT: tl.constexpr
):  # fmt: skip
    """Return the highest order below which all tokens may be dropped.

    A dropped token weighs no more than the maximum of its chunk, nor than the order. The sum of these bounds,
    times the size of a chunk, is within the limit.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        order = middle.to(tl.int32)
        weight = weight_of(number_of(order, SHIFT), max_logit, inv_temperature)
        if tl.sum(tl.where(orders < order, weights, tl.minimum(weights, weight)), axis=0) <= drop_limit:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def list_tokens(
    row, chunks, count, token_list, V, low,
    CHUNK: tl.constexpr, SCAN_TILE: tl.constexpr, MAX_LISTED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """List the tokens of the listed chunks from order ``low`` on, sorted by id.

    It returns their number, or more than MAX_LISTED if there are too many.
    """
    filled, first = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while (first < count) & (filled <= MAX_LISTED):
        z, ids = from_chunks(row, chunks, CHUNK, first, count, V, SCAN_TILE)
        fits = order_of(z, SHIFT) >= low
        slot = tl.cumsum(fits.to(tl.int32), axis=0) - 1 + filled
        fits_in = fits & (slot < MAX_LISTED)
        tl.store(token_list + slot, ids.to(tl.float32, bitcast=True), mask=fits_in)
        tl.store(token_list + MAX_LISTED + slot, z, mask=fits_in)
        filled += tl.sum(fits.to(tl.int32), axis=0)
        first += SCAN_TILE
    tl.debug_barrier()
    return filled


@triton.jit
def cut_from_list(
    token_list, num_listed, V, max_logit, mass, inv_temperature, k, drop_limit, low, min_p_bound,
    MAX_LISTED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return cut, tie and weight of the survivors of a short list.

    Each token of the list is compared with every other.
    """
    z, ids = from_list(token_list, tl.arange(0, MAX_LISTED)[:, None], num_listed, V, MAX_LISTED)
    order, weight = order_of(z, SHIFT), weight_of(z, max_logit, inv_temperature)
    number = tl.zeros([MAX_LISTED, TILE], tl.float32)  # number of tokens at least as likely
    weighs = tl.zeros([MAX_LISTED, TILE], tl.float32)
    for first in range(0, num_listed, TILE):
        other, unused = from_list(token_list, first + tl.arange(0, TILE)[None, :], num_listed, V, MAX_LISTED)
        likelier = order_of(other, SHIFT) >= order
        number += likelier.to(tl.float32)
        weighs += tl.where(likelier, weight_of(other, max_logit, inv_temperature), 0.0)
    number = tl.sum(number, axis=1, keep_dims=True)
    weighs = tl.sum(weighs, axis=1, keep_dims=True)
    cut, tie = low, tl.full([], 0, tl.int32)
    if k > 0:
        cut = all_max(tl.where(number >= k, tl.maximum(order, low), low))
        mass = all_sum(tl.where(order >= cut, weight, 0.0))
    survivor_mass = mass
    if drop_limit >= 0:
        # A value is dropped if it and all below it weigh no more than the limit.
        cut = all_max(tl.where(weighs >= mass - drop_limit * mass, tl.maximum(order, cut), cut))
        survivor_mass = all_sum(tl.where(order >= cut, weight, 0.0))
        equal = order == cut
        num_dropped, each = dropped_ties(
            cut,
            all_sum(equal.to(tl.float32)),
            survivor_mass,
            mass,
            drop_limit,
            max_logit,
            inv_temperature,
            SHIFT,
        )
        if num_dropped > 0:
            survivor_mass -= num_dropped * each
            rank = tl.cumsum(equal.to(tl.int32), axis=0)
            tie = all_max(tl.where(equal & (rank == num_dropped.to(tl.int32) + 1), ids, 0))
    if (min_p_bound > cut) | ((k <= 0) & (drop_limit < 0)):
        cut, tie = min_p_bound, tie * 0
        survivor_mass = all_sum(tl.where(order >= cut, weight, 0.0))
    return cut, tie, survivor_mass


@triton.jit
def dropped_ties(
    cut, equals, survivor_mass, mass, drop_limit, max_logit, inv_temperature, SHIFT: tl.constexpr
):  # fmt: skip
    """Return the number of tokens equal to the cut that are dropped, and the weight of each.

    Smaller ids are dropped first. One token survives.
    """
    each = weight_of(number_of(cut, SHIFT), max_logit, inv_temperature)
    return tl.minimum(tl.floor((drop_limit * mass - (mass - survivor_mass)) / each), equals - 1), each


@triton.jit
def all_max(x):
    """Return the maximum of a matrix."""
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def all_sum(x):
    """Return the sum of a matrix."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def count_or_weigh(
    row, V, a, b, c, d, by_weight, max_logit, inv_temperature,
    ROW_TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the number of a row's tokens that reach each of four orders, or their weight."""
    from_a, from_b = tl.zeros([ROW_TILE], tl.float32), tl.zeros([ROW_TILE], tl.float32)
    from_c, from_d = tl.zeros([ROW_TILE], tl.float32), tl.zeros([ROW_TILE], tl.float32)
    for first in tl.range(0, V, ROW_TILE, num_stages=3):
        z = load_logits(row, first + tl.arange(0, ROW_TILE), V)
        order = order_of(z, SHIFT)
        each = tl.where(by_weight, weight_of(z, max_logit, inv_temperature), 1.0)
        from_a += tl.where(order >= a, each, 0.0)
        from_b += tl.where(order >= b, each, 0.0)
        from_c += tl.where(order >= c, each, 0.0)
        from_d += tl.where(order >= d, each, 0.0)
    return tl.sum(from_a, axis=0), tl.sum(from_b, axis=0), tl.sum(from_c, axis=0), tl.sum(from_d, axis=0)


@triton.jit
def weight_above(row, V, cut, max_logit, inv_temperature, ROW_TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Return the weight of a row's tokens above the cut, and the number of those equal to it."""
    weight, equals = tl.zeros([ROW_TILE], tl.float32), tl.zeros([ROW_TILE], tl.float32)
    for first in tl.range(0, V, ROW_TILE, num_stages=3):
        z = load_logits(row, first + tl.arange(0, ROW_TILE), V)
        order = order_of(z, SHIFT)
        weight += tl.where(order > cut, weight_of(z, max_logit, inv_temperature), 0.0)
        equals += (order == cut).to(tl.float32)
    return tl.sum(weight, axis=0), tl.sum(equals, axis=0)


@triton.jit
def cut_from_row(
    row, V, max_logit, mass, inv_temperature, k, drop_limit, min_p, bound, highest,
    ROW_TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return cut, tie and weight of the survivors, by passes over the whole row.

    The passes are for top-k, then top-p, then min-p. ``bound`` and ``highest`` are the results of
    ``find_cut`` for a row with too many tokens to list.
    """
    low = order_of(bound, SHIFT)
    min_p_bound = low
    if min_p > 0:
        min_p_bound = min_p_order(max_logit, inv_temperature, min_p, low, highest, SHIFT)
    survivor_mass = mass
    cut, tie = low, tl.full([], 0, tl.int32)
    for phase in range(3):
        lower, upper, required = cut.to(tl.int64), highest.to(tl.int64), k
        active = k > 0
        if phase == 1:
            active, required = drop_limit >= 0, mass - drop_limit * mass
        if phase == 2:
            active = (min_p > 0) & ((min_p_bound > cut) | ((k <= 0) & (drop_limit < 0)))
            lower, upper = min_p_bound.to(tl.int64), min_p_bound.to(tl.int64)
        if active:
            while lower < upper:
                a, b, c, d = pivots_of(lower, upper)
                from_a, from_b, from_c, from_d = count_or_weigh(
                    row, V, a, b, c, d, phase == 1, max_logit, inv_temperature, ROW_TILE, SHIFT
                )
                reached = ((from_a >= required) & (a <= upper)).to(tl.int64)
                reached += ((from_b >= required) & (b <= upper)).to(tl.int64)
                reached += ((from_c >= required) & (c <= upper)).to(tl.int64)
                reached += ((from_d >= required) & (d <= upper)).to(tl.int64)
                lower, upper = subinterval(lower, upper, reached)
            cut, tie = lower.to(tl.int32), tie * 0
            above, equals = weight_above(row, V, cut, max_logit, inv_temperature, ROW_TILE, SHIFT)
            survivor_mass = above + equals * weight_of(number_of(cut, SHIFT), max_logit, inv_temperature)
            if phase == 0:
                mass = survivor_mass
            if phase == 1:
                num_dropped, each = dropped_ties(
                    cut, equals, survivor_mass, mass, drop_limit, max_logit, inv_temperature, SHIFT
                )
                if num_dropped > 0:
                    survivor_mass = above + (equals - num_dropped) * each
                    tie = tie_of(row, V, cut, num_dropped.to(tl.int32), ROW_TILE, SHIFT)
    return number_of(cut, SHIFT), tie, survivor_mass


@triton.jit
def tie_of(row, V, cut, num_dropped, ROW_TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Return the first surviving id among those equal to the cut, of which ``num_dropped`` are dropped."""
    tie, seen = tl.full([], 0, tl.int32), 0
    for first in range(0, V, ROW_TILE):
        ids = first + tl.arange(0, ROW_TILE)
        tied = (order_of(load_logits(row, ids, V), SHIFT) == cut).to(tl.int32)
        survives = (tl.cumsum(tied, axis=0) + seen == num_dropped + 1) & (tied == 1)
        tie = tl.maximum(tie, tl.max(tl.where(survives, ids, 0), axis=0))
        seen += tl.sum(tied, axis=0)
    return tie


@triton.jit
def find_cut(
    row, chunks, token_list, V, max_logit, mass, inv_temperature, k, drop_limit, min_p,
    C: tl.constexpr, CHUNK: tl.constexpr, SCAN_TILE: tl.constexpr, MAX_LISTED: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Return cut, tie, sum of exponentials of the survivors, and the number of listed tokens.

    The list holds all survivors. If there are too many to list, the number is -1, and ``cut_from_row`` has to
    find the cut. The first two results are then bounds of the cut: the lowest logit and the highest order.

    ``chunks`` holds the maximum of each of the row's chunks, up to C of them. The indices of the chunks to
    read again overwrite the maxima. ``token_list`` has space for MAX_LISTED tokens and their logits.
    ``max_logit`` is the row's maximum after temperature. ``mass`` is its sum of exponentials relative to it.
    """
    chunk = tl.arange(0, C)
    valid = chunk < tl.cdiv(V, CHUNK)
    maxima = tl.load(chunks + chunk, mask=valid, other=-float("inf"))
    orders = order_of(maxima, SHIFT)
    lowest = order_of(tl.full([], -float("inf"), tl.float32), SHIFT) + 1  # -inf lies below
    highest = tl.max(orders, axis=0)

    min_p_bound = lowest
    if min_p > 0:
        min_p_bound = min_p_order(max_logit, inv_temperature, min_p, lowest, highest, SHIFT)

    # With top-k or min-p alone, no token below this order can survive; with top-p it is a first try.
    least = tl.maximum(tl.min(tl.where(valid, orders, highest), axis=0), lowest)
    bound = min_p_bound
    if k > 0:
        max_count = tl.maximum(k, tl.minimum(2 * k, 0.7 * MAX_LISTED))
        bound = order_reached_by(
            orders, k, max_count, tl.where(k <= tl.cdiv(V, CHUNK), least, lowest), highest
        )
    elif drop_limit >= 0:
        chunk_count = tl.full([], MAX_LISTED // 4, tl.float32)
        bound = tl.maximum(
            min_p_bound, order_reached_by(orders, chunk_count, 2 * chunk_count, least, highest)
        )

    # List the chunks that reach the bound, in order, and then their tokens that reach it.
    reach = (orders >= bound) & valid
    rank = tl.cumsum(reach.to(tl.int32), axis=0) - 1
    count = (tl.max(rank, axis=0) + 1) * CHUNK
    tl.debug_barrier()  # all threads have read
    tl.store(chunks + rank, chunk.to(tl.float32, bitcast=True), mask=reach)
    tl.debug_barrier()
    num_listed = list_tokens(row, chunks, count, token_list, V, bound, CHUNK, SCAN_TILE, MAX_LISTED, SHIFT)
    if (k <= 0) & (drop_limit >= 0) & (num_listed <= MAX_LISTED) & (bound > min_p_bound):
        z, ids = from_list(token_list, tl.arange(0, MAX_LISTED), num_listed, V, MAX_LISTED)
        # If the list weighs too little, tokens below the bound survive, too.
        if tl.sum(weight_of(z, max_logit, inv_temperature), axis=0) < mass - drop_limit * mass:
            num_listed = num_listed * 0 + MAX_LISTED + 1
    cut, tie = bound, highest
    if num_listed <= MAX_LISTED:
        cut, tie, mass = cut_from_list(
            token_list,
            num_listed,
            V,
            max_logit,
            mass,
            inv_temperature,
            k,
            drop_limit,
            bound,
            min_p_bound,
            MAX_LISTED,
            SHIFT,
        )
    else:
        num_listed = tl.full([], -1, tl.int32)
        if (k <= 0) & (drop_limit >= 0):
            weights = tl.where(valid, weight_of(maxima, max_logit, inv_temperature), 0.0)
            cut = max_droppable_order(
                orders, weights, drop_limit * mass / CHUNK, max_logit, inv_temperature, lowest, highest, SHIFT
            )
            cut = tl.maximum(cut, min_p_bound)
    return number_of(cut, SHIFT), tie, mass, num_listed


@triton.jit
def combine_row(maxima, sums, splits, S: tl.constexpr):
    """Return the maximum of one row, and the sum of exponentials relative to it, from its splits."""
    s = tl.arange(0, S)
    m = tl.load(maxima + s, mask=s < splits, other=-float("inf"))
    total = tl.load(sums + s, mask=s < splits, other=0.0)
    max_logit = tl.max(tl.where(total > 0, m, -float("inf")), axis=0)
    max_logit = tl.where(max_logit == -float("inf"), 0.0, max_logit)
    return max_logit, tl.sum(tl.where(total == 0, 0.0, total * tl.exp(m - max_logit)), axis=0)


@triton.jit
def load_params(p_params, temperature, k, drop_limit, min_p, b):
    """Return a row's own sampling parameters if there are some per row, else the shared ones."""
    inv_temperature, greedy = load_temperature(p_params, temperature, b, 1)
    if p_params is not None:
        k = tl.load(p_params + NUM_PARAMS * b + 1)
        drop_limit = tl.load(p_params + NUM_PARAMS * b + 2)
        min_p = tl.load(p_params + NUM_PARAMS * b + 3)
    return inv_temperature, greedy, k, drop_limit, min_p


@triton.jit
def compute_row_stats(
    row, chunks, token_list, maxima, sums, p_params, temperature, k, drop_limit, min_p, b, V, splits,
    S: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, SCAN_TILE: tl.constexpr, MAX_LISTED: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the maximum of one row, and the results of ``find_cut`` for it.

    They are the sum of exponentials of the survivors relative to the maximum, cut, tie, and the number of
    listed tokens. That number is 0 where all tokens survive.
    """
    inv_temperature, greedy, k, drop_limit, min_p = load_params(
        p_params, temperature, k, drop_limit, min_p, b
    )
    max_logit, mass = combine_row(maxima, sums, splits, S)
    cut, tie = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32)
    num_listed = tl.full([], 0, tl.int32)
    has_softmax = (mass > 0) & (mass < float("inf"))
    has_filter = (k > 0) | (drop_limit >= 0) | (min_p > 0)
    if has_softmax & has_filter & (greedy == 0):
        cut, tie, mass, num_listed = find_cut(
            row,
            chunks,
            token_list,
            V,
            max_logit,
            mass,
            inv_temperature,
            k,
            drop_limit,
            min_p,
            C,
            CHUNK,
            SCAN_TILE,
            MAX_LISTED,
            SHIFT,
        )
    return max_logit, mass, cut, tie, num_listed

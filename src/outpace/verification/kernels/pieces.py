"""Functions that the kernels are composed of.

Names: p rows are the target's, and q rows the draft's. z is an input logit, and x is one after temperature. G
and S are the powers of two that hold g and the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.sampling.random import Stream

DRAFT = tl.constexpr(int(Stream.DRAFT) // 2)
ACCEPT = tl.constexpr(int(Stream.ACCEPT) // 2)
TARGET = tl.constexpr(int(Stream.TARGET) // 2)
RULES = {"token": 0, "sigmoid": 1, "block": 2}
SIGMOID, BLOCK = tl.constexpr(RULES["sigmoid"]), tl.constexpr(RULES["block"])
CUT = tl.constexpr(2)  # ADJUST: 0 leaves logits as they are, 1 divides them by a temperature, 2 cuts them too
NONE = tl.constexpr(2**31 - 1)  # no token
NUM_PARAMS = tl.constexpr(4)  # of a row: temperature, top_k (0: all), 1 - top_p (-1: all), min_p


@triton.jit
def uniforms(seed, position, start, stream):
    """Return the two float64 uniforms of a key, as in ``outpace.sampling.random``."""
    c1, c2 = position.to(tl.uint32), start.to(tl.uint32)
    zero = c1 * 0
    a, b, c, d = tl.philox(seed, zero, c1, c2 + zero, zero + stream)
    first = ((a >> 6).to(tl.float64) * 67108864.0 + (b >> 6).to(tl.float64) + 0.5) * 2.220446049250313e-16
    second = ((c >> 6).to(tl.float64) * 67108864.0 + (d >> 6).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return first, second


@triton.jit
def branch_stream(stream, depth, node):
    """Return a stream's counter word at a depth of a cascade and a node of a tree."""
    return stream + depth * 256 + node * 65536


@triton.jit
def load_key(per_row, shared, b):
    """Return the row's own number if there is one per row, else the shared number."""
    if per_row is not None:
        shared = tl.load(per_row + b)
    return shared


@triton.jit
def exponential(u):
    """Return -log1p(-u) of a float32.

    Small u, which win races, go through the series of 2 artanh(u / (2 - u)). The device's logarithm near 1 is
    too rough for them.
    """
    z = u / (2.0 - u)
    y = z * z
    series = 2.0 * z * (1.0 + y * (0.33333334 + y * (0.2 + y * (0.14285715 + y * 0.11111111))))
    return tl.where(u < 0.25, series, -tl.log(1.0 - u))


@triton.jit
def load_logits(row, ids, V):
    """Load a row's own logits as float32, -inf past V."""
    return tl.load(row + ids, mask=ids < V, other=-float("inf")).to(tl.float32)


@triton.jit
def apply_temperature(z, inv_temperature, ADJUST: tl.constexpr):
    """Divide logits by the temperature, as a product with its inverse.

    The product is several times as fast, and equal but for the last digit.
    """
    if ADJUST:
        z = z * inv_temperature
    return z


@triton.jit
def load_adjusted(row, ids, V, inv_temperature, cut, tie, ADJUST: tl.constexpr):
    """Return adjusted logits.

    Logits below the cut become -inf, and so do those equal to it with an id before ``tie``.
    """
    z = load_logits(row, ids, V)
    if ADJUST == CUT:
        z = tl.where((z > cut) | ((z == cut) & (ids >= tie)), z, -float("inf"))
    return apply_temperature(z, inv_temperature, ADJUST)


@triton.jit
def load_temperature(p_params, shared_temperature, b, ADJUST: tl.constexpr):
    """Return the inverse of a row's temperature, and whether the row is greedy instead.

    The temperature is the row's own if there is one per row, else the shared one.
    """
    inv_temperature = 1.0
    greedy = False
    if ADJUST:
        temperature = shared_temperature
        if p_params is not None:
            temperature = tl.load(p_params + NUM_PARAMS * b)
        greedy = temperature == 0.0
        inv_temperature = 1.0 / tl.where(greedy, 1.0, temperature)
    return inv_temperature, greedy


@triton.jit
def exponentials(x):
    """Return a split's maximum, and exp(x - maximum).

    The exponentials are 0 where nothing is possible, and NaN from NaN or +inf.
    """
    max_logit = tl.max(x, axis=0)
    return max_logit, tl.exp(x - tl.where(max_logit == -float("inf"), 0.0, max_logit))


@triton.jit
def load_splits(maxima, sums, row, i, splits, drafted, S: tl.constexpr):
    """Return the maxima and sums that ``scan`` stored for the splits of rows ``row + i``, ``[G, S]`` each."""
    s = tl.arange(0, S)
    at = (row + i)[:, None] * splits + s[None, :]
    mask = drafted[:, None] & (s < splits)[None, :]
    m = tl.load(maxima + at, mask=mask, other=-float("inf"))
    return m, tl.load(sums + at, mask=mask, other=0.0)


@triton.jit
def combine_splits(m, total):
    """Return the maximum of each row, and the logsumexp relative to it.

    Added to a large maximum, the logsumexp would lose its digits. It is infinite or NaN where a row has no
    softmax.
    """
    max_logit = tl.max(tl.where(total > 0, m, -float("inf")), axis=1)
    max_logit = tl.where(max_logit == -float("inf"), 0.0, max_logit)
    # A split with nothing possible has sum 0; NaN stays NaN.
    mass = tl.sum(tl.where(total == 0, 0.0, total * tl.exp(m - max_logit[:, None])), axis=1)
    return max_logit, tl.log(mass)


@triton.jit
def argmax_of(maxima, split_argmax, row, i, splits, drafted, S: tl.constexpr):
    """Return the token with the largest logit of rows ``row + i``, ``[G]``, the first among equals."""
    s = tl.arange(0, S)
    at = (row + i)[:, None] * splits + s[None, :]
    mask = drafted[:, None] & (s < splits)[None, :]
    m = tl.load(maxima + at, mask=mask, other=-float("inf"))
    top = tl.load(split_argmax + at, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    return tl.min(tl.where(m == tl.max(m, axis=1)[:, None], top, NONE), axis=1)


@triton.jit
def pick(vector, index, n):
    """Return ``vector[n]``, or 0 where there is no n."""
    return tl.sum(tl.where(index == n, vector, 0), axis=0)


@triton.jit
def scaled_sigmoid(x, alpha, width):
    """Return the sigmoid that replaces a probability, or NaN for a logit of +inf."""
    return tl.where(x == float("inf"), float("nan"), tl.sigmoid((x - alpha) / width))


@triton.jit
def next_token_weights(
    p_row, q_row, ids, V, n, length, token, p_max_logit, p_log_sum, q_max_logit, q_log_sum, p_cut, p_tie,
    q_cut, q_tie,
    scale, inv_temperature, q_inv_temperature, q_greedy, q_top,
    alpha, width, RULE: tl.constexpr, HAS_Q: tl.constexpr, ADJUST: tl.constexpr, ADJUST_Q: tl.constexpr,
):  # fmt: skip
    """Return the weights of the next token in one split of row n.

    The results are a reference logit, the weights and p, both divided by its exponential, and the adjusted
    logits.
    """
    x = load_adjusted(p_row, ids, V, inv_temperature, p_cut, p_tie, ADJUST)
    reference = tl.full([], 0.0, tl.float32)
    if n < length:
        if RULE == SIGMOID:
            p = scaled_sigmoid(x, alpha, width)
        else:
            p = tl.exp((x - p_max_logit) - p_log_sum)
        if HAS_Q:
            y = load_adjusted(q_row, ids, V, q_inv_temperature, q_cut, q_tie, ADJUST_Q)
            if RULE == SIGMOID:
                q = scaled_sigmoid(y, alpha, width)
            else:
                q = tl.exp((y - q_max_logit) - q_log_sum)
                q = tl.where(y == float("inf"), float("nan"), q)  # a stored logsumexp would hide +inf
                q = tl.where(q_greedy, (ids == q_top).to(tl.float32), q)
            w = scale * p - q
            w = tl.where(w < 0, 0.0, w)  # NaN remains NaN
        else:
            w = tl.where(ids == token, 0.0, scale * p)
    else:
        reference, p = exponentials(x)
        if RULE == SIGMOID:
            if length > 0:
                reference = tl.full([], 0.0, tl.float32)
                p = scaled_sigmoid(x, alpha, width)
        w = p
    return reference, w, p, x


@triton.jit
def gumbel_logits(x, s, seed, position, greedy, SPLIT: tl.constexpr):
    """Return a split's maximum, and its logits plus the target stream's Gumbel noise.

    The sums are relative to that maximum, so that large logits do not swallow the noise's digits.
    """
    # Four tokens share a Philox block: each block is computed once, and its words are interleaved.
    c0 = (s * (SPLIT // 4) + tl.arange(0, SPLIT // 4)).to(tl.uint32)
    zero = c0 * 0
    a, b, c, d = tl.philox(seed, c0, zero + position.to(tl.uint32), zero, zero + TARGET)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    max_logit = tl.max(x, axis=0)
    noise = tl.where(greedy, 0.0, -tl.log(exponential(u)))
    return max_logit, x - tl.where(max_logit == -float("inf"), 0.0, max_logit) + noise


@triton.jit
def first_max(x, ids):
    """Return the id of the largest entry, the first among equals."""
    return tl.min(tl.where(x == tl.max(x, axis=0), ids, NONE), axis=0)


@triton.jit
def first_beyond(weights, ids, level):
    """Return the first id at which the running sum exceeds a level, or NONE."""
    reached = (tl.cumsum(weights, axis=0).to(tl.float64) > level) & (weights > 0)
    return tl.min(tl.where(reached, ids, NONE), axis=0)


@triton.jit
def sample_at(weights, ids, level):
    """Return ``first_beyond``, or the last id with weight where that is NONE."""
    token = first_beyond(weights, ids, level)
    return tl.where(token == NONE, tl.max(tl.where(weights > 0, ids, 0), axis=0), token)


@triton.jit
def is_invalid_row(bad_token, bad_length, invalid, b, HAS_INVALID: tl.constexpr):
    """Return whether a row's inputs are out of range."""
    is_invalid = (tl.sum(bad_token.to(tl.int32), axis=0) > 0) | bad_length
    if HAS_INVALID:
        is_invalid |= tl.load(invalid + b) != 0
    return is_invalid


@triton.jit
def store_verdict(accepted, next_token, bad, b, is_invalid, is_unusable, n, token):
    """Store the verdict of a row, which has no next token if the logits after n tokens are unusable."""
    is_bad = is_invalid | is_unusable
    tl.store(accepted + b, tl.where(is_invalid, 0, n))
    tl.store(next_token + b, tl.where(is_bad, 0, token))
    tl.store(bad + b, is_bad)

"""Attention of a few new tokens over a paged KV cache, as one kernel.

In this file, a *block* is a thread block of the kernel, and a *page* is a block of ``PagedCache``. A page has
``page`` tokens. Its memory is a contiguous tensor ``[layers, 2, kv_heads, page, d]``: keys, then values. A
table, int64 ``[rows, pages]``, holds the address of each page of each row. So pages can be added to a row,
and rows can share pages, without a new CUDA graph.

The kernel takes the output of the query, key and value product. It normalizes and rotates queries and keys,
writes keys and values into the cache, and computes the softmax. For cross-attention there are only queries:
all tokens of a row are in the cache, and every query sees them.

A block handles the queries of all heads that share a key head in a row, and a range of the row's tokens. It
takes new tokens from the product and writes them into the cache, so that no block waits for another. Long
rows are cut into ranges, so that there are enough blocks for all processors. If a row has several ranges, the
last block of each key head to finish combines their outputs.

If there are few blocks, a query's output has the same bits however many new tokens there are, in bfloat16 and
float32. Keys are then added up from the last one to the first, 16 at a time, whether they come from the cache
or from the product. The running maximum of a softmax is an integer of a base-2 logarithm, so that rescaling
is exact.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.models.kernels.launch import ALIGNED, device
from outpace.models.kernels.ranges import FIELDS, BlockShape
from outpace.verification.kernels.ahead import launch

COMBINED = 8  # most ranges loaded at once when their outputs are combined
TOTALS = tl.constexpr(8)  # equal columns of the totals of a softmax; see `update_softmax`
LOG2_E = math.log2(math.e)
KEYS_AT_ONCE = tl.constexpr(16)  # keys that one instruction adds up
PREFETCH = 64  # earlier tokens that each of few blocks prefetches before the previous kernel has ended


@triton.jit
def normed(a, b, weight, eps, half, HALF: tl.constexpr, D: tl.constexpr, SHIFTED: tl.constexpr):
    """Normalize vectors, each held as two halves."""
    if weight is not None:
        h = tl.arange(0, HALF)
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        first = tl.load(weight + h, mask=h < half, other=0.0).to(tl.float32)
        second = tl.load(weight + half + h, mask=h < half, other=0.0).to(tl.float32)
        if SHIFTED:
            first += 1.0
            second += 1.0
        a, b = a * factor * first[None, :], b * factor * second[None, :]
    return a, b


@triton.jit
def angles_of(position, valid, cos, sin, cos_stride, D: tl.constexpr, HALF: tl.constexpr):
    """Return cosines and sines of positions ``[n]``, ``[n, HALF]`` each; those of 0 without rotation."""
    h = tl.arange(0, HALF)[None, :]
    mask = valid[:, None] & (h < D // 2)
    if cos is not None:
        at = position[:, None] * cos_stride + h
        cosine, sine = tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)
    else:
        cosine, sine = tl.where(mask, 1.0, 0.0), tl.where(mask, 0.0, 0.0)
    return cosine, sine


@triton.jit
def vectors(
    at, valid, weight, cosine, sine, eps, D: tl.constexpr, HALF: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """Load queries or keys at pointers ``[n]``, normalized and rotated, as two halves ``[n, HALF]``."""
    half = D // 2
    h = tl.arange(0, HALF)[None, :]
    mask = valid[:, None] & (h < half)
    first = tl.load(at[:, None] + h, mask=mask, other=0.0)
    second = tl.load(at[:, None] + half + h, mask=mask, other=0.0)
    dtype = first.dtype
    a, b = normed(first.to(tl.float32), second.to(tl.float32), weight, eps, half, HALF, D, SHIFTED)
    a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    c, s = cosine.to(tl.float32), sine.to(tl.float32)
    return (a * c - b * s).to(dtype), (b * c + a * s).to(dtype)


@triton.jit
def address_of(pages, t, valid, PAGE: tl.constexpr):
    """Return the address of the page that holds token t of a row of the table, or 0 if t is not valid."""
    return tl.load(pages + t // PAGE, mask=valid, other=0)


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    """Return the pointer to elements of a page at an address."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def new_keys(
    source, valid, weight, cosine, sine, eps, kv_heads, line,
    D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Write keys and values of new tokens ``[n]`` into the cache; return keys as two halves, and values.

    ``source`` points to each token's key in the product, ``line`` to its key in the cache. Tokens that are
    not valid are not written, and are 0.
    """
    h, d = tl.arange(0, HALF)[None, :], tl.arange(0, WIDTH)[None, :]
    half_mask, mask = valid[:, None] & (h < D // 2), valid[:, None] & (d < D)
    v = tl.load(source[:, None] + kv_heads * D + d, mask=mask, other=0.0)
    ka, kb = vectors(source, valid, weight, cosine, sine, eps, D, HALF, SHIFTED)
    tl.store(line + h, ka, mask=half_mask)
    tl.store(line + D // 2 + h, kb, mask=half_mask)
    tl.store(line + kv_heads * PAGE * D + d, v, mask=mask)
    return ka, kb, v


@triton.jit
def cached_keys(
    line, valid, kv_heads, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Load keys at pointers ``[n, 1]`` as two halves, and their values; those not valid are 0."""
    h, d = tl.arange(0, HALF)[None, :], tl.arange(0, WIDTH)[None, :]
    half_mask, mask = valid[:, None] & (h < D // 2), valid[:, None] & (d < D)
    ka = tl.load(line + h, mask=half_mask, other=0.0)
    kb = tl.load(line + D // 2 + h, mask=half_mask, other=0.0)
    return ka, kb, tl.load(line + kv_heads * PAGE * D + d, mask=mask, other=0.0)


@triton.jit
def prefetch(lines, tokens, D: tl.constexpr, TOKENS: tl.constexpr):
    """Prefetch lines ``[tokens, D]`` into L2, at most TOKENS of them."""
    t = tl.arange(0, TOKENS)
    size = tl.where(t < tokens, D * (lines.dtype.element_ty.primitive_bitwidth // 8), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; mov.u32 $0, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=r,l,r",
        [(lines + t * D).to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def update_softmax(
    qa, qb, ka, kb, v, visible, distance, bias, query_head, distances, heads, scale,
    running_max, running_total, running_sum, SAME_BITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running maximum, total and weighted sum of a softmax with more keys and values.

    Scores are base-2 logarithms. If ``visible`` is None, every query sees all keys. ``bias``, if there is
    one, is added to the scores: that of the queries' heads, and of their ``distance`` from the keys. It is
    ``[distances, heads]``, and larger distances have its last row.

    With SAME_BITS, the maximum is an integer, so that the bits of a weight, except for its exponent, do not
    depend on it. Totals are then a product with ones, which adds up keys in the same order for any number of
    queries, unlike ``tl.sum``. Its columns are equal.
    """
    score = tl.dot(qa, tl.trans(ka), input_precision=PRECISION)
    score = tl.dot(qb, tl.trans(kb), score, input_precision=PRECISION) * scale
    if bias is not None:
        line = tl.minimum(tl.maximum(distance, 0), distances - 1)
        score += tl.load(bias + line * heads + query_head[:, None])
    factor = 1.0
    if SAME_BITS:
        whole = tl.floor(score)
        factor = tl.exp2(score - whole)
        score = whole
    if visible is not None:
        score = tl.where(visible, score, -float("inf"))
    new_max = tl.maximum(running_max, tl.max(score, axis=1))
    safe = tl.where(new_max == -float("inf"), 0.0, new_max)
    weight = tl.exp2(score - safe[:, None]) * factor
    decay = tl.exp2(running_max - safe)
    if SAME_BITS:
        ones = tl.full([v.shape[0], running_total.shape[1]], 1.0, v.dtype)
        running_total = running_total * decay[:, None]
        running_total = tl.dot(weight.to(v.dtype), ones, running_total, input_precision=PRECISION)
    else:
        running_total = running_total * decay + tl.sum(weight, axis=1)
    running_sum = tl.dot(weight.to(v.dtype), v, running_sum * decay[:, None], input_precision=PRECISION)
    return new_max, running_total, running_sum


@triton.jit
def over_cache(
    qa, qb, pages, first, stop, position, last, window, scale, kv_heads, head_start, bias, query_head,
    distances, heads, running_max, running_total, running_sum,
    D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, SAME_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Update a softmax with the row's tokens before ``stop``, back to ``first``.

    ``first`` is a multiple of BLOCK, so that the tokens loaded at once are in one page. The keys of the layer
    and head begin at element head_start of a page.

    Each query sees no token after its ``last`` one, and none farther back than the window (0: no limit).
    ``bias`` is that of ``update_softmax``. If not MASKED, every query sees all of the tokens, and their
    number is a multiple of BLOCK.
    """
    tiles = tl.cdiv(stop - first, BLOCK)
    address = tl.load(pages + (first + (tiles - 1) * BLOCK) // PAGE, mask=tiles > 0, other=0)
    for tile in range(tiles):
        left = first + (tiles - 1 - tile) * BLOCK
        t = left + (BLOCK - 1) - tl.arange(0, BLOCK)
        keys = pointer_to(address, qa.dtype) + head_start
        # Loaded one iteration ahead, so that the loads of keys and values do not wait for it
        address = tl.load(pages + tl.maximum(left - BLOCK, first) // PAGE)
        inside, visible = t >= 0, None
        if MASKED:
            inside = t < stop
            visible = t[None, :] <= last[:, None]
            if window > 0:
                visible &= t[None, :] > position[:, None] - window
        line = keys + (t % PAGE)[:, None] * D
        ka, kb, v = cached_keys(line, inside, kv_heads, D, qa.shape[1], running_sum.shape[1], PAGE)
        running_max, running_total, running_sum = update_softmax(
            qa, qb, ka, kb, v, visible, position[:, None] - t[None, :], bias, query_head, distances, heads,
            scale, running_max, running_total, running_sum, SAME_BITS, PRECISION,
        )  # fmt: skip
    return running_max, running_total, running_sum


@triton.jit
def quotient(total, weighted_sum):
    """Return the output of a softmax, which is 0 for a query that sees nothing."""
    return weighted_sum / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["positions", "table", "positions_stride", "table_stride"])
def attend(
    qkv, positions, cos, sin, q_norm, k_norm, bias, table, ranges, out, parts, counters, eps, scale, window,
    distances, n, heads, kv_heads, layer_start, positions_stride, qkv_stride, table_stride, out_stride,
    cos_stride,
    D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr, QUERIES: tl.constexpr,
    COMBINED: tl.constexpr, SAME_BITS: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Compute one block of (range, key head).

    HALF, WIDTH and QUERIES are powers of two, not less than D / 2, D and the number of queries of a key head.
    ROWS is QUERIES, but at least 16. The outputs of COMBINED ranges are loaded at once. The layer's keys
    begin at element layer_start of a page.

    The new tokens are one tile of at most NEW. With SAME_BITS, it ends at a multiple of KEYS_AT_ONCE, and
    begins with tokens from the cache.

    The previous kernel does not write positions, angles, the table, the ranges or earlier tokens. So, before
    that kernel ends, a block loads what it needs of the first four, and prefetches PREFETCH earlier tokens.
    """
    head, item = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    num_ranges = tl.load(ranges + item * FIELDS).to(tl.int32)
    if num_ranges == 0:
        return
    b = tl.load(ranges + item * FIELDS + 1)
    r = tl.load(ranges + item * FIELDS + 2).to(tl.int32)
    # Tokens of this range, the first new token of the row, and the address of the last earlier token's page
    first = tl.load(ranges + item * FIELDS + 3).to(tl.int32)
    stop = tl.load(ranges + item * FIELDS + 4).to(tl.int32)
    start = tl.load(ranges + item * FIELDS + 5).to(tl.int32)
    address = tl.load(ranges + item * FIELDS + 6)
    groups = heads // kv_heads
    d = tl.arange(0, WIDTH)
    dtype = out.dtype.element_ty
    pages = table + b * table_stride
    head_start = layer_start + head * PAGE * D
    row = tl.arange(0, ROWS)
    i = row % n
    valid = row < groups * n
    position = tl.load(positions + b * positions_stride + i, mask=valid, other=-1).to(tl.int32)
    cosine, sine = angles_of(position, position >= 0, cos, sin, cos_stride, D, HALF)
    # The tile has tokens from `bottom` on and before `top`
    if SAME_BITS:
        top = tl.cdiv(stop, KEYS_AT_ONCE) * KEYS_AT_ONCE
        bottom = tl.where(stop > start, tl.maximum(first, top - NEW), stop)
    else:
        top, bottom = stop, tl.minimum(stop, tl.maximum(first, start))
    t = top - 1 - tl.arange(0, NEW)
    j = t - start
    cached, new = (t >= bottom) & (j < 0), (t >= bottom) & (j >= 0) & (t < stop)
    # A new token that is padding, or beyond the context, has another position.
    new &= tl.load(positions + b * positions_stride + j, mask=new, other=-1).to(tl.int32) == t
    new_cosine, new_sine = angles_of(t, new, cos, sin, cos_stride, D, HALF)
    line = pointer_to(address_of(pages, t, new | cached, PAGE), dtype) + (head_start + t % PAGE * D)
    line = line[:, None]
    if OVERLAPS:
        if PREFETCH > 0:
            earlier = tl.minimum(stop, start)
            left = tl.maximum(first, (earlier - 1) // PREFETCH * PREFETCH)
            keys = pointer_to(address, dtype) + (head_start + left % PAGE * D)
            prefetch(keys, earlier - left, D, PREFETCH)
            prefetch(keys + kv_heads * PAGE * D, earlier - left, D, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()

    # Queries of all heads of the group, `[groups·n, d]`
    query_head = head * groups + tl.minimum(row // n, groups - 1)
    query = qkv + (b * n + i) * qkv_stride + query_head * D
    qa, qb = vectors(query, valid, q_norm, cosine, sine, eps, D, HALF, SHIFTED)
    running_max = tl.full([ROWS], -float("inf"), tl.float32)
    running_total = tl.zeros([ROWS, TOTALS] if SAME_BITS else [ROWS], tl.float32)
    running_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    if stop > start:
        if SAME_BITS:
            cached_ka, cached_kb, cached_v = cached_keys(line, cached, kv_heads, D, HALF, WIDTH, PAGE)
        ka, kb, v = new_keys(
            qkv + (b * n + j) * qkv_stride + (heads + head) * D, new, k_norm, new_cosine, new_sine, eps,
            kv_heads, line, D, HALF, WIDTH, PAGE, SHIFTED,
        )  # fmt: skip
        if SAME_BITS:
            ka, kb, v = ka + cached_ka, kb + cached_kb, v + cached_v
        visible = (new | cached)[None, :] & (t[None, :] <= position[:, None])
        if window > 0:
            visible &= t[None, :] > position[:, None] - window
        running_max, running_total, running_sum = update_softmax(
            qa, qb, ka, kb, v, visible, position[:, None] - t[None, :], bias, query_head, distances, heads,
            scale, running_max, running_total, running_sum, SAME_BITS, PRECISION,
        )  # fmt: skip
    running_max, running_total, running_sum = over_cache(
        qa, qb, pages, first, bottom, position, tl.where(valid, bottom - 1, -1), window, scale, kv_heads,
        head_start, bias, query_head, distances, heads, running_max, running_total, running_sum,
        D, BLOCK, PAGE, True, SAME_BITS, PRECISION,
    )  # fmt: skip
    total = running_total
    if SAME_BITS:
        total = tl.max(running_total, axis=1)

    out_mask = valid[:, None] & (d < D)[None, :]
    if num_ranges == 1:
        to = out + (b * n + i) * out_stride + (head * groups + row // n) * D
        tl.store(to[:, None] + d[None, :], quotient(total, running_sum).to(dtype), mask=out_mask)
    else:
        # Each range stores maximum, total and weighted sum; the last one to finish combines them.
        group = b * kv_heads + head
        cell = ROWS * (WIDTH + 2)
        this_part = parts + (item * kv_heads + head) * cell
        tl.store(this_part + row, running_max)
        tl.store(this_part + ROWS + row, total)
        tl.store(this_part + 2 * ROWS + row[:, None] * WIDTH + d[None, :], running_sum, mask=out_mask)
        tl.debug_barrier()
        finished = tl.atomic_add(counters + group, 1, sem="acq_rel")
        if finished == num_ranges - 1:
            tl.store(counters + group, 0)  # for the next launch
            few = tl.arange(0, QUERIES)  # fewer than ROWS, so that more ranges are loaded at once
            in_out = (few < groups * n)[:, None] & (d < D)[None, :]
            all_max = tl.full([QUERIES], -float("inf"), tl.float32)
            all_total = tl.zeros([QUERIES], tl.float32)
            all_sum = tl.zeros([QUERIES, WIDTH], tl.float32)
            for other in range(0, num_ranges, COMBINED):
                for k in tl.static_range(COMBINED):
                    # Past the last range, it is loaded again, with weight 0.
                    number = tl.minimum(other + k, num_ranges - 1)
                    part = parts + ((item - r + number) * kv_heads + head) * cell
                    part_max = tl.load(part + few, cache_modifier=".cg")
                    part_max = tl.where(num_ranges > other + k, part_max, -float("inf"))
                    part_total = tl.load(part + ROWS + few, cache_modifier=".cg")
                    part_sum = tl.load(
                        part + 2 * ROWS + few[:, None] * WIDTH + d[None, :],
                        mask=in_out,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_max = tl.maximum(all_max, part_max)
                    safe = tl.where(new_max == -float("inf"), 0.0, new_max)
                    decay, factor = tl.exp2(all_max - safe), tl.exp2(part_max - safe)
                    all_max = new_max
                    all_total = all_total * decay + part_total * factor
                    all_sum = all_sum * decay[:, None] + part_sum * factor[:, None]
            to = out + (b * n + few % n) * out_stride + (head * groups + few // n) * D
            tl.store(to[:, None] + d[None, :], quotient(all_total, all_sum).to(dtype), mask=in_out)


def few_queries(
    qkv: Tensor,
    positions: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    table: Tensor,
    ranges: Tensor,
    blocks: BlockShape,
    counters: Tensor,
    *,
    layer: int,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    norms: tuple[Tensor, Tensor, float, bool] | None = None,
    bias: Tensor | None = None,
    cross: bool = False,
) -> Tensor:
    """Attend from new tokens over the KV cache, and write their keys and values into it.

    Args:
        qkv: Queries, keys and values of the new tokens, ``[B, n, (heads + 2·kv_heads)·d]``. For
            cross-attention queries only, ``[B, n, heads·d]``.
        positions: Positions ``[B, n]``, consecutive in each row. A row of padding has positions -1: nothing
            of it is written, and its output is zeros.
        angles: Cosines and sines of every position, ``[tokens, d]`` each. None: no rotation.
        table: Address of each page of each row, int64, at least B rows. Pages are aligned to 16 bytes.
            Entries of pages that a row has no tokens in are not used.
        ranges: The ranges of all rows, from ``ranges_of``; for cross-attention from ``source_ranges_of``.
        blocks: Shape of the blocks, from ``blocks_of``.
        counters: int32, at least B·kv_heads zeros. They are zeros again after the kernel.
        layer: Index of the layer in each page.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        scale: Factor of the attention scores.
        window: How far back the layer looks; None for no limit.
        norms: Norms of queries and keys: weights of each, eps, and whether weights are relative to 1.
        bias: Bias of the scores by distance, as a base-2 logarithm, float32 ``[distances, heads]``. Larger
            distances have the last one.
        cross: Whether this is cross-attention. It writes nothing into the cache.

    Returns:
        The attention output ``[B, n, heads·d]``.
    """
    B, n, _ = qkv.shape
    D = qkv.shape[-1] // (heads + 2 * kv_heads * (not cross))
    page, here = blocks.page, device(qkv.device)
    queries = triton.next_power_of_2(heads // kv_heads * n)
    ROWS = max(16, queries)
    WIDTH = max(16, triton.next_power_of_2(D))
    HALF = max(16, triton.next_power_of_2(D // 2))
    out = torch.empty(B, n, heads * D, dtype=qkv.dtype, device=qkv.device)
    parts = torch.empty(len(ranges) * kv_heads * ROWS * (WIDTH + 2), dtype=torch.float32, device=qkv.device)
    q_norm, k_norm, eps, shifted = norms or (None, None, 0.0, False)
    cos, sin = angles or (None, None)
    aligned = D * qkv.element_size() % ALIGNED == 0
    tile = n + KEYS_AT_ONCE.value - 1 if blocks.few else n
    launch(
        attend, (len(ranges) * kv_heads,),
        qkv, positions, cos, sin, q_norm, k_norm, bias, table, ranges, out, parts,
        counters, eps, scale * LOG2_E, window or 0, 0 if bias is None else len(bias), n, heads, kv_heads,
        layer * 2 * kv_heads * page * D, positions.stride(0), qkv.stride(1), table.stride(0), out.stride(1),
        0 if cos is None else cos.stride(0),
        D, HALF, WIDTH, ROWS, max(16, triton.next_power_of_2(tile)), blocks.tokens, page, FIELDS, queries,
        min(COMBINED, triton.next_power_of_2(len(ranges))), blocks.few, shifted,
        "ieee" if qkv.dtype == torch.float32 else "tf32", here.overlaps,
        PREFETCH if blocks.few and aligned else 0,
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
        **here.options,
    )  # fmt: skip
    return out

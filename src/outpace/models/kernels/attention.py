"""Attention of a few new tokens over a ragged static KV cache, as one kernel.

The kernel takes the output of the query, key and value product. It normalizes and rotates queries and keys,
writes keys and values into the cache, and computes the softmax.

A block handles the queries of all heads that share a key head in a row, and a range of the row's earlier
tokens. The block of the first range also handles the new tokens. It takes them from the product and writes
them into the cache, so that no block waits for another. A row that is long enough is cut into ranges of equal
length, as many as keep the GPU busy. The last block to finish combines their outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.models.kernels.launch import ALIGNED, Device, device

MIN_RANGE = 256  # least earlier tokens of a block; twice as many from FEW_HEADS key heads on
FEW_HEADS = 16
MAX_RANGE = 2048  # most earlier tokens of a block, even if the GPU is busy with fewer blocks
BLOCKS = 1  # blocks per processor that the number of ranges aims at
BLOCK = 64  # earlier tokens loaded at once; with more queries, twice as many, or half as many with fewer
# warps if there are many blocks
FEW_BLOCKS = 160  # with fewer blocks, each of several ranges has twice the warps, and tokens are prefetched
FEW_QUERIES = 2
STAGES = 3
COMBINE_UNROLL = 4  # ranges loaded at once when their outputs are combined
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
    """Return cosines and sines of positions ``[n]``, ``[n, HALF]`` each."""
    h = tl.arange(0, HALF)[None, :]
    mask = valid[:, None] & (h < D // 2)
    at = position[:, None] * cos_stride + h
    return tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)


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
def prefetch(table, first, stop, D: tl.constexpr, TOKENS: tl.constexpr):
    """Prefetch up to TOKENS tokens of a table ``[T, D]`` into L2, from ``first`` on and before ``stop``."""
    t = first + tl.arange(0, TOKENS)
    size = tl.where(t < stop, D * (table.dtype.element_ty.primitive_bitwidth // 8), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; mov.u32 $0, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=r,l,r",
        [(table + t * D).to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def update_softmax(
    qa, qb, ka, kb, v, visible, scale, running_max, running_total, running_sum, PRECISION: tl.constexpr
):
    """Update the running maximum, total and weighted sum of a softmax with more keys and values."""
    score = tl.dot(qa, tl.trans(ka), input_precision=PRECISION)
    score = tl.dot(qb, tl.trans(kb), score, input_precision=PRECISION) * scale
    score = tl.where(visible, score, -float("inf"))
    new_max = tl.maximum(running_max, tl.max(score, axis=1))
    safe = tl.where(new_max == -float("inf"), 0.0, new_max)
    weight = tl.exp(score - safe[:, None])
    decay = tl.exp(running_max - safe)
    running_total = running_total * decay + tl.sum(weight, axis=1)
    running_sum = tl.dot(weight.to(v.dtype), v, running_sum * decay[:, None], input_precision=PRECISION)
    return new_max, running_total, running_sum


@triton.jit(do_not_specialize=["ranges", "min_range", "positions_stride"])
def attend(
    qkv, positions, cos, sin, q_norm, k_norm, keys, values, out, parts, counters, eps, scale, window,
    n, heads, kv_heads, ranges, min_range, positions_stride, qkv_stride, cache_row, cache_head, out_stride,
    cos_stride,
    D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr,
    BLOCK: tl.constexpr, COMBINE_UNROLL: tl.constexpr, SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Compute one block of (row, key head, range).

    HALF and WIDTH are powers of two that hold D / 2 and D.

    Positions, angles and earlier tokens are older than the previous kernel. So a block loads them, or
    prefetches PREFETCH of them, before that kernel ends.
    """
    pid = tl.program_id(0)
    r = pid % ranges
    head = pid // ranges % kv_heads
    b = (pid // ranges // kv_heads).to(tl.int64)
    groups = heads // kv_heads
    start = tl.load(positions + b * positions_stride).to(tl.int32)  # earlier tokens of the row
    begin = tl.where(window > 0, tl.maximum(0, (start + 1 - window) // BLOCK * BLOCK), 0)
    span = tl.maximum(min_range, tl.cdiv(tl.cdiv(start - begin, ranges), BLOCK) * BLOCK)
    num_ranges = tl.maximum(1, tl.cdiv(start - begin, span))  # ranges that hold any of them
    if r >= num_ranges:
        return
    half = D // 2
    h, d = tl.arange(0, HALF), tl.arange(0, WIDTH)
    in_half, in_d = (h < half)[None, :], (d < D)[None, :]
    dtype = out.dtype.element_ty
    key_table = keys + b * cache_row + head * cache_head
    value_table = values + b * cache_row + head * cache_head

    # Earlier tokens of this range
    first = begin + r * span
    stop = tl.minimum(start, first + span)
    row, j = tl.arange(0, ROWS), tl.arange(0, NEW)
    i = row % n
    valid, new = row < groups * n, j < n
    position = tl.load(positions + b * positions_stride + i, mask=valid, other=0).to(tl.int32)
    new_position = tl.load(positions + b * positions_stride + j, mask=new, other=0).to(tl.int32)
    cosine, sine = angles_of(position, valid, cos, sin, cos_stride, D, HALF)
    new_cosine, new_sine = angles_of(new_position, new, cos, sin, cos_stride, D, HALF)
    if OVERLAPS:
        if PREFETCH > 0:
            prefetch(key_table, first, stop, D, PREFETCH)
            prefetch(value_table, first, stop, D, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()

    # Queries of all heads of the group, `[groups·n, d]`
    at = qkv + (b * n + i) * qkv_stride + (head * groups + row // n) * D
    qa, qb = vectors(at, valid, q_norm, cosine, sine, eps, D, HALF, SHIFTED)
    running_max = tl.full([ROWS], -float("inf"), tl.float32)
    running_total = tl.zeros([ROWS], tl.float32)
    running_sum = tl.zeros([ROWS, WIDTH], tl.float32)

    # New tokens
    if r == 0:
        source = qkv + (b * n + j) * qkv_stride + (heads + head) * D
        new_v = tl.load(source[:, None] + kv_heads * D + d[None, :], mask=new[:, None] & in_d, other=0.0)
        new_ka, new_kb = vectors(source, new, k_norm, new_cosine, new_sine, eps, D, HALF, SHIFTED)
        in_table = key_table + new_position[:, None] * D + h[None, :]
        tl.store(in_table, new_ka, mask=new[:, None] & in_half)
        tl.store(in_table + half, new_kb, mask=new[:, None] & in_half)
        tl.store(value_table + new_position[:, None] * D + d[None, :], new_v, mask=new[:, None] & in_d)
        visible = new[None, :] & valid[:, None] & (j[None, :] <= i[:, None])
        if window > 0:
            visible &= new_position[None, :] > position[:, None] - window
        running_max, running_total, running_sum = update_softmax(
            qa, qb, new_ka, new_kb, new_v, visible, scale, running_max, running_total, running_sum, PRECISION
        )

    for left in range(first, stop, BLOCK):
        t = left + tl.arange(0, BLOCK)
        old = (t < stop)[:, None]
        line = key_table + t[:, None] * D + h[None, :]
        ka = tl.load(line, mask=old & in_half, other=0.0)
        kb = tl.load(line + half, mask=old & in_half, other=0.0)
        v = tl.load(value_table + t[:, None] * D + d[None, :], mask=old & in_d, other=0.0)
        seen = (t < stop)[None, :] & valid[:, None]
        if window > 0:
            seen &= t[None, :] > position[:, None] - window
        running_max, running_total, running_sum = update_softmax(
            qa, qb, ka, kb, v, seen, scale, running_max, running_total, running_sum, PRECISION
        )

    destination = (
        out + (b * n + i)[:, None] * out_stride + ((head * groups + row // n) * D)[:, None] + d[None, :]
    )
    out_mask = valid[:, None] & in_d
    if num_ranges == 1:
        tl.store(destination, (running_sum / running_total[:, None]).to(dtype), mask=out_mask)
    else:
        # Each range stores maximum, total and weighted sum; the last one to finish combines them.
        group = (pid // ranges).to(tl.int64)
        cell = ROWS * (WIDTH + 2)
        this_part = parts + (group * ranges + r) * cell
        tl.store(this_part + row, running_max)
        tl.store(this_part + ROWS + row, running_total)
        tl.store(this_part + 2 * ROWS + row[:, None] * WIDTH + d[None, :], running_sum, mask=out_mask)
        tl.debug_barrier()
        finished = tl.atomic_add(counters + group, 1, sem="acq_rel")
        if finished == num_ranges - 1:
            tl.store(counters + group, 0)  # for the next launch
            running_max = tl.full([ROWS], -float("inf"), tl.float32)
            running_total = tl.zeros([ROWS], tl.float32)
            running_sum = tl.zeros([ROWS, WIDTH], tl.float32)
            for other in tl.range(0, num_ranges, loop_unroll_factor=COMBINE_UNROLL):
                part = parts + (group * ranges + other) * cell
                part_max = tl.load(part + row, cache_modifier=".cg")
                part_total = tl.load(part + ROWS + row, cache_modifier=".cg")
                part_sum = tl.load(
                    part + 2 * ROWS + row[:, None] * WIDTH + d[None, :],
                    mask=out_mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
                new_max = tl.maximum(running_max, part_max)
                safe = tl.where(new_max == -float("inf"), 0.0, new_max)
                decay, factor = tl.exp(running_max - safe), tl.exp(part_max - safe)
                running_max = new_max
                running_total = running_total * decay + part_total * factor
                running_sum = running_sum * decay[:, None] + part_sum * factor[:, None]
            tl.store(destination, (running_sum / running_total[:, None]).to(dtype), mask=out_mask)


def few_queries(
    qkv: Tensor,
    positions: Tensor,
    angles: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    norms: tuple[Tensor, Tensor, float, bool] | None = None,
) -> Tensor:
    """Attend from new tokens over the KV cache, and write their keys and values into it.

    Args:
        qkv: Queries, keys and values of the new tokens, ``[B, n, (heads + 2·kv_heads)·d]``.
        positions: Positions ``[B, n]``, consecutive in each row.
        angles: Cosines and sines of every position, ``[T, d]`` each.
        keys: Cached keys ``[B, kv_heads, T, d]``.
        values: Cached values ``[B, kv_heads, T, d]``.
        counters: int32, at least B·kv_heads zeros. They are zeros again when all is done.
        heads: Number of query heads.
        scale: Factor of the attention scores.
        window: How far back the layer looks; None for no limit.
        norms: Norms of queries and keys: weights of each, eps, and whether weights are relative to 1.

    Returns:
        The attention output ``[B, n, heads·d]``.
    """
    B, n, _ = qkv.shape
    kv_heads, T, D = keys.shape[1:]
    groups = heads // kv_heads
    here = device(qkv.device)
    min_range = MIN_RANGE if kv_heads < FEW_HEADS else 2 * MIN_RANGE
    busy = max(BLOCKS * here.processors // (B * kv_heads), triton.cdiv(T, MAX_RANGE))
    ranges = min(triton.cdiv(T if window is None else min(T, window + BLOCK), min_range), busy)
    ROWS = max(16, triton.next_power_of_2(groups * n))
    WIDTH = max(16, triton.next_power_of_2(D))
    HALF = max(16, triton.next_power_of_2(D // 2))
    out = torch.empty(B, n, heads * D, dtype=qkv.dtype, device=qkv.device)
    size = B * kv_heads * ranges * ROWS * (WIDTH + 2) if ranges > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=qkv.device)
    q_norm, k_norm, eps, shifted = norms or (None, None, 0.0, False)
    blocks = B * kv_heads * ranges
    grid: Any = (blocks,)
    few_blocks = blocks < FEW_BLOCKS
    block, warps = shape_of(n, few_blocks, ranges)
    block, stages = fitting(block, ROWS, WIDTH * qkv.element_size(), here)
    aligned = D * keys.element_size() % ALIGNED == 0 and keys.data_ptr() % ALIGNED == 0
    attend[grid](
        qkv, positions, *angles, q_norm, k_norm, keys, values, out, parts, counters,
        eps, scale, window or 0, n, heads, kv_heads, ranges, min_range, positions.stride(0), qkv.stride(1),
        keys.stride(0), keys.stride(1), out.stride(1), angles[0].stride(0),
        D, HALF, WIDTH, ROWS, max(16, triton.next_power_of_2(n)), block, COMBINE_UNROLL, shifted,
        "ieee" if qkv.dtype == torch.float32 else "tf32", here.overlaps,
        PREFETCH if few_blocks and aligned else 0,
        num_warps=warps, num_stages=stages, **here.options,
    )  # fmt: skip
    return out


def shape_of(n: int, few_blocks: bool, ranges: int) -> tuple[int, int]:
    """Return the number of tokens loaded at once, and of warps, that were fastest on an H200."""
    if n > FEW_QUERIES and not few_blocks:
        return max(16, BLOCK // 2), 2
    return 2 * BLOCK if n > FEW_QUERIES else BLOCK, 8 if few_blocks and ranges > 1 else 4


def fitting(block: int, rows: int, line: int, here: Device) -> tuple[int, int]:
    """Return the number of tokens loaded at once, and of stages, that fit a device's shared memory.

    Args:
        block: Preferred number of tokens loaded at once.
        rows: Queries of a block.
        line: Bytes of a token.
        here: The device.
    """
    stages = STAGES
    while shared(block, rows, line, stages) > here.shared and block > 16:
        block, stages = (block, stages - 1) if stages > 2 else (block // 2, stages)
    return block, stages


def shared(block: int, rows: int, line: int, stages: int) -> int:
    """Return the most bytes of shared memory that a block takes.

    It holds keys and values of all stages but one, queries, and scores between the two products.
    """
    return 2 * block * line * (stages - 1) + 2 * rows * line + 4 * rows * block

"""Attention of many new tokens over a paged KV cache, as two kernels.

The first kernel normalizes and rotates keys, and writes keys and values into the cache. The second one reads
all keys and values from there. A block of it handles a tile of queries of one head in one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.models.kernels.attention import (
    LOG2_E,
    address_of,
    angles_of,
    new_keys,
    over_cache,
    pointer_to,
    quotient,
    vectors,
)
from outpace.models.kernels.launch import device
from outpace.models.kernels.ranges import fitting
from outpace.verification.kernels.ahead import launch

QUERIES = 64  # most queries of a block; half as many in float32
QUERY_BYTES = 16384  # most bytes of a block's queries, if there are more than 16
BLOCK = 64  # cached tokens loaded at once; half as many in float32
NEW = 16  # tokens that a block writes into the cache
WIDE = 128  # with larger heads, or in float32, a block has twice the warps


@triton.jit(do_not_specialize=["positions", "table", "n", "tokens", "positions_stride", "table_stride"])
def store(
    qkv, positions, cos, sin, k_norm, table, eps, n, tokens, heads, kv_heads, layer_start, positions_stride,
    qkv_stride, table_stride, cos_stride,
    D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, NEW: tl.constexpr, PAGE: tl.constexpr,
    SHIFTED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write keys and values of NEW of all rows' tokens, for one key head."""
    head = tl.program_id(0) % kv_heads
    at = tl.program_id(0) // kv_heads * NEW + tl.arange(0, NEW)
    b = (at // n).to(tl.int64)
    position = tl.load(positions + b * positions_stride + at % n, mask=at < tokens, other=-1).to(tl.int32)
    valid = position >= 0
    address = address_of(table + b * table_stride, position, valid, PAGE)
    cosine, sine = angles_of(position, valid, cos, sin, cos_stride, D, HALF)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    line = pointer_to(address, qkv.dtype.element_ty) + (layer_start + head * PAGE * D + position % PAGE * D)
    new_keys(
        qkv + at.to(tl.int64) * qkv_stride + (heads + head) * D, valid, k_norm, cosine, sine, eps, kv_heads,
        line[:, None], D, HALF, WIDTH, PAGE, SHIFTED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["positions", "table", "n", "positions_stride", "table_stride"])
def attend_many(
    qkv, positions, cos, sin, q_norm, table, out, eps, scale, window, n, heads, kv_heads, layer_start,
    positions_stride, qkv_stride, table_stride, out_stride, cos_stride,
    D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute one block of (row, head, tile of ROWS queries).

    The queries are older than the previous kernel, ``store``. So a block loads them before that kernel ends.
    """
    head = tl.program_id(0) % heads
    b = (tl.program_id(0) // heads).to(tl.int64)
    # The last tiles see the most tokens. They come first, so that the shorter ones fill the gaps at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    i, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    position = tl.load(positions + b * positions_stride + i, mask=i < n, other=-1).to(tl.int32)
    valid = position >= 0
    cosine, sine = angles_of(position, valid, cos, sin, cos_stride, D, HALF)
    at = qkv + (b * n + i) * qkv_stride + head * D
    qa, qb = vectors(at, valid, q_norm, cosine, sine, eps, D, HALF, SHIFTED)
    running_max = tl.full([ROWS], -float("inf"), tl.float32)
    running_total = tl.zeros([ROWS], tl.float32)
    running_sum = tl.zeros([ROWS, WIDTH], tl.float32)

    # All queries see the tokens before `middle`, and none sees one from `stop` on.
    start = tl.load(positions + b * positions_stride + tile * ROWS).to(tl.int32)
    begin = tl.where(window > 0, tl.maximum(0, (start + 1 - window) // BLOCK * BLOCK), 0)
    middle = tl.where(window > 0, begin, (start + 1) // BLOCK * BLOCK)
    stop = tl.max(position, axis=0) + 1
    pages = table + b * table_stride
    head_start = layer_start + kv_head * PAGE * D
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    running_max, running_total, running_sum = over_cache(
        qa, qb, pages, begin, middle, position, position, window, scale, kv_heads, head_start, None, 0, 0, 0,
        running_max, running_total, running_sum, D, BLOCK, PAGE, False, False, PRECISION,
    )  # fmt: skip
    running_max, running_total, running_sum = over_cache(
        qa, qb, pages, middle, stop, position, position, window, scale, kv_heads, head_start, None, 0, 0, 0,
        running_max, running_total, running_sum, D, BLOCK, PAGE, True, False, PRECISION,
    )  # fmt: skip
    result = tl.where(valid[:, None], quotient(running_total, running_sum), 0.0)
    destination = out + (b * n + i)[:, None] * out_stride + head * D + d[None, :]
    tl.store(destination, result.to(out.dtype.element_ty), mask=(i < n)[:, None] & (d < D)[None, :])


def write(kv: Tensor, positions: Tensor, table: Tensor, *, layer: int, page: int, heads: int) -> None:
    """Write keys and values into the KV cache, as they are.

    Args:
        kv: Keys and then values, ``[B, n, 2·heads·d]``.
        positions: Positions ``[B, n]``. Nothing is written for -1.
        table: Address of each page of each row; see ``many_queries``.
        layer: Index of the layer in each page.
        page: Tokens of a page, a power of two from 16 on.
        heads: Number of key heads.
    """
    B, n, _ = kv.shape
    D, here = kv.shape[-1] // (2 * heads), device(kv.device)
    launch(
        store, (triton.cdiv(B * n, NEW) * heads,),
        kv, positions, None, None, None, table, 0.0, n, B * n, 0, heads, layer * 2 * heads * page * D,
        positions.stride(0), kv.stride(1), table.stride(0), 0,
        D, max(16, triton.next_power_of_2(D // 2)), max(16, triton.next_power_of_2(D)), NEW, page, False,
        here.overlaps, **here.options,
    )  # fmt: skip


def many_queries(
    qkv: Tensor,
    positions: Tensor,
    angles: tuple[Tensor, Tensor],
    table: Tensor,
    *,
    layer: int,
    page: int,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    norms: tuple[Tensor, Tensor, float, bool] | None = None,
) -> Tensor:
    """Write keys and values of new tokens into the KV cache, and attend from the tokens over it.

    Args:
        qkv: Queries, keys and values of the new tokens, ``[B, n, (heads + 2·kv_heads)·d]``.
        positions: Positions ``[B, n]``, consecutive in each row. Padding at the end of a row has positions
            -1: nothing of it is written, and its output is zeros.
        angles: Cosines and sines of every position, ``[tokens, d]`` each.
        table: Address of each page of each row, int64, at least B rows. Pages are aligned to 16 bytes.
            Entries of pages that a row has no tokens in are not used.
        layer: Index of the layer in each page.
        page: Tokens of a page, a power of two from 16 on.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        scale: Factor of the attention scores.
        window: How far back the layer looks; None for no limit.
        norms: Norms of queries and keys: weights of each, eps, and whether weights are relative to 1.

    Returns:
        The attention output ``[B, n, heads·d]``.
    """
    B, n, _ = qkv.shape
    D = qkv.shape[-1] // (heads + 2 * kv_heads)
    here = device(qkv.device)
    WIDTH = max(16, triton.next_power_of_2(D))
    HALF = max(16, triton.next_power_of_2(D // 2))
    line = WIDTH * qkv.element_size()
    exact = qkv.dtype == torch.float32  # such products take more registers, so tiles are smaller
    queries, block = (QUERIES // 2, max(16, BLOCK // 2)) if exact else (QUERIES, BLOCK)
    ROWS = max(16, min(queries, QUERY_BYTES // line))
    block, stages = fitting(min(block, page), ROWS, line, here)
    assert page % block == 0, f"page: got {page}; it must be a multiple of {block}"
    out = torch.empty(B, n, heads * D, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps, shifted = norms or (None, None, 0.0, False)
    layer_start = layer * 2 * kv_heads * page * D
    launch(
        store, (triton.cdiv(B * n, NEW) * kv_heads,),
        qkv, positions, *angles, k_norm, table, eps, n, B * n, heads, kv_heads, layer_start,
        positions.stride(0), qkv.stride(1), table.stride(0), angles[0].stride(0),
        D, HALF, WIDTH, NEW, page, shifted, here.overlaps, **here.options,
    )  # fmt: skip
    launch(
        attend_many, (B * heads, triton.cdiv(n, ROWS)),
        qkv, positions, *angles, q_norm, table, out, eps, scale * LOG2_E, window or 0, n, heads, kv_heads,
        layer_start, positions.stride(0), qkv.stride(1), table.stride(0), out.stride(1), angles[0].stride(0),
        D, HALF, WIDTH, ROWS, block, page, shifted, "ieee" if exact else "tf32", here.overlaps,
        num_warps=8 if exact or WIDTH > WIDE else 4, num_stages=stages, **here.options,
    )  # fmt: skip
    return out

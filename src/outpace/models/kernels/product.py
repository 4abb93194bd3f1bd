"""Products of few rows with a large weight, fused with the operations around them in a layer.

Such a product costs as much as reading the weight. So everything else done to its few rows should cost
nothing. That is bias, activation and residual after it. If the activation is the gate of a feed-forward
layer, one block computes both halves together.

A norm stands between two products. The product before it scales its own columns by the norm's weights and
stores their sum of squares. The product after it divides by the root of all such sums. For a layer norm, the
product before it also stores the sum of each row. The product after it subtracts mean · ``centers``, where
``centers`` is its weight matrix times the vector of norm weights. The norm's bias, times the weight matrix,
is part of the bias of that product. Precision is lost where the mean of a row is much larger than its
standard deviation. In Whisper tiny and base it is at most 0.45 times it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.models.kernels.launch import ALIGNED, Device, device
from outpace.verification.kernels.ahead import launch

MIN_ROWS, MAX_ROWS = 8, 32  # rows of a block; more are better left to the library
RESIDENT = 2  # blocks per processor that are there before a kernel can begin
NONE, SILU, GELU_TANH, GELU, RELU = 0, 1, 2, 3, 4  # activations; see `rearranged.ACTIVATIONS`


@dataclass(frozen=True)
class Scale:
    """Weights and settings of a norm."""

    weight: Tensor
    eps: float
    shifted: bool  # whether weights are relative to 1
    headroom: float = 1.0  # factor of scaled rows, so that float16 holds them: at most 1 / weight
    centered: bool = False  # whether it is a layer norm


@dataclass(frozen=True)
class Stream:
    """Rows ``[M, K]`` with the partial results of the norm that follows."""

    x: Tensor
    scaled: Tensor  # x times the norm's weights and its `headroom`
    squares: Tensor  # float32 `[M, parts]`; the sum over parts is the sum of squares
    sums: Tensor | None  # the same for the sum, for a layer norm
    norm: Scale


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Apply an activation: silu, gelu by its tanh, gelu, or relu."""
    if KIND == 1:
        return x * tl.sigmoid(x)
    if KIND == 3:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 4:
        return tl.maximum(x, 0.0)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh(y)) = sigmoid(2y)


@triton.jit
def prefetch(weight, first, N, K, BN: tl.constexpr, BYTES: tl.constexpr):
    """Prefetch the first BYTES of rows ``first`` to ``first + BN`` of a weight into L2."""
    LINE: tl.constexpr = 256
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    i = tl.arange(0, BN * (BYTES // LINE))
    row = tl.minimum(first + i % BN, N - 1).to(tl.int64)
    at = i // BN * (LINE // SIZE)
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0; }",
        "=r,l",
        [(weight + row * K + at).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_with_norm(
    value, scale, headroom, out, scaled, squares, sums, part, at, n, column_mask, row_mask,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """Store values ``[n, m]`` at ``out + at``, with partial results for the norm that follows, if any.

    These are scaled values at ``scaled + at``, the sums of squares at ``squares + part``, ``[m]``, and the
    sums at ``sums + part``, if there are any.
    """
    mask = column_mask[:, None] & row_mask[None, :]
    dtype = out.dtype.element_ty
    rounded = value.to(dtype)
    tl.store(out + at, rounded, mask=mask)
    if scale is not None:
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        factor = tl.load(scale + n, mask=column_mask, other=0.0).to(tl.float32)
        if SHIFTED:
            factor += 1.0
        tl.store(scaled + at, (wide * (factor * headroom)[:, None]).to(dtype), mask=mask)
        tl.store(squares + part, tl.sum(wide * wide, axis=0), mask=row_mask)
        if sums is not None:
            tl.store(sums + part, tl.sum(wide, axis=0), mask=row_mask)


@triton.jit(do_not_specialize=["M", "parts", "prefetch_blocks"])
def product(
    x, weight, bias, centers, squares, sums, residual, scale, out, scaled, next_squares, next_sums,
    M, N, K, parts, prefetch_blocks, eps, headroom, next_headroom, x_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of x ``[M, K]`` times weight ``[N, K]`` transposed, per block.

    With GATE, the weight is ``[2N, K]``, and the gate's half, which is activated, comes first.

    If x is to be normalized, ``squares`` is ``[M, parts]``, and PARTS of them are added at once. For a layer
    norm there are ``sums``, too, and ``centers`` is ``[N]``. ``scale`` is that of the norm that follows, if
    any. The first ``prefetch_blocks`` blocks prefetch PREFETCH bytes of each row of the weight before the
    previous kernel has ended. PREFETCH is negative where kernels wait for each other's end.
    """
    block = tl.program_id(0)
    m, n = tl.arange(0, BM), block * BN + tl.arange(0, BN)
    row_mask, column_mask = m < M, n < N
    rows = weight + n.to(tl.int64)[:, None] * K
    if PREFETCH >= 0:
        if PREFETCH > 0:
            if block < prefetch_blocks:
                prefetch(weight, block * BN, N, K, BN, PREFETCH)
                if GATE:
                    prefetch(weight + N.to(tl.int64) * K, block * BN, N, K, BN, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BN, BM], tl.float32)
    other = tl.zeros([BN, BM], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        inside = k < K
        a = tl.load(
            x + m[None, :] * x_stride + k[:, None], mask=row_mask[None, :] & inside[:, None], other=0.0
        )
        mask = column_mask[:, None] & inside[None, :]
        total = tl.dot(tl.load(rows + k[None, :], mask=mask, other=0.0), a, total, input_precision=PRECISION)
        if GATE:
            up = tl.load(rows + N.to(tl.int64) * K + k[None, :], mask=mask, other=0.0)
            other = tl.dot(up, a, other, input_precision=PRECISION)
    if squares is not None:
        all_squares = tl.zeros([BM], tl.float32)
        all_sums = tl.zeros([BM], tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            mask = row_mask[:, None] & (part < parts)[None, :]
            each = tl.load(squares + m[:, None] * parts + part[None, :], mask=mask, other=0.0)
            all_squares += tl.sum(each, axis=1)
            if sums is not None:
                each = tl.load(sums + m[:, None] * parts + part[None, :], mask=mask, other=0.0)
                all_sums += tl.sum(each, axis=1)
        variance = all_squares / K
        if sums is not None:
            mean = all_sums / K
            variance = tl.maximum(variance - mean * mean, 0.0)
            center = tl.load(centers + n, mask=column_mask, other=0.0)
            total -= center[:, None] * (mean * headroom)[None, :]
        factor = (tl.rsqrt(variance + eps) / headroom)[None, :]
        total *= factor
        other *= factor
    if bias is not None:
        total += tl.load(bias + n, mask=column_mask, other=0.0).to(tl.float32)[:, None]
        if GATE:
            other += tl.load(bias + N + n, mask=column_mask, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    if ACTIVATION:
        total = activated(total.to(dtype).to(tl.float32), ACTIVATION)
    if GATE:
        total *= other.to(dtype).to(tl.float32)
    at = m[None, :] * out_stride + n[:, None]
    mask = row_mask[None, :] & column_mask[:, None]
    if residual is not None:
        total = total.to(dtype).to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    part = m * tl.num_programs(0) + block
    store_with_norm(
        total, scale, next_headroom, out, scaled, next_squares, next_sums, part, at, n, column_mask, row_mask,
        SHIFTED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ids", "ids_stride", "tokens_per_row"])
def embed_kernel(
    ids, table, scale, out, scaled, squares, factor, headroom, K, ids_stride, tokens_per_row,
    BK: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Load one token's row of a table, with partial results for the norm that follows."""
    row = tl.program_id(0)
    k, zero = tl.arange(0, BK), tl.arange(0, 1)
    inside = k < K
    token = tl.load(ids + row // tokens_per_row * ids_stride + row % tokens_per_row).to(tl.int64)
    value = tl.load(table + token * K + k, mask=inside, other=0.0).to(tl.float32) * factor
    at = row * K + k[:, None] + zero[None, :]
    store_with_norm(
        value[:, None], scale, headroom, out, scaled, squares, None, row + zero, at, k, inside, zero < 1,
        SHIFTED,
    )  # fmt: skip


def embed(ids: Tensor, table: Tensor, factor: float, norm: Scale) -> Stream:
    """Return the rows of a table ``[V, K]`` for tokens ``[B, n]``, times a factor, as a stream."""
    B, n = ids.shape
    K = table.shape[1]
    stream = _stream(B * n, K, 1, table, norm)
    launch(
        embed_kernel, (B * n,),
        ids, table, norm.weight, stream.x, stream.scaled, stream.squares, factor, norm.headroom, K,
        ids.stride(0), n, triton.next_power_of_2(K), norm.shifted, num_warps=8,
    )  # fmt: skip
    return stream


@overload
def few_rows(
    x: Tensor | Stream, weight: Tensor, bias: Tensor | None = None, *, activation: int = NONE,
    gate: bool = False, centers: Tensor | None = None, residual: Tensor | None = None, norm: None = None,
) -> Tensor: ...  # fmt: skip


@overload
def few_rows(
    x: Tensor | Stream, weight: Tensor, bias: Tensor | None = None, *, activation: int = NONE,
    gate: bool = False, centers: Tensor | None = None, residual: Tensor | None = None, norm: Scale,
) -> Stream: ...  # fmt: skip


def few_rows(
    x: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: int = NONE,
    gate: bool = False,
    centers: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Scale | None = None,
) -> Tensor | Stream:
    """Return x ``[M, K]``, normalized if it is a stream, times weight ``[N, K]`` transposed.

    Args:
        x: At most ``MAX_ROWS`` rows.
        weight: ``[N, K]``; with a gate ``[2N, K]``.
        bias: Added to the product.
        activation: Activation of the product, or of its gate.
        gate: Whether the first half of the weight, after the activation, gates the second.
        centers: Weight times the weights of x's layer norm, float32 ``[N]``.
        residual: ``[M, N]``, added to the result.
        norm: The norm that follows. With it, the result is a stream.
    """
    stream_in = x if isinstance(x, Stream) else None
    rows = x.scaled if isinstance(x, Stream) else x
    M, K = rows.shape
    N = weight.shape[0] // (2 if gate else 1)
    BM = max(MIN_ROWS, triton.next_power_of_2(M))
    here = device(rows.device)
    shape = shape_of(BM, N, rows.dtype, gate)
    BN, BK, warps, stages, prefetch_bytes = fitting(shape, BM, rows.dtype, gate, here)
    blocks = triton.cdiv(N, BN)
    line = K * weight.element_size()
    if line % ALIGNED or line < prefetch_bytes or weight.data_ptr() % ALIGNED:
        prefetch_bytes = 0
    stream_out = None if norm is None else _stream(M, N, blocks, rows, norm)
    out = torch.empty(M, N, dtype=rows.dtype, device=rows.device) if stream_out is None else stream_out.x
    launch(
        product, (blocks,),
        rows, weight, bias, centers, stream_in and stream_in.squares, stream_in and stream_in.sums, residual,
        norm and norm.weight, out, stream_out and stream_out.scaled, stream_out and stream_out.squares,
        stream_out and stream_out.sums, M, N, K,
        stream_in.squares.shape[1] if stream_in else 1, RESIDENT * here.processors,
        stream_in.norm.eps if stream_in else 0.0, stream_in.norm.headroom if stream_in else 1.0,
        norm.headroom if norm else 1.0,
        rows.stride(0), out.stride(0),
        BM, BN, BK, max(16, 2048 // BM), activation, gate, norm is not None and norm.shifted,
        "ieee" if rows.dtype == torch.float32 else "tf32", prefetch_bytes if here.overlaps else -1,
        num_warps=warps, num_stages=stages, **here.options,
    )  # fmt: skip
    return out if stream_out is None else stream_out


def _stream(M: int, K: int, parts: int, like: Tensor, norm: Scale) -> Stream:
    x, scaled = torch.empty(2, M, K, dtype=like.dtype, device=like.device)
    squares, sums = torch.empty(2, M, parts, dtype=torch.float32, device=like.device)
    return Stream(x, scaled, squares, sums if norm.centered else None, norm)


Shape = tuple[int, int, int, int, int]
"""Columns of a block, entries read at once, warps, stages, and bytes of a row to prefetch."""


def fitting(shape: Shape, BM: int, dtype: torch.dtype, gate: bool, here: Device) -> Shape:
    """Return a shape with fewer stages, and then fewer entries, where blocks have less shared memory."""
    BN, BK, warps, stages, prefetch_bytes = shape
    while shared(BM, BN, BK, stages, dtype, gate) > here.shared and BK > 16:
        BK, stages = (BK, stages - 1) if stages > 2 else (BK // 2, stages)
    return BN, BK, warps, stages, prefetch_bytes


def shared(BM: int, BN: int, BK: int, stages: int, dtype: torch.dtype, gate: bool) -> int:
    """Return the most bytes of shared memory that a block takes: all stages of its rows and columns."""
    return (BM + (2 if gate else 1) * BN) * BK * stages * dtype.itemsize


def shape_of(BM: int, N: int, dtype: torch.dtype, gate: bool) -> Shape:
    """Return the shape of blocks for a product of BM rows and N columns.

    The shapes were found by timing whole forward passes of 7B and 1.3B Llama shapes on an H200. Inside a
    layer all blocks should be on the device at once, about as many on each of its 132 processors.
    """
    if dtype == torch.float32:
        return 16, 64, 4, 3, 0
    if BM <= 16:
        if gate:
            return 32, 256, 2, 3, 1024 if N <= 8192 else 512
        if N <= 2112:
            return 16, 512, 2, 4, 1024
        if N <= 4224:
            return 32, 512, 4, 4, 512
        return (64, 128, 4, 6, 512) if 5760 <= N <= 8448 else (32, 256, 2, 4, 512 if N <= 16384 else 0)
    if gate:
        return (64, 128, 4, 4, 0) if N <= 8192 else (128, 128, 8, 3, 512)
    if N <= 4224:
        return 32, 256, 4, 5, 512
    return (64, 128, 4, 6, 0) if N <= 8448 else (64, 128, 4, 4, 512) if N <= 16384 else (64, 128, 4, 4, 0)

"""Products of few rows with a large weight, and what stands around them in a layer, as one kernel.

Such a product costs what reading the weight costs, so whatever else is done to its few rows should cost
nothing: the norm before it (its sum of squares is gathered on the way), bias and residual after it, and the
gate of a feed-forward layer, whose two halves one block computes together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64  # beyond this a product computes more than it reads
NO_NORM, PLAIN, SHIFTED = 0, 1, 2  # SHIFTED: weights are relative to 1
NO_GATE, SILU, GELU = 0, 1, 2  # as `fused.GATES` has them
ROOM = {torch.float16: 2.0**-8}  # what is not normalized yet may be too large for it


@triton.jit
def gated(x, KIND: tl.constexpr):
    """The activation of a gate: silu, or gelu by its tanh."""
    if KIND == 1:
        return x * tl.sigmoid(x)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh(y)) = sigmoid(2y)


@triton.jit
def product(
    x, weight, bias, norm, residual, out, M, N, K, x_line, out_line, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    ROOM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`[M, N]` of x `[M, K]` and weight `[N, K]`, of which one block computes BN columns; `[2N, K]` with a
    gate, whose half comes first."""
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    there, real = m < M, n < N
    total = tl.zeros([BM, BN], tl.float32)
    other = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    rows = weight + n.to(tl.int64)[None, :] * K
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        inside = k < K
        a = tl.load(x + m[:, None] * x_line + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            scale = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
            if NORM == 2:
                scale += 1.0
            a = (wide * (scale * ROOM)[None, :]).to(a.dtype)
        mask = inside[:, None] & real[None, :]
        total = tl.dot(a, tl.load(rows + k[:, None], mask=mask, other=0.0), total, input_precision=PRECISION)
        if GATE:
            up = tl.load(rows + N.to(tl.int64) * K + k[:, None], mask=mask, other=0.0)
            other = tl.dot(a, up, other, input_precision=PRECISION)
    if NORM:
        factor = tl.rsqrt(squares / K + eps)[:, None] / ROOM
        total *= factor
        other *= factor
    if bias is not None:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[None, :]
        if GATE:
            other += tl.load(bias + N + n, mask=real, other=0.0).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    if GATE:
        total = gated(total.to(kind).to(tl.float32), GATE) * other.to(kind).to(tl.float32)
    mask = there[:, None] & real[None, :]
    if residual is not None:
        before = tl.load(residual + m[:, None] * out_line + n[None, :], mask=mask, other=0.0)
        total = total.to(kind).to(tl.float32) + before.to(tl.float32)
    tl.store(out + m[:, None] * out_line + n[None, :], total.to(kind), mask=mask)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float, bool] | None = None,
    gate: int = NO_GATE,
    residual: Tensor | None = None,
) -> Tensor:
    """x `[M, K]` times weight `[N, K]` transposed, M up to MOST_ROWS.

    norm      weight, eps, and whether its weights are relative to 1: x is normalized first
    gate      NO_GATE, SILU or GELU: weight is `[2N, K]`, and its first half gates the second
    residual  `[M, N]`, added
    """
    M, K = x.shape
    N = weight.shape[0] // (2 if gate else 1)
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    kind = NO_NORM if norm is None else SHIFTED if norm[2] else PLAIN
    BM = max(16, triton.next_power_of_2(M))
    BN, BK, warps, stages = shape_of(N, x.dtype)
    grid: Any = (triton.cdiv(N, BN),)
    product[grid](
        x, weight, bias, None if norm is None else norm[0], residual, out, M, N, K, x.stride(0),
        out.stride(0), 0.0 if norm is None else norm[1],
        BM, BN, BK, kind, gate, ROOM.get(x.dtype, 1.0), "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def shape_of(N: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Columns of a block, entries read at once, warps and stages: enough blocks to use the whole device."""
    if dtype == torch.float32:
        return 16, 64, 4, 3
    return (16, 256, 4, 4) if N <= 8192 else (32, 128, 4, 5)

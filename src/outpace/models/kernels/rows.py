"""Kernels between the library's products of many rows: a sum with its norm, and a gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.models.kernels.product import Scale, gated

BLOCK = 1024


@triton.jit
def summed(
    x, more, weight, total, out, K, eps, x_line, more_line, BK: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """Add to x in one row, and normalize the sum."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    inside = k < K
    value = tl.load(x + row * x_line + k, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if more is not None:
        value += tl.load(more + row * more_line + k, mask=inside, other=0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
        tl.store(total + row * K + k, value.to(kind), mask=inside)
    normal = value * tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    scale = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        normal *= 1.0 + scale
    else:
        normal = normal.to(kind).to(tl.float32) * scale
    tl.store(out + row * K + k, normal.to(kind), mask=inside)


@triton.jit
def gates(x, out, N, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Gate a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    half = tl.load(x + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * N + n, (gated(half, KIND).to(kind).to(tl.float32) * up).to(kind), mask=inside)


def added(x: Tensor, more: Tensor | None, norm: Scale) -> tuple[Tensor, Tensor]:
    """Return x ``[M, K]`` plus ``more``, and the same normalized."""
    M, K = x.shape
    out = torch.empty(M, K, dtype=x.dtype, device=x.device)
    total = x if more is None else torch.empty_like(out)
    summed[(M,)](
        x, more, norm.weight, total, out, K, norm.eps, x.stride(0), 0 if more is None else more.stride(0),
        triton.next_power_of_2(K), norm.shifted, num_warps=8,
    )  # fmt: skip
    return total, out


def gate(x: Tensor, kind: int) -> Tensor:
    """Return the second half of x ``[M, 2N]``, gated by the first."""
    M, N = x.shape[0], x.shape[1] // 2
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    gates[(M, triton.cdiv(N, BLOCK))](x, out, N, kind, BLOCK)
    return out

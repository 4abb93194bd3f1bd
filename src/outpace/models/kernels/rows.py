"""Kernels between the library's products of many rows: a sum with its norm, and a gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.models.kernels.product import Scale, gated
from outpace.verification.kernels.ahead import launch

BLOCK = 1024


@triton.jit
def add_norm_kernel(
    x, addend, weight, total, out, K, eps, x_stride, addend_stride, BK: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """Add to x in one row, and normalize the sum."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    inside = k < K
    value = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    value += tl.load(addend + row * addend_stride + k, mask=inside, other=0.0).to(tl.float32)
    value = value.to(dtype).to(tl.float32)
    tl.store(total + row * K + k, value.to(dtype), mask=inside)
    normal = value * tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    scale = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        normal *= 1.0 + scale
    else:
        normal = normal.to(dtype).to(tl.float32) * scale
    tl.store(out + row * K + k, normal.to(dtype), mask=inside)


@triton.jit
def gate_kernel(x, out, N, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Gate a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    half = tl.load(x + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + row * N + n, (gated(half, KIND).to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def add_norm(x: Tensor, addend: Tensor, norm: Scale) -> tuple[Tensor, Tensor]:
    """Return x ``[M, K]`` plus ``addend``, and the same normalized."""
    M, K = x.shape
    out = torch.empty(M, K, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    launch(
        add_norm_kernel, (M,),
        x, addend, norm.weight, total, out, K, norm.eps, x.stride(0), addend.stride(0),
        triton.next_power_of_2(K), norm.shifted, num_warps=8,
    )  # fmt: skip
    return total, out


def gate(x: Tensor, activation: int) -> Tensor:
    """Return the second half of x ``[M, 2N]``, gated by the first."""
    M, N = x.shape[0], x.shape[1] // 2
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    launch(gate_kernel, (M, triton.cdiv(N, BLOCK)), x, out, N, activation, BLOCK)
    return out

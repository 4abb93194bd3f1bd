"""Kernels between products: norms, a sum with its norm, and a gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.models.kernels.launch import device
from outpace.models.kernels.product import Scale, activated
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
    tl.store(out + row * N + n, (activated(half, KIND).to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


@triton.jit
def norm_kernel(
    x, weight, bias, out, K, eps, x_stride, BK: tl.constexpr, CENTERED: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """Normalize one row; with CENTERED, around its mean."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    inside = k < K
    scale = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if CENTERED:
        value = tl.where(inside, value - tl.sum(value, axis=0) / K, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    if not CENTERED:
        value = value.to(dtype).to(tl.float32)
    value *= scale
    if bias is not None:
        value += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, value.to(dtype), mask=inside)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """Return x ``[M, K]`` after a layer norm (``centered``) or a root-mean-square norm."""
    M, K = x.shape
    out = torch.empty(M, K, dtype=x.dtype, device=x.device)
    here = device(x.device)
    launch(
        norm_kernel, (M,),
        x, weight, bias, out, K, eps, x.stride(0), triton.next_power_of_2(K), centered, here.overlaps,
        num_warps=4, **here.options,
    )  # fmt: skip
    return out


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

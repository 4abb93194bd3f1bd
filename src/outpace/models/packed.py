"""Weights packed once for products with few rows, on a CPU.

A forward pass over a few tokens reads every weight once. It should cost little more than a forward pass over
one token. PyTorch's matrix product packs the weights again at every call, which costs as much as the product
itself. oneDNN, which comes with PyTorch, also accepts weights that are packed already. The packed
weights are a second copy, so packing trades memory for time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear, pad

MAX_ROWS = 256  # beyond this a product computes more than it reads, and packing does not matter
X86 = platform.machine() in ("x86_64", "AMD64")
LARGE = 2**19  # entries from which packing a float32 weight pays on x86


def packed_forwards(model: torch.nn.Module) -> dict[torch.nn.Module, Callable[[Tensor], Tensor]]:
    """Return a forward with packed weights for each linear layer of a model that gains by it."""
    return {layer: _forward(layer) for layer in layers(model)}


def layers(model: torch.nn.Module) -> list[Linear]:
    """Return the layers that gain by packing: unmodified linear layers on the CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return []
    # PEFT merges adapters into these layers, and neither the address nor the version of a weight changes.
    adapted = {id(getattr(module, "base_layer", None)) for module in model.modules()}
    return [
        layer
        for layer in model.modules()
        if type(layer) is Linear
        and id(layer) not in adapted
        and "forward" not in layer.__dict__  # replaced by another library
        and type(layer.weight.data) is Tensor
        and layer.weight.device.type == "cpu"
        and _gains(layer.weight)
    ]


def _gains(weight: Tensor) -> bool:
    """Return whether packing a weight pays.

    It pays in bfloat16 where oneDNN supports it. In float32 it pays, too. On x86, where MKL packs fast, it
    pays only for large float32 weights.
    """
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    out, inner = weight.shape
    large = out * inner >= (LARGE if out >= inner else 8 * LARGE)
    return weight.dtype == torch.float32 and (not X86 or large)


def packed_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that the packed weights of a model take."""
    return sum(layer.weight.nbytes for layer in layers(model))


def _forward(layer: Linear) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight, layer.bias
    product: Any = torch.ops.mkldnn._linear_pointwise.default
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    # In float32 BLAS is better for a single row, a matrix-vector product, and MKL for up to three rows.
    min_rows = 1 if weight.dtype == torch.bfloat16 else 4 if X86 else 2

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > MAX_ROWS or rows < min_rows:
            return linear(x, weight, bias)
        if rows == 1:  # bfloat16: two rows are faster than one
            out: Tensor = product(pad(x.reshape(1, -1), (0, 0, 0, 1)), laid_out, bias, "none", [], "")
            return out[:1].reshape(*x.shape[:-1], -1)
        return cast(Tensor, product(x, laid_out, bias, "none", [], ""))

    return forward

"""Decoder stacks of encoder-decoder models with their weights rearranged once, over paged KV caches.

Queries, keys and values of self-attention become one linear layer, and so do keys and values of
cross-attention. One forward pass serves all families. Over few tokens on a GPU it is eight kernels per layer,
or eleven for BART and Marian (``kernels``). On a CPU it is PyTorch's operations.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from outpace.models.causal import mask_of
from outpace.models.paged import Pages, Shape
from outpace.models.rearranged import (
    MAX_HEAD_BYTES,
    MAX_QUERY_BYTES,
    Product,
    Rearranged,
    has_kernels,
    headroom_of,
    kind_of,
    why_not_rearranged,
)
from outpace.models.stack import FAMILIES, Stack, bias_of
from outpace.models.stack import Layer as StackLayer

PROMPT = 32  # tokens of a short prompt, padding included; see `launch_once`


@dataclass(frozen=True)
class SourcePages(Pages):
    """Rows of the block table of self-attention, and of that of the sources.

    Attributes:
        source: Rows of the table of the sources' blocks.
        lengths: Number of tokens of each source ``[B]``.
    """

    source: Pages
    lengths: Tensor


@dataclass(frozen=True)
class Norm:
    """Layer norm (``centered``), or root-mean-square norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool

    @cached_property
    def scale(self) -> Any:
        """The norm as a ``Scale`` of the kernels."""
        module = importlib.import_module("outpace.models.kernels.product")
        headroom = headroom_of(self.weight)
        return module.Scale(self.weight, self.eps, False, headroom, self.centered)

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Return the norm of a Transformers module."""
        bias = getattr(module, "bias", None)
        eps = getattr(module, "variance_epsilon", None)
        return cls(
            module.weight.detach(),
            None if bias is None else bias.detach(),
            float(module.eps if eps is None else eps),
            isinstance(module, nn.LayerNorm),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize ``x`` over its last dimension."""
        if self.centered:
            return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Folded:
    """Terms of a product that follows a layer norm, if the product gets rows that are only scaled.

    Attributes:
        centers: Weight of the product times weights of the norm, float32 ``[N]``.
        bias: Weight of the product times bias of the norm, plus the product's bias, float32 ``[N]``.
    """

    centers: Tensor
    bias: Tensor

    @classmethod
    def of(cls, norm: Norm, product: Product) -> Folded:
        """Fold a norm into the product after it."""
        vectors = torch.zeros(2, len(product.weight), device=product.weight.device)
        folded = cls(*vectors)
        folded.refresh(norm, product)
        return folded

    def refresh(self, norm: Norm, product: Product) -> None:
        """Compute both anew, in place, after weights have changed."""
        wide = product.weight.float()
        self.centers.copy_(wide @ norm.weight.float())
        self.bias.fill_(0.0) if norm.bias is None else self.bias.copy_(wide @ norm.bias.float())
        if product.bias is not None:
            self.bias.add_(product.bias.float())


@dataclass(frozen=True)
class Layer:
    """A decoder block, with combined linear layers."""

    norm: Norm
    qkv: Product
    out: Product
    cross_norm: Norm
    cross_q: Product
    cross_kv: Product
    cross_out: Product
    mlp_norm: Norm
    inner: Product
    outer: Product
    qkv_fold: Folded | None = None  # of the norm before each product
    cross_fold: Folded | None = None
    inner_fold: Folded | None = None

    def folds(self) -> list[tuple[Norm, Product, Folded | None]]:
        """Return the norms, the products after them, and how they are folded."""
        return [
            (self.norm, self.qkv, self.qkv_fold),
            (self.cross_norm, self.cross_q, self.cross_fold),
            (self.mlp_norm, self.inner, self.inner_fold),
        ]

    def folded(self) -> Layer:
        """Return the layer with its norms folded into the products after them."""
        qkv, cross, inner = (Folded.of(norm, product) for norm, product, _ in self.folds())
        return replace(self, qkv_fold=qkv, cross_fold=cross, inner_fold=inner)


Attend = Callable[[int, Tensor], Tensor]
"""Attention of a layer: takes its number and the output of a product ``[B·n, ...]``."""


class FusedStack(Rearranged):
    """The decoder of an encoder-decoder model, with combined weights.

    Raises:
        ValueError: The model cannot be converted. ``why_not`` returns the reason.
    """

    def __init__(self, model: Any) -> None:
        if (why := why_not(model)) is not None:
            raise ValueError(f"model: {type(model).__name__} {why}")
        super().__init__(model)
        stack = Stack(model)
        first = stack.layers[0]
        self.vocab_size, self.tokens = stack.head.weight.shape[0], stack.context + 1
        self.heads, self.head_dim = first.self_attention.heads, first.self_attention.d
        self.scale, self.cross_scale = first.self_attention.scale, first.cross.scale
        self._norm_first, self._gated = first.norm_first, len(first.dense.inner) == 2
        self._activation = first.dense.activation
        self._kind = kind_of(self._activation)
        self.has_kernels = has_kernels(self.device, self.dtype) and self._kind > 0
        if self.has_kernels:
            names = ("product", "attention", "ranges", "prefill", "rows")
            modules = [importlib.import_module(f"outpace.models.kernels.{name}") for name in names]
            self._product, self._attention, self._range, self._prefill, self._rows = modules
        self.layers = [_layer(layer) for layer in stack.layers]
        self._embedded, self._last_scale = stack.embedded, stack.head_scale
        self._norm = None if stack.norm is None else Norm.of(stack.norm)
        head_bias = None if stack.head_bias is None else stack.head_bias.detach().flatten().to(self.dtype)
        self.head = Product(stack.head.weight.detach(), head_bias)
        self.bias = stack.bias_by_distance  # of self-attention
        self._bias_log2 = None if self.bias is None else (self.bias.float() / math.log(2)).contiguous()
        if self.has_kernels and self._norm_first and self.layers[0].norm.centered:
            self.layers = [layer.folded() for layer in self.layers]
        self._finish(modules_of(model))

    @torch.inference_mode()
    def refresh(self) -> None:
        """Compute anew what depends on weights that have changed in place."""
        for layer in self.layers:
            for norm, product, folded in layer.folds():
                if folded is not None:
                    folded.refresh(norm, product)
        table = Stack(self.base).bias_by_distance
        if table is not None and self.bias is not None and self._bias_log2 is not None:
            self.bias.copy_(table)
            self._bias_log2.copy_(table.float() / math.log(2))

    @property
    def shape(self) -> Shape:
        return Shape(len(self.layers), self.heads, self.head_dim, self.dtype)

    # Sources

    @torch.inference_mode()
    def write_source(self, states: Tensor, source: Pages) -> None:
        """Write the keys and values of cross-attention for encoder states ``[S, D]``."""
        self._write_source(states, torch.arange(len(states), device=self.device)[None], source)

    def _write_source(self, states: Tensor, positions: Tensor, source: Pages) -> None:
        for i, layer in enumerate(self.layers):
            kv = layer.cross_kv(states[None])
            if self.has_kernels:
                self._prefill.write(kv, positions, source.table, layer=i, page=source.page, heads=self.heads)
            else:
                keys, values = (self._split(one) for one in kv.chunk(2, dim=-1))
                source.write(i, keys, values, positions)

    # Forward passes

    @torch.inference_mode()
    def fill(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> None:
        self._hidden(ids, positions, pages)

    @torch.inference_mode()
    def logits(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> Tensor:
        return self._head(self._hidden(ids, positions, pages)).view(*ids.shape, -1)

    @torch.inference_mode()
    def last_logits(self, ids: Tensor, positions: Tensor, pages: Pages, counts: Tensor) -> Tensor:
        hidden = self._hidden(ids, positions, pages).view(*ids.shape, -1)
        return self._head(hidden[torch.arange(len(ids), device=ids.device), counts - 1])

    @torch.inference_mode()
    def launch_once(self, B: int, n: int, pages: Pages) -> Tensor:
        first = copy.copy(self)
        first.layers = self.layers[:1]
        prompt = torch.zeros(1, PROMPT, dtype=torch.int64, device=self.device)
        row = SourcePages(pages.table[:1], pages.page, pages.memory, *_first_row(pages))
        first.fill(prompt, torch.full_like(prompt, -1), row)
        none = torch.full((1, 1), -1, device=self.device)
        states = self.layers[0].cross_kv.weight.new_zeros(1, self.layers[0].cross_kv.weight.shape[1])
        first._write_source(states, none, row.source)
        ids = torch.zeros(B, n, dtype=torch.int64, device=self.device)
        return first.logits(ids, torch.full_like(ids, -1), pages)

    def _hidden(self, ids: Tensor, positions: Tensor, pages: Pages) -> Tensor:
        """Return the last norm's output ``[B·n, D]``, and fill the KV cache."""
        assert isinstance(pages, SourcePages)
        x = self._embedded(ids, positions.clamp(0, self.tokens - 2)).flatten(0, 1)
        part = self._with_kernels if self.has_kernels else self._with_pytorch
        attend, attend_cross = part(ids, positions, pages)
        if self.has_kernels and self._norm_first and len(x) <= self._product.MAX_ROWS:
            return self._few_rows(x, attend, attend_cross)
        for i, layer in enumerate(self.layers):
            attended = attend(i, self._times(self._before(x, layer.norm), layer.qkv))
            x = self._after(self._times(attended, layer.out, residual=x), layer.norm)
            attended = attend_cross(i, self._times(self._before(x, layer.cross_norm), layer.cross_q))
            x = self._after(self._times(attended, layer.cross_out, residual=x), layer.cross_norm)
            inner = self._times(self._before(x, layer.mlp_norm), layer.inner, activate=True)
            x = self._after(self._times(inner, layer.outer, residual=x), layer.mlp_norm)
        return x if self._norm is None else self._normalized(x, self._norm)

    def _few_rows(self, x: Tensor, attend: Attend, attend_cross: Attend) -> Tensor:
        """Compute the layers for few rows ``[M, D]``; each norm is part of the products around it."""
        y: Any = self._normalized(x, self.layers[0].norm)
        afterwards = [*(layer.norm.scale for layer in self.layers[1:]), None]
        for i, (layer, after) in enumerate(zip(self.layers, afterwards, strict=True)):
            attended = attend(i, self._after_norm(y, layer.qkv, layer.qkv_fold))
            y = self._before_norm(attended, layer.out, x, layer.cross_norm.scale)
            attended = attend_cross(i, self._after_norm(y, layer.cross_q, layer.cross_fold))
            y = self._before_norm(attended, layer.cross_out, y.x, layer.mlp_norm.scale)
            inner = self._after_norm(y, layer.inner, layer.inner_fold, activate=True)
            y = self._before_norm(inner, layer.outer, y.x, after)
            x = y if after is None else y.x
        return x if self._norm is None else self._normalized(x, self._norm)

    def _before_norm(self, x: Tensor, product: Product, residual: Tensor, norm: Any) -> Any:
        """Return a product plus a residual, as a ``Stream`` if a norm follows."""
        return self._product.few_rows(x, product.weight, product.bias, residual=residual, norm=norm)

    def _after_norm(self, x: Any, product: Product, folded: Folded | None, activate: bool = False) -> Tensor:
        """Return the product of a ``Stream``, or of rows that are normalized already."""
        kind, gate = (self._kind, self._gated) if activate else (self._product.NONE, False)
        bias, centers = product.bias, None
        if folded is not None and not isinstance(x, Tensor):
            bias, centers = folded.bias, folded.centers
        out: Tensor = self._product.few_rows(
            x, product.weight, bias, activation=kind, gate=gate, centers=centers
        )
        return out

    def _before(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the input of a part of a layer."""
        return self._normalized(x, norm) if self._norm_first else x

    def _after(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the states after a part of a layer, whose residual is added."""
        return x if self._norm_first else self._normalized(x, norm)

    def _head(self, x: Tensor) -> Tensor:
        return self._times(x if self._last_scale == 1.0 else x * self._last_scale, self.head)

    def _normalized(self, x: Tensor, norm: Norm) -> Tensor:
        if not self.has_kernels:
            return norm(x)
        out: Tensor = self._rows.normalize(x, norm.weight, norm.bias, norm.eps, norm.centered)
        return out

    def _times(
        self, x: Tensor, product: Product, residual: Tensor | None = None, activate: bool = False
    ) -> Tensor:
        """Return x ``[M, K]`` times a weight, perhaps activated, plus a residual."""
        if self.has_kernels and len(x) <= self._product.MAX_ROWS:
            kind, gate = (self._kind, self._gated) if activate else (self._product.NONE, False)
            out: Tensor = self._product.few_rows(
                x, product.weight, product.bias, activation=kind, gate=gate, residual=residual
            )
            return out
        y = product(x)
        if activate and self._gated:
            gate_half, up = y.chunk(2, dim=-1)
            y = self._activation(gate_half) * up
        elif activate:
            y = self._activation(y)
        return y if residual is None else residual + y

    def _with_kernels(self, ids: Tensor, positions: Tensor, pages: SourcePages) -> tuple[Attend, Attend]:
        """Return self-attention and cross-attention as kernels, for tokens at positions ``[B, n]``."""
        B, n = ids.shape
        most = MAX_QUERY_BYTES // (self.head_dim * self.dtype.itemsize)  # queries of a launch
        parts = [slice(start, min(start + most, n)) for start in range(0, n, most)]
        ranges, source_ranges = [], []
        for part in parts:
            some = positions[:, part]
            blocks, of_source = (
                self._range.blocks_of(
                    *some.shape, self.heads, self.heads, self.head_dim,
                    page=one.page, dtype=self.dtype, at=self.device,
                )
                for one in (pages, pages.source)
            )  # fmt: skip
            ranges.append((self._range.ranges_of(some, pages.table, blocks), blocks))
            cut = self._range.source_ranges_of(pages.lengths, pages.source.table, of_source)
            source_ranges.append((cut, of_source))

        def attend(i: int, x: Tensor, cross: bool) -> Tensor:
            table = pages.source.table if cross else pages.table
            scale = self.cross_scale if cross else self.scale
            outs = [
                self._attention.few_queries(
                    x.view(B, n, -1)[:, part].contiguous(), positions[:, part], None, table, *some,
                    self.counters,
                    layer=i, heads=self.heads, kv_heads=self.heads, scale=scale,
                    bias=None if cross else self._bias_log2, cross=cross,
                )
                for part, some in zip(parts, source_ranges if cross else ranges, strict=True)
            ]  # fmt: skip
            out: Tensor = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
            return out.view(B * n, -1)

        return partial(attend, cross=False), partial(attend, cross=True)

    def _with_pytorch(self, ids: Tensor, positions: Tensor, pages: SourcePages) -> tuple[Attend, Attend]:
        """Return self-attention and cross-attention in PyTorch's operations."""
        B, n = ids.shape
        reach, longest = int(positions.max()) + 1, int(pages.lengths.max())
        mask = mask_of(positions, reach, None, self.dtype)
        if self.bias is not None:
            mask = mask + bias_of(self.bias, positions, reach)
        source_mask = mask_of(pages.lengths[:, None] - 1, longest, None, self.dtype)

        def attend_self(i: int, x: Tensor) -> Tensor:
            q, k, v = (self._split(one) for one in x.view(B, n, -1).chunk(3, dim=-1))
            keys, values = pages.update(i, k, v, positions, reach)
            return self._joined(scaled_dot_product_attention(q, keys, values, mask, scale=self.scale))

        def attend_cross(i: int, x: Tensor) -> Tensor:
            keys, values = pages.source.read(i, longest)
            q = self._split(x.view(B, n, -1))
            scale = self.cross_scale
            return self._joined(scaled_dot_product_attention(q, keys, values, source_mask, scale=scale))

        return attend_self, attend_cross

    def _split(self, x: Tensor) -> Tensor:
        """Return ``[B, n, heads·d]`` as ``[B, heads, n, d]``."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    @staticmethod
    def _joined(x: Tensor) -> Tensor:
        """Return ``[B, heads, n, d]`` as ``[B·n, heads·d]``."""
        return x.transpose(1, 2).flatten(2).flatten(0, 1)


def _first_row(pages: Pages) -> tuple[Pages, Tensor]:
    assert isinstance(pages, SourcePages)
    source = pages.source
    return Pages(source.table[:1], source.page, source.memory), pages.lengths[:1]


def why_not(model: Any) -> str | None:
    """Return the reason why ``FusedStack`` cannot convert a model, or None if it can."""
    if model.config.model_type not in FAMILIES:
        return f"is of another family than {', '.join(FAMILIES)}"
    stack = Stack(model)
    products = [stack.head]
    for layer in stack.layers:
        for one in (layer.self_attention, layer.cross):
            products += [one.q, one.k, one.v, one.out]
        products += [*layer.dense.inner, layer.dense.outer]
    if stack.layers[0].self_attention.d * stack.head.weight.element_size() > MAX_HEAD_BYTES:
        return "has attention heads that are too large"
    return why_not_rearranged(model, modules_of(model), products)


def modules_of(model: Any) -> Iterator[nn.Module]:
    """Iterate over the modules of a model's decoder and of its head. Its encoder stays as it is."""
    yield from model.get_decoder().modules()
    yield model.get_output_embeddings()


def activation_of(model: Any) -> Any:
    """Return the activation of a model's feed-forward layers."""
    return Stack(model).layers[0].dense.activation


def _layer(layer: StackLayer) -> Layer:
    own, cross, dense = layer.self_attention, layer.cross, layer.dense
    return Layer(
        Norm.of(layer.self_attention_norm),
        Product.of(own.q, own.k, own.v),
        Product.of(own.out),
        Norm.of(layer.cross_norm),
        Product.of(cross.q),
        Product.of(cross.k, cross.v),
        Product.of(cross.out),
        Norm.of(layer.forward_norm),
        Product.of(*dense.inner),
        Product.of(dense.outer),
    )

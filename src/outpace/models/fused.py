"""Llama-like models with their weights rearranged once, over a paged KV cache.

Linear layers with the same input become one: queries, keys and values, and the two halves of the gated layer.

There are three implementations of a forward pass. Over few tokens on a GPU it is five kernels per layer
(``kernels``). Over more tokens it is PyTorch's matrix products with kernels between them. On a CPU it is
PyTorch's operations.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outpace.models.attention import grouped_attention
from outpace.models.causal import mask_of, windows
from outpace.models.causal import positions as positions_of
from outpace.models.paged import Pages, Shape
from outpace.models.rearranged import (
    COUNTERS,
    MAX_HEAD_BYTES,
    MAX_QUERY_BYTES,
    Product,
    Rearranged,
    has_kernels,
    headroom_of,
    kind_of,
    why_not_rearranged,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # rope types whose angles are fixed
FEW_TOKENS = 16  # tokens of a prompt that are processed as a decode step is

Ranges = tuple[Any, dict[int | None, Tensor]]
"""Shape of the blocks of the attention kernel for few queries, and their ranges by window."""


@dataclass(frozen=True)
class Norm:
    """Root-mean-square normalization."""

    weight: Tensor
    eps: float
    shifted: bool  # as in Gemma: weights are relative to 1 and applied before rounding

    @classmethod
    def of(cls, module: Any, family: str) -> Norm:
        """Return the norm of a Transformers module."""
        eps = getattr(module, "variance_epsilon", None)
        return cls(module.weight.detach(), float(module.eps if eps is None else eps), family == "gemma")

    @cached_property
    def scale(self) -> Any:
        """The norm as a ``Scale`` of the kernels."""
        headroom = headroom_of(self.weight, 1.0 if self.shifted else 0.0)
        module = importlib.import_module("outpace.models.kernels.product")
        return module.Scale(self.weight, self.eps, self.shifted, headroom)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize ``x`` over its last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.shifted:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Layer:
    """One block: attention and a gated feed-forward layer, each after a norm."""

    norm: Norm
    qkv: Product
    q_norm: Norm | None
    k_norm: Norm | None
    out: Product
    mlp_norm: Norm
    gate_up: Product
    down: Product
    window: int | None  # attention window in tokens; None: no window


class FusedModel(Rearranged):
    """A Transformers model of one of ``FAMILIES``, with combined weights.

    Raises:
        ValueError: The model cannot be converted. ``why_not`` returns the reason.
    """

    def __init__(self, model: Any) -> None:
        if (why := why_not(model)) is not None:
            raise ValueError(f"model: {type(model).__name__} {why}")
        config, family = model.config, model.config.model_type
        super().__init__(model)
        self.config = config
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // self.heads
        self.scale = float(self.head_dim**-0.5)
        # Rounded as Gemma rounds it
        scale = torch.tensor(self.hidden_size**0.5).to(self.dtype).item() if family == "gemma" else 1.0
        self.embedding_scale = float(scale)
        self.activation: Callable[[Tensor], Tensor] = model.model.layers[0].mlp.act_fn
        self._gate = kind_of(self.activation)
        self.has_kernels = has_kernels(self.device, self.dtype) and self._gate > 0
        if self.has_kernels:
            names = ("product", "attention", "ranges", "prefill", "rows")
            modules = [importlib.import_module(f"outpace.models.kernels.{name}") for name in names]
            self._product, self._attention, self._range, self._prefill, self._rows = modules
        windows_by_kind = windows(config)
        kinds = getattr(config, "layer_types", None)
        self.layers = [
            _layer(block, family, windows_by_kind[kinds[i] if kinds else ""])
            for i, block in enumerate(model.model.layers)
        ]
        self.norm = Norm.of(model.model.norm, family)
        self.head = Product.of(model.get_output_embeddings())
        self.tokens = positions_of(config) + 1  # a sequence's positions, and one for what lies beyond
        self.angles = angles_of(model.model.rotary_emb, self.embedding, self.tokens)
        self._finish(model.modules())

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that a forward pass reads."""
        products = [
            product for layer in self.layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        return sum(product.weight.nbytes for product in [*products, self.head])

    @property
    def shape(self) -> Shape:
        """Shape of the keys and values."""
        return Shape(len(self.layers), self.kv_heads, self.head_dim, self.dtype)

    @torch.inference_mode()
    def fill(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> None:
        """Write keys and values of tokens ``[B, n]`` at positions ``[B, n]`` into the KV cache.

        The positions of each row are consecutive. A position of -1 is padding, at the end of a row. With
        ``prefill``, any number of tokens has the same kernels.
        """
        if not prefill and self._uses_few_rows_kernels(ids):
            self._stream(ids, positions, pages)
        else:
            self._hidden(ids, positions, pages, prefill)

    @torch.inference_mode()
    def logits(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> Tensor:
        """Return logits ``[B, n, V]`` after each of the tokens, and fill the KV cache.

        With ``prefill``, any number of tokens has the same kernels.
        """
        if not prefill and self._uses_few_rows_kernels(ids):
            stream = self._stream(ids, positions, pages)
            out: Tensor = self._product.few_rows(stream, self.head.weight, self.head.bias)
            return out.view(*ids.shape, -1)
        return self.head(self._hidden(ids, positions, pages, prefill))

    @torch.inference_mode()
    def next_logits(self, ids: Tensor, positions: Tensor, pages: Pages, last: Tensor) -> Tensor:
        """Return logits ``[B, V]`` after token ``last[b]`` of each row, and fill the KV cache.

        Few tokens have the kernels of ``logits``.
        """
        rows = torch.arange(len(ids), device=ids.device)
        if self._uses_few_rows_kernels(ids):
            return self.logits(ids, positions, pages)[rows, last]
        return self.head(self._hidden(ids, positions, pages)[rows, last])

    @torch.inference_mode()
    def last_logits(self, ids: Tensor, positions: Tensor, pages: Pages, counts: Tensor) -> Tensor:
        """Return logits ``[B, V]`` after token ``counts[b] - 1`` of each row, and fill the KV cache.

        Prompts of any length have the same kernels, so that a new length compiles nothing.
        """
        if len(ids) == 1 and ids.numel() <= FEW_TOKENS:  # kernels that decode steps have as well
            return self.logits(ids, positions, pages)[:, -1]
        rows = torch.arange(len(ids), device=ids.device)
        return self.head(self._hidden(ids, positions, pages, prefill=True)[rows, counts - 1])

    @torch.inference_mode()
    def launch_once(self, B: int, n: int, pages: Pages) -> Tensor:
        """Launch each kernel of a prefill, and of a forward pass over tokens ``[B, n]``, once.

        All layers have the same kernels, so the first one suffices. Nothing is written to the KV cache.

        Returns:
            Undefined logits ``[B, n, V]``.
        """
        first = copy.copy(self)
        first.layers = self.layers[:1]
        ids = torch.zeros(B, n, dtype=torch.int64, device=self.device)
        prompt = torch.zeros(1, FEW_TOKENS + 1, dtype=torch.int64, device=self.device)
        first.last_logits(prompt, torch.full_like(prompt, -1), pages, prompt[:, 0])
        return first.logits(ids, torch.full_like(ids, -1), pages)

    def _hidden(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> Tensor:
        """Return the last norm's output ``[B, n, D]``, and fill the KV cache."""
        if self.has_kernels:
            return self._hidden_with_kernels(ids, positions, pages, prefill)
        x = self.embedding[ids] * self.embedding_scale
        attend = self._attention_without_kernels(positions, pages)
        for i, layer in enumerate(self.layers):
            x = x + layer.out(attend(i, layer.qkv(layer.norm(x))))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(self.activation(gate) * up)
        return self.norm(x)

    def _uses_few_rows_kernels(self, ids: Tensor) -> bool:
        """Return whether the kernels for few rows support this many tokens."""
        few: bool = self._uses_attention_kernel(ids) and ids.numel() <= self._product.MAX_ROWS
        return few

    def _uses_attention_kernel(self, ids: Tensor) -> bool:
        """Return whether the attention kernel for few queries supports this many rows and tokens."""
        head = self.head_dim * self.dtype.itemsize
        tile = max(16, self.heads // self.kv_heads * ids.shape[1]) * head
        counted = ids.shape[0] * self.kv_heads <= COUNTERS
        return self.has_kernels and counted and head <= MAX_HEAD_BYTES and tile <= MAX_QUERY_BYTES

    def _stream(self, ids: Tensor, positions: Tensor, pages: Pages) -> Any:
        """Return the input of the last product, for few tokens, through five kernels per layer."""
        matmul, norms = self._product.few_rows, [layer.norm for layer in self.layers[1:]] + [self.norm]
        ranges = self._ranges(positions, pages)
        stream = self._product.embed(ids, self.embedding, self.embedding_scale, self.layers[0].norm.scale)
        for i, (layer, after) in enumerate(zip(self.layers, norms, strict=True)):
            qkv = matmul(stream, layer.qkv.weight, layer.qkv.bias)
            out = self._attend(i, qkv.view(*ids.shape, -1), positions, pages, ranges)
            stream = matmul(
                out, layer.out.weight, layer.out.bias, residual=stream.x, norm=layer.mlp_norm.scale
            )
            inner = matmul(stream, layer.gate_up.weight, layer.gate_up.bias, activation=self._gate, gate=True)
            stream = matmul(inner, layer.down.weight, layer.down.bias, residual=stream.x, norm=after.scale)
        return stream

    def _hidden_with_kernels(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool) -> Tensor:
        """Compute ``_hidden`` with kernels between the products."""
        add_norm, gate = self._rows.add_norm, self._rows.gate
        few = not prefill and self._uses_attention_kernel(ids)
        ranges = self._ranges(positions, pages) if few else None
        x = (self.embedding[ids] * self.embedding_scale).flatten(0, 1)
        residual = torch.zeros_like(x)  # so that all layers have the same kernels
        for i, layer in enumerate(self.layers):
            x, y = add_norm(x, residual, layer.norm.scale)
            out = self._attend(i, layer.qkv(y).view(*ids.shape, -1), positions, pages, ranges)
            x, y = add_norm(x, layer.out(out), layer.mlp_norm.scale)
            residual = layer.down(gate(layer.gate_up(y), self._gate))
        last: Tensor = add_norm(x, residual, self.norm.scale)[1]
        return last.view(*ids.shape, -1)

    def _ranges(self, positions: Tensor, pages: Pages) -> Ranges:
        """Return what the attention kernel for few queries is to handle."""
        sizes = *positions.shape, self.heads, self.kv_heads, self.head_dim
        blocks = self._range.blocks_of(*sizes, page=pages.page, dtype=self.dtype, at=positions.device)
        by_window = {
            window: self._range.ranges_of(positions, pages.table, blocks, window) for window in self._windows
        }
        return blocks, by_window

    def _attend(
        self,
        i: int,
        qkv: Tensor,
        positions: Tensor,
        pages: Pages,
        ranges: Ranges | None,
    ) -> Tensor:
        """Attend in layer i with a kernel, for queries, keys and values ``[B, n, ...]``.

        Args:
            i: Number of the layer.
            qkv: Queries, keys and values.
            positions: Positions ``[B, n]``.
            pages: The KV cache.
            ranges: Blocks and ranges of the kernel for few queries. None: the one for many queries.

        Returns:
            The output ``[B·n, heads·d]``.
        """
        layer, norms = self.layers[i], None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps, layer.q_norm.shifted
        common: dict[str, Any] = {
            "layer": i, "heads": self.heads, "kv_heads": self.kv_heads, "scale": self.scale,
            "window": layer.window, "norms": norms,
        }  # fmt: skip
        if ranges is not None:
            blocks, by_window = ranges
            out: Tensor = self._attention.few_queries(
                qkv, positions, self.angles, pages.table, by_window[layer.window], blocks, self.counters,
                **common,
            )  # fmt: skip
        else:
            out = self._prefill.many_queries(
                qkv, positions, self.angles, pages.table, page=pages.page, **common
            )
        return out.view(qkv.shape[0] * qkv.shape[1], -1)

    def _attention_without_kernels(self, positions: Tensor, pages: Pages) -> Callable[[int, Tensor], Tensor]:
        """Return an attention function for tokens at positions ``[B, n]``, in PyTorch's operations.

        The function takes the number of a layer, and the tokens' queries, keys and values ``[B, n, ...]``.
        """
        reach = int(positions.max()) + 1
        cos, sin = (table[positions.clamp(min=0)][:, None] for table in self.angles)  # [B, 1, n, d]
        masks = {window: mask_of(positions, reach, window, self.dtype) for window in self._windows}

        def attend(i: int, qkv: Tensor) -> Tensor:
            layer = self.layers[i]
            q, k, v = self._split(layer, qkv)
            keys, values = pages.update(i, _rotated(k, cos, sin), v, positions, reach)
            out = grouped_attention(_rotated(q, cos, sin), keys, values, masks[layer.window], self.scale)
            return out.flatten(2)

        return attend

    @cached_property
    def _windows(self) -> set[int | None]:
        return {layer.window for layer in self.layers}

    def _split(self, layer: Layer, qkv: Tensor) -> list[Tensor]:
        """Return queries, keys and values, ``[B, heads, n, d]`` each."""
        B, n, _ = qkv.shape
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = torch.split(qkv.view(B, n, -1, self.head_dim), sizes, dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        return [one.transpose(1, 2) for one in (q, k, v)]


@torch.inference_mode(False)
@torch.no_grad()
def angles_of(rotary: Any, like: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position, ``[tokens, d]`` each, as a model computes them.

    Args:
        rotary: The model's module for them.
        like: A matrix with the dtype and the device of the result.
        tokens: Number of positions.
    """
    cos, sin = rotary(like[:1, None], torch.arange(tokens, device=like.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


def why_not(model: Any) -> str | None:
    """Return the reason why ``FusedModel`` cannot convert a model, or None if it can."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"is of another family than {', '.join(FAMILIES)}"
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in STATIC_ROTARY:
        return f"has rotary angles that depend on the sequence ({rotary})"
    return why_not_rearranged(model, model.modules(), _products(model))


def activation_of(model: Any) -> Any:
    """Return the activation of a model's feed-forward layers."""
    return model.model.layers[0].mlp.act_fn


def _products(model: Any) -> list[Any]:
    """Return the linear layers that ``FusedModel`` uses."""
    attention = [f"self_attn.{one}_proj" for one in "qkvo"]
    names = [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    inside = [block.get_submodule(name) for block in model.model.layers for name in names]
    return [model.get_output_embeddings(), *inside]


def _layer(block: Any, family: str, window: int | None) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Layer(
        Norm.of(block.input_layernorm, family),
        Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
        None if q_norm is None else Norm.of(q_norm, family),
        None if k_norm is None else Norm.of(k_norm, family),
        Product.of(attention.o_proj),
        Norm.of(block.post_attention_layernorm, family),
        Product.of(mlp.gate_proj, mlp.up_proj),
        Product.of(mlp.down_proj),
        window,
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

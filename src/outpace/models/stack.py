"""Decoder stacks of encoder-decoder models, in one form for all families.

The modules are the model's own. Only the forward pass through them is written here. Transformers' forward
pass needs rows of equal length, because it computes positions and T5's distances once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FAMILIES = ("t5", "mt5", "bart", "marian", "whisper")
NORM_FIRST = ("t5", "mt5", "whisper")
BART_OFFSET = 2  # unused positions at the beginning of BART's table
ANY_LENGTH = 1 << 13  # context in tokens of models with relative positions

Module = Callable[[Tensor], Tensor]
Cache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function that stores new keys and values ``[B, heads, n, d]`` and returns all cached ones."""


@dataclass(frozen=True)
class Attention:
    """Multi-head attention: four projections around a softmax."""

    q: Any  # linear layers
    k: Any
    v: Any
    out: Any
    heads: int
    d: int
    scale: float

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, heads, n, d]`` of states ``[B, n, D]``."""
        return self._split(self.k(x)), self._split(self.v(x))

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from states ``[B, n, D]`` to keys and values; the mask is added to the scores."""
        q = self._split(self.q(x))
        attended = scaled_dot_product_attention(q, keys, values, mask, scale=self.scale)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class Dense:
    """The parts of a feed-forward layer.

    Attributes:
        inner: One linear layer, or two: a gate, which is activated, and what it multiplies.
        activation: The activation.
        outer: The linear layer after them.
    """

    inner: tuple[Any, ...]
    activation: Module
    outer: Any


@dataclass(frozen=True)
class Layer:
    """A decoder block: self-attention, cross-attention to the source, and a feed-forward layer."""

    self_attention: Attention
    self_attention_norm: Module
    cross: Attention
    cross_norm: Module
    forward: Module
    forward_norm: Module
    norm_first: bool
    dense: Dense

    def __call__(
        self,
        x: Tensor,
        cache: Cache,
        mask: Tensor | None,
        source: tuple[Tensor, Tensor],
        source_mask: Tensor | None,
    ) -> Tensor:
        """Return the states after this block.

        Args:
            x: States ``[B, n, D]``.
            cache: Stores new keys and values of the sequence, and returns all cached ones.
            mask: Added to the self-attention scores.
            source: Keys and values of the source.
            source_mask: Added to the cross-attention scores.
        """
        x = self._residual(
            x,
            self.self_attention_norm,
            lambda y: self.self_attention.attend(y, *cache(*self.self_attention.keys_values(y)), mask),
        )
        x = self._residual(x, self.cross_norm, lambda y: self.cross.attend(y, *source, source_mask))
        return self._residual(x, self.forward_norm, self.forward)

    def _residual(self, x: Tensor, norm: Module, part: Module) -> Tensor:
        return x + part(norm(x)) if self.norm_first else norm(x + part(x))


class Stack:
    """Embedding, layers and head of a model of one of ``FAMILIES``."""

    def __init__(self, model: Any) -> None:
        config, self.family = model.config, model.config.model_type
        decoder = model.get_decoder()
        self._embed: Module = decoder.embed_tokens
        self.norm: Module | None = None  # after all layers
        self._embedding_norm: Module | None = getattr(decoder, "layernorm_embedding", None)
        self._position_table: Tensor | None = None  # `[positions, D]`
        self.head: Any = model.get_output_embeddings()
        self.head_bias: Tensor | None = getattr(model, "final_logits_bias", None)
        self._scale = self.head_scale = 1.0
        if self.family in ("t5", "mt5"):
            self.layers = [_of_t5(block, config.num_heads) for block in decoder.block]
            self.norm = decoder.final_layer_norm
            self._distances = decoder.block[0].layer[0].SelfAttention
            self.context = ANY_LENGTH
            if getattr(config, "scale_decoder_outputs", False):
                self.head_scale = config.d_model**-0.5
        else:
            heads, first = config.decoder_attention_heads, self.family in NORM_FIRST
            self.layers = [_of_bart(layer, heads, first) for layer in decoder.layers]
            self.norm = getattr(decoder, "layer_norm", None)
            self._position_table = decoder.embed_positions.weight.detach()
            if self.family == "bart":
                self._position_table = self._position_table[BART_OFFSET:]
            if self.family == "marian":
                self._scale = float(decoder.embed_scale)
            self.context = self._position_table.shape[0]

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings ``[B, n, D]`` of tokens ``[B, n]`` at positions ``[B, n]``."""
        x = self._embed(ids)
        if self._scale != 1.0:
            x = x * self._scale
        if self._position_table is not None:
            x = x + self._position_table[positions]
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def bias(self, positions: Tensor, reach: int) -> Tensor | None:
        """Return T5's bias by distance for tokens at positions ``[B, n]``; None for other families.

        Returns:
            Additive bias of the attention scores, ``[B, heads, n, reach]``.
        """
        table = self.bias_by_distance
        return None if table is None else bias_of(table, positions, reach)

    @cached_property
    def bias_by_distance(self) -> Tensor | None:
        """T5's bias of each distance ``[distances, heads]``, whose last row is that of all larger ones."""
        if self.family not in ("t5", "mt5"):
            return None
        module = self._distances
        weight = module.relative_attention_bias.weight.detach()
        buckets = module._relative_position_bucket(
            -torch.arange(module.relative_attention_max_distance + 1, device=weight.device),
            bidirectional=False,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
        )
        table: Tensor = weight[buckets]
        return table

    def logits(self, x: Tensor) -> Tensor:
        """Return logits of the last layer's states."""
        if self.norm is not None:
            x = self.norm(x)
        if self.head_scale != 1.0:
            x = x * self.head_scale
        logits: Tensor = self.head(x)
        return logits if self.head_bias is None else logits + self.head_bias


def bias_of(table: Tensor, positions: Tensor, reach: int) -> Tensor:
    """Return the bias of a table by distance ``[distances, heads]`` for tokens at positions ``[B, n]``.

    Returns:
        Additive bias of the attention scores, ``[B, heads, n, reach]``.
    """
    distances = positions[:, :, None] - torch.arange(reach, device=positions.device)
    return table[distances.clamp(0, len(table) - 1)].permute(0, 3, 1, 2)


def _of_t5(block: Any, heads: int) -> Layer:
    self_attention, cross, forward = block.layer

    def attention(one: Any) -> Attention:
        return Attention(one.q, one.k, one.v, one.o, heads, one.key_value_proj_dim, 1.0)

    dense = forward.DenseReluDense
    inner = (dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else (dense.wi,)
    return Layer(
        attention(self_attention.SelfAttention), self_attention.layer_norm,
        attention(cross.EncDecAttention), cross.layer_norm, forward.DenseReluDense, forward.layer_norm, True,
        Dense(inner, dense.act, dense.wo),
    )  # fmt: skip


def _of_bart(layer: Any, heads: int, norm_first: bool) -> Layer:
    def attention(one: Any) -> Attention:
        return Attention(
            one.q_proj, one.k_proj, one.v_proj, one.out_proj, heads, one.head_dim, one.head_dim**-0.5
        )

    return Layer(
        attention(layer.self_attn), layer.self_attn_layer_norm,
        attention(layer.encoder_attn), layer.encoder_attn_layer_norm,
        lambda x: layer.fc2(layer.activation_fn(layer.fc1(x))), layer.final_layer_norm, norm_first,
        Dense((layer.fc1,), layer.activation_fn, layer.fc2),
    )  # fmt: skip

"""Decoder stacks of encoder-decoder models, in one form for all families.

The modules are the model's own. Only the forward pass through them is written here. Transformers' forward
pass needs rows of equal length, because it computes positions and T5's distances once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FAMILIES = ("t5", "mt5", "bart", "marian", "whisper")
NORM_FIRST = ("t5", "mt5", "whisper")
BART_OFFSET = 2  # unused positions at the beginning of BART's table
ANY_LENGTH = 1 << 20  # context in tokens of models with relative positions

Module = Callable[[Tensor], Tensor]
Cache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function that stores new keys and values ``[B, heads, n, d]`` and returns all cached ones."""


@dataclass(frozen=True)
class Attention:
    """Multi-head attention: four projections around a softmax."""

    q: Module
    k: Module
    v: Module
    out: Module
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
        return self.out(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


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
        self._norm: Module | None = None  # after all layers
        self._embedding_norm: Module | None = getattr(decoder, "layernorm_embedding", None)
        self._position_table: Tensor | None = None  # `[positions, D]`
        self._bias: Tensor | None = None  # of each distance, `[T, heads]`
        self._head: Module = model.get_output_embeddings()
        self._head_bias: Tensor | None = getattr(model, "final_logits_bias", None)
        self._scale = self._head_scale = 1.0
        if self.family in ("t5", "mt5"):
            self.layers = [_of_t5(block, config.num_heads) for block in decoder.block]
            self._norm = decoder.final_layer_norm
            self._distances = decoder.block[0].layer[0].SelfAttention
            self.context = ANY_LENGTH
            if getattr(config, "scale_decoder_outputs", False):
                self._head_scale = config.d_model**-0.5
        else:
            heads, first = config.decoder_attention_heads, self.family in NORM_FIRST
            self.layers = [_of_bart(layer, heads, first) for layer in decoder.layers]
            self._norm = getattr(decoder, "layer_norm", None)
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
        if self.family not in ("t5", "mt5"):
            return None
        if self._bias is None or self._bias.shape[0] < reach:
            module = self._distances
            buckets = module._relative_position_bucket(
                -torch.arange(max(512, 2 * reach), device=positions.device),
                bidirectional=False,
                num_buckets=module.relative_attention_num_buckets,
                max_distance=module.relative_attention_max_distance,
            )
            self._bias = module.relative_attention_bias(buckets)
        assert self._bias is not None
        distances = positions[:, :, None] - torch.arange(reach, device=positions.device)
        return self._bias[distances.clamp(min=0)].permute(0, 3, 1, 2)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits of the last layer's states."""
        if self._norm is not None:
            x = self._norm(x)
        if self._head_scale != 1.0:
            x = x * self._head_scale
        logits = self._head(x)
        return logits if self._head_bias is None else logits + self._head_bias


def _of_t5(block: Any, heads: int) -> Layer:
    self_attention, cross, forward = block.layer

    def attention(one: Any) -> Attention:
        return Attention(one.q, one.k, one.v, one.o, heads, one.key_value_proj_dim, 1.0)

    return Layer(
        attention(self_attention.SelfAttention), self_attention.layer_norm,
        attention(cross.EncDecAttention), cross.layer_norm, forward.DenseReluDense, forward.layer_norm, True,
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
    )  # fmt: skip

"""Attention of a few new tokens over a long KV cache, without copying the cache.

Where several query heads share a key head, Transformers repeats keys and values as soon as there is a mask.
For a long context that costs more than the attention. Here the heads of a group become queries of one head
instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "outpace_grouped"


def grouped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with all query heads of a group as queries of one head.

    Without a mask or without groups, Transformers' own function does the work.

    Args:
        module: The attention module.
        query: ``[R, heads, n, d]``.
        key: ``[R, kv_heads, T, d]``.
        value: ``[R, kv_heads, T, d]``.
        attention_mask: Additive mask ``[R, 1, n, T]``, or None.
        dropout: For Transformers' own function.
        scaling: Factor of the attention scores.
        **others: For Transformers' own function.

    Returns:
        The output ``[R, n, heads, d]``, and None in place of the attention weights.
    """
    if attention_mask is None or query.shape[1] == key.shape[1]:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return out
    return grouped_attention(query, key, value, attention_mask, scaling).contiguous(), None


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Return the output ``[R, n, heads, d]`` of ``grouped``, for tensors of the same shapes."""
    R, heads, n, d = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(R, key.shape[1], groups * n, d)
    mask = mask.expand(R, groups, n, -1).reshape(R, 1, groups * n, -1)
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return attended.reshape(R, heads, n, -1).transpose(1, 2)


AttentionInterface.register(NAME, grouped)


def view_config(config: Any, grouped: bool) -> Any:
    """Return a copy of a configuration for a view of its model.

    Args:
        config: Configuration of the model.
        grouped: Whether the view uses ``grouped`` as its attention.
    """
    view = copy.copy(config)
    # Nothing here reads these outputs. To record them, Transformers would install hooks on the model itself.
    view.output_hidden_states = view.output_attentions = False
    if grouped:
        view._attn_implementation_internal = NAME  # the public name also changes nested configurations
    return view

"""Attention of a few new tokens over a long cache, without copying the cache.

Where several query heads share a key head, Transformers repeats keys and values before it calls PyTorch, as
soon as there is a mask: for a long context that costs more than the attention. Here the heads of a group
become queries of one head instead.
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
    """query `[R, heads, n, d]`, key and value `[R, fewer heads, T, d]`, mask `[R, 1, n, T]` or None."""
    R, heads, n, d = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or groups == 1:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return out
    query = query.reshape(R, key.shape[1], groups * n, d)
    mask = attention_mask.expand(R, groups, n, -1).reshape(R, 1, groups * n, -1)
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return attended.reshape(R, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped)


def view_config(config: Any, grouped: bool) -> Any:
    """Return a copy of a configuration for a view of its model, that attends as above if it is to."""
    ours = copy.copy(config)
    # Nobody reads these, and Transformers would install hooks that record them on the model itself.
    ours.output_hidden_states = ours.output_attentions = False
    if grouped:
        ours._attn_implementation_internal = NAME  # the public name would reach nested configurations, too
    return ours

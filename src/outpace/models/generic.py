"""Any supported causal model for the graph executor, with forward passes that depend on tensors alone.

The model's own forward runs, with explicit positions and 4-D masks over the whole static KV cache. A tensor
holds the positions that the cache writes. So a CUDA graph can capture the unmodified model. It is slower than
``fused``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.models.cache import RaggedCache, Span
from outpace.models.causal import positions as positions_of
from outpace.models.causal import windows
from outpace.models.fused import mask_of


@dataclass(frozen=True)
class GenericCache:
    """Rows of a ragged KV cache.

    Attributes:
        ragged: The KV cache.
        first: The first of the rows.
        rows: Number of rows.
        tokens: A forward pass attends to at most this many tokens of each row.
    """

    ragged: RaggedCache
    first: int
    rows: int
    tokens: int

    def part(self, row: int, rows: int, tokens: int) -> GenericCache:
        """Return some of the rows and their first tokens, in the same memory."""
        return GenericCache(self.ragged, self.first + row, rows, tokens)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row to another."""
        self.ragged.copy(self.first + source, self.first + target, length)

    def wipe(self) -> None:
        """Zero all rows."""
        for row in range(self.first, self.first + self.rows):
            self.ragged.clear(row)


class GenericModel:
    """A Transformers causal model whose forward passes depend on tensors alone."""

    def __init__(self, model: Any) -> None:
        self.base = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._context = positions_of(model.config)
        self._windows = windows(model.config)

    def allocate_cache(self, rows: int, tokens: int) -> GenericCache:
        """Return a KV cache for ``rows`` sequences of ``tokens`` tokens."""
        cache = RaggedCache(self.base.config.num_hidden_layers)
        cache.reserve(rows, tokens)
        return GenericCache(cache, 0, rows, cache.capacity)

    def fill_cache(self, ids: Tensor, positions: Tensor, cache: GenericCache) -> None:
        """Write keys and values of tokens ``[B, n]`` at positions ``[B, n]`` into the KV cache."""
        self.logits(ids, positions, cache)

    @torch.inference_mode()
    def logits(self, ids: Tensor, positions: Tensor, cache: GenericCache) -> Tensor:
        """Return logits ``[B, n, V]`` after each of the tokens, and fill the KV cache."""
        T = cache.tokens
        cache.ragged.span = Span(cache.first, positions, None, T)
        masks = {window: mask_of(positions, T, window, self.dtype) for window in set(self._windows.values())}
        by_kind = {kind: masks[window] for kind, window in self._windows.items()}
        out = self.base(
            input_ids=ids,
            # Only finished sequences have positions past the context.
            position_ids=positions.clamp(max=self._context - 1),
            attention_mask=by_kind[""] if list(by_kind) == [""] else by_kind,
            past_key_values=cache.ragged,
            use_cache=True,
        )
        logits: Tensor = out.logits
        return logits

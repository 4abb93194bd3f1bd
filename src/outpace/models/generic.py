"""Any supported Transformers model with what the engine asks of one: a pass that reads nothing but tensors.

The model's own forward runs, with explicit positions, 4-D masks over the whole static cache, and a cache that
writes where a tensor says. So it can be captured in a CUDA graph as it is, if slower than `fused`.
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
    """Rows of a ragged cache, from `first` on, and their first tokens."""

    ragged: RaggedCache
    first: int
    rows: int
    tokens: int

    def part(self, row: int, rows: int, tokens: int) -> GenericCache:
        """Some rows of it, the first tokens, the same memory."""
        return GenericCache(self.ragged, self.first + row, rows, tokens)

    def copy(self, source: int, target: int, length: int) -> None:
        """The first tokens of one row become those of another."""
        self.ragged.copy(self.first + source, self.first + target, length)

    def wipe(self) -> None:
        """Zeros again."""
        for row in range(self.first, self.first + self.rows):
            self.ragged.clear(row)


class GenericModel:
    """A Transformers causal model whose passes depend on tensors alone."""

    def __init__(self, model: Any) -> None:
        self.base = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._context = positions_of(model.config)
        self._windows = windows(model.config)

    def room(self, rows: int, tokens: int) -> GenericCache:
        """A cache for so many texts of so many tokens."""
        cache = RaggedCache(self.base.config.num_hidden_layers)
        cache.reserve(rows, tokens)
        return GenericCache(cache, 0, rows, cache.capacity)

    def read(self, ids: Tensor, positions: Tensor, cache: GenericCache) -> None:
        """Take tokens `[B, n]` at positions `[B, n]` into the cache."""
        self.logits(ids, positions, cache)

    @torch.inference_mode()
    def logits(self, ids: Tensor, positions: Tensor, cache: GenericCache) -> Tensor:
        """Logits `[B, n, V]` after each of the tokens."""
        T = cache.tokens
        cache.ragged.span = Span(cache.first, positions, None, T)
        masks = {window: mask_of(positions, T, window, self.dtype) for window in set(self._windows.values())}
        by_kind = {kind: masks[window] for kind, window in self._windows.items()}
        out = self.base(
            input_ids=ids,
            # Past the context there are only rows that have ended.
            position_ids=positions.clamp(max=self._context - 1),
            attention_mask=by_kind[""] if list(by_kind) == [""] else by_kind,
            past_key_values=cache.ragged,
            use_cache=True,
        )
        logits: Tensor = out.logits
        return logits

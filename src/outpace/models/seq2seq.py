"""An encoder-decoder model of the Transformers library as a ``Scorer``.

The encoder runs once per source, the input of the encoder. The keys and values of cross-attention are also
computed once. From then on a sequence is scored as in ``outpace.models.causal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.models.causal import CausalScorer, mask_of, placement
from outpace.models.contiguous import grown
from outpace.models.encoder import EncoderScorer, supported_model
from outpace.models.source import Source
from outpace.models.stack import Stack


class Seq2SeqScorer(EncoderScorer, CausalScorer):
    """T5, mT5, BART, Marian or Whisper, with ragged KV caches for self-attention and cross-attention."""

    captures = False
    _sources: dict[int, int]  # length of each slot's source
    _cross_cache: list[tuple[Tensor, Tensor]]  # sources' keys and values per layer, `[rows, heads, S, d]`

    def __init__(self, model: Any) -> None:
        base = supported_model(model)
        self.model = self.base = base
        self.config = base.config
        self._set_encoder(base)
        self._grouped = False  # the stack has its own attention
        self.stack = Stack(base)
        self.vocab_size = base.get_output_embeddings().weight.shape[0]
        self.context = self.stack.context
        self.device, self.dtype = placement(base)
        self._windows: dict[str, int | None] = {"": None}
        self._last_only = {"last_only": True}
        attention = self.stack.layers[0].self_attention
        token_bytes = 2 * len(self.stack.layers) * attention.heads * attention.d * self.dtype.itemsize
        self._prepare(len(self.stack.layers), token_bytes)
        self.cache.on_swap = self._swap_sources
        self.release()

    # Sources

    @torch.inference_mode()
    def encode_sources(self, slots: Sequence[int], sources: Sequence[Source | None], tokens: int) -> None:
        """See ``Scorer.encode_sources``; keys and values for cross-attention are cached as well."""
        self.check_weights()
        unique = [one for one in dict.fromkeys(sources) if one is not None]  # slots may share a source
        self.encode(unique)
        states = [source.states[self.encoder][1] for source in unique]
        longest = max(one.shape[0] for one in states)
        self.cache.prepare(max(slots) + 1, tokens)
        self._ensure_cross_capacity(longest)
        for slot in slots:
            self.cache.open(slot, ())
        self.cache.arrange(slots)
        rows = [self.cache.row(slot) for slot in slots]
        source_index = [unique.index(source) for source in sources if source is not None]
        padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True).to(self.device)
        for layer, tables in zip(self.stack.layers, self._cross_cache, strict=True):
            for table, new in zip(tables, layer.cross.keys_values(padded), strict=True):
                table[rows, :, :longest] = new if len(unique) == len(rows) else new[source_index]
                table[rows, :, longest:] = 0  # a masked NaN is still NaN after the softmax
        self._sources |= {slot: states[i].shape[0] for slot, i in zip(slots, source_index, strict=True)}

    def _ensure_cross_capacity(self, tokens: int) -> None:
        rows, _, length, _ = self._cross_cache[0][0].shape
        if self.cache.rows > rows or tokens > length:
            size = max(self.cache.rows, rows), max(tokens, length)
            self._cross_cache = [(grown(k, *size), grown(v, *size)) for k, v in self._cross_cache]

    # Forward passes

    def open(self, slot: int, prompt: Sequence[int], source: Source | None) -> int:
        """See ``Scorer.open``; every sequence needs a source."""
        if source is None:
            raise ValueError(f"sources: got None; {type(self.base).__name__} needs one for each sequence")
        if slot not in self._sources:
            self.encode_sources([slot], [source], len(prompt))
        return 0

    def forget(self) -> None:
        super().forget()
        self.stack = Stack(self._runner)  # adapters add and remove modules

    def pack(self) -> None:
        super().pack()
        self.stack = Stack(self._runner)

    def reset(self, slots: Sequence[int], texts: Sequence[Sequence[int]] | None = None) -> None:
        """Free slots. No later prompt reuses their cached tokens, which depend on the source."""
        super().reset(slots, None if texts is None else [()] * len(slots))
        for slot in slots:
            self._sources.pop(slot, None)

    def release(self) -> None:
        super().release()
        self._sources, self._cross_cache = {}, []
        for layer in self.stack.layers:
            empty = torch.zeros(0, layer.cross.heads, 0, layer.cross.d, dtype=self.dtype, device=self.device)
            self._cross_cache.append((empty, empty))

    def _swap_sources(self, one: int, other: int) -> None:
        """Swap the rows of two sources."""
        for tables in self._cross_cache:
            for table in tables:
                table[[one, other]] = table[[other, one]]

    def _forward(self, first: int, ids: Tensor, positions: Tensor, **last_only: Any) -> Tensor:
        positions, reach = self._place(first, positions)
        rows = slice(first, first + len(ids))
        x = self.stack.embedded(ids.to(self.device), positions.clamp(max=self.context - 1))
        mask = self._mask(positions, reach)
        source_mask, source_tokens = self._source_mask(rows)
        caches = zip(self.cache.past_key_values.layers, self._cross_cache, strict=True)
        for layer, (cache, tables) in zip(self.stack.layers, caches, strict=True):
            keys, values = (table[rows, :, :source_tokens] for table in tables)
            x = layer(x, cache.update, mask, (keys, values), source_mask)
        return self.stack.logits(x[:, -1:] if last_only else x)

    def _mask(self, positions: Tensor, reach: int) -> Tensor | None:
        """Return the additive self-attention mask with T5's bias, ``[R, heads or 1, n, reach]``."""
        bias = self.stack.bias(positions, reach)
        if positions.shape == (1, 1):
            return bias  # a single token attends to everything
        mask = mask_of(positions, reach, None, self.dtype)
        return mask if bias is None else mask + bias

    def _source_mask(self, rows: slice) -> tuple[Tensor | None, int]:
        """Return the additive cross-attention mask of these rows, and the length of their longest source."""
        lengths = [self._sources[slot] for slot in self.cache.slots_of(rows)]
        longest = max(lengths)
        if min(lengths) == longest:
            return None, longest
        last = torch.tensor(lengths, device=self.device)[:, None] - 1
        return mask_of(last, longest, None, self.dtype), longest

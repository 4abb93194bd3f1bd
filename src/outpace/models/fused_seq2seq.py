"""The fused decoder of an encoder-decoder model as a ``Scorer``, over paged KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.models.encoder import EncoderScorer, supported_model
from outpace.models.fused_scorer import FusedScorer, rearranged
from outpace.models.fused_stack import FusedStack, SourcePages
from outpace.models.kv_cache import KVCache
from outpace.models.paged import PagedCache
from outpace.models.scorer import Demand, Scorer
from outpace.models.source import Source

LONGEST_SOURCE = 1 << 16  # tokens of an encoder's input, if its positions have no limit


class FusedSeq2SeqScorer(EncoderScorer, FusedScorer):
    """T5, mT5, BART, Marian or Whisper, fused.

    The keys and values of cross-attention are in a paged KV cache of their own. They belong to a source, and
    all sequences with this source share them by reference.

    Args:
        model: The model. Its weights are rearranged, and it can still be used.

    Attributes:
        sources: KV cache of the sources.
    """

    fused: FusedStack
    sources: PagedCache

    def __init__(self, model: Any) -> None:
        self.model = self.base = supported_model(model)
        self._set_up(rearranged(self.base, FusedStack))
        self.fused.refresh()  # weights may have changed since another scorer made it
        self._set_encoder(self.base)
        self._states_of: dict[int, Tensor] = {}  # by slot, the encoder states of its source
        self._longest_source: int = (
            self.config.max_source_positions
            if self.takes_speech
            else getattr(self.config, "max_position_embeddings", None) or LONGEST_SOURCE
        )
        self.sources = self._new_cache(self._longest_source)
        self._source_lengths = self._idle(0)

    @torch.inference_mode(False)
    def _idle(self, slots: int) -> Tensor:
        """Return the lengths of the sources of idle slots: one token, of the block that no sequence uses."""
        return torch.ones(slots, dtype=torch.int64, device=self.device)

    @property
    def caches(self) -> list[KVCache]:
        return [self.cache, self.sources]

    def pages(self, slots: Tensor | int) -> SourcePages:
        own, source = self.cache.pages(slots), self.sources.pages(slots)
        if isinstance(slots, int):
            lengths = self._source_lengths[:slots]
        else:
            lengths = self._source_lengths.index_select(0, slots)
        return SourcePages(own.table, own.page, own.memory, source, lengths)

    def attach(self, model: Any) -> None:
        Scorer.attach(self, model)

    def detach(self) -> None:
        Scorer.detach(self)

    # Sources

    def source(self, prompt: Any) -> Source:
        source = super().source(prompt)
        if source.ids is not None and len(source) > self._longest_source:
            raise ValueError(f"prompt: got {len(source)} tokens; it must have at most {self._longest_source}")
        return source

    def demands(self, lengths: Sequence[int], sources: Sequence[Source | None]) -> list[Demand]:
        """See ``Scorer.demands``; sequences with the same source share its memory."""
        unique = {id(one.states): one for one in sources if one is not None}.values()
        tokens = [self._source_tokens(one) for one in unique]
        what = f"{sum(tokens)} tokens of the encoder's input"
        return [
            *super().demands(lengths, sources),
            Demand(what, self.sources.bytes_for(tokens), self.sources.budget),
        ]

    def _source_tokens(self, source: Source) -> int:
        return self._longest_source if self.takes_speech else min(len(source), self._longest_source)

    def prepare(self, slots: int, tokens: int) -> None:
        super().prepare(slots, tokens)
        self.sources.prepare(slots, 1)
        if (rows := len(self.sources.table)) > len(self._source_lengths):
            new = self._idle(rows)
            new[: len(self._source_lengths)] = self._source_lengths
            self._source_lengths = new

    @torch.inference_mode()
    def encode_sources(self, slots: Sequence[int], sources: Sequence[Source | None], tokens: int) -> None:
        """See ``Scorer.encode_sources``; sequences with the same source share its keys and values."""
        self.check_weights()
        pairs = [(slot, source) for slot, source in zip(slots, sources, strict=True) if source is not None]
        self.encode([source for _, source in pairs])
        self.prepare(max(slots) + 1, tokens)
        for slot, source in pairs:
            states = source.states[self.encoder][1]
            self._close_source(slot)
            try:
                self._open_source(slot, states)
            except BaseException:
                self._close_source(slot, usable=False)
                raise
            self._states_of[slot] = states
            self._source_lengths[slot] = len(states)

    def _open_source(self, slot: int, states: Tensor) -> None:
        """Let a slot share the keys and values of a source, or compute them."""
        other = next((one for one, held in self._states_of.items() if held is states), None)
        if other is not None:
            self.sources.fork(other, slot)
            return
        self.sources.open(slot, ())
        self.sources.reserve([slot], [len(states)])
        index = torch.tensor([slot], device=self.device)
        self.fused.write_source(states.to(self.device), self.sources.pages(index))
        self.sources.commit(slot, len(states))

    def _close_source(self, slot: int, usable: bool = True) -> None:
        """Let go of the source of a slot, if it has one."""
        self._states_of.pop(slot, None)
        if self.sources.is_open(slot):
            self.sources.close(slot, () if usable else None)
            self._source_lengths[slot] = 1

    def has_source(self, slot: int) -> bool:
        return slot in self._states_of

    def open(self, slot: int, prompt: Sequence[int], source: Source | None) -> int:
        """See ``Scorer.open``; every sequence needs a source, and shares no prefix with others."""
        if source is None:
            raise ValueError(f"sources: got None; {type(self.base).__name__} needs one for each sequence")
        encoded = source.states.get(self.encoder)
        if encoded is None or self._states_of.get(slot) is not encoded[1]:
            self.encode_sources([slot], [source], len(prompt))
        return self.cache.open(slot, ())

    def forget(self) -> None:
        super().forget()
        self.fused.refresh()

    def reset(self, slots: Sequence[int], texts: Sequence[Sequence[int]] | None = None) -> None:
        """Free slots. No later prompt reuses their cached tokens, which depend on the source."""
        super().reset(slots, None if texts is None else [()] * len(slots))
        for slot in slots:
            self._close_source(slot, texts is not None)

    def release(self) -> None:
        super().release()
        self._states_of.clear()
        self._source_lengths = self._idle(0)

    def greedy(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], count: int) -> Tensor:
        return Scorer.greedy(self, slots, tokens, count)

    def describe(self) -> str:
        size = self.sources.bytes_per_token / 1024
        return f"{super().describe()}, {size:.1f} KiB a token of the encoder's input"

"""A fused model as a ``Scorer``, over a paged KV cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from outpace.checks.arguments import to_device
from outpace.models.capture import Graphs
from outpace.models.causal import supported_model
from outpace.models.fused import FusedModel
from outpace.models.greedy import FEW, GreedyPasses
from outpace.models.paged import PagedCache, Pages
from outpace.models.prefill import PrefillGraphs
from outpace.models.rearranged import Rearranged
from outpace.models.scorer import CHUNK, Scorer

PAGE = 128  # tokens of a block that kernels read
SMALL_PAGE = 16  # tokens of a block that PyTorch's operations read
PADDING = -1  # position of padding


class FusedScorer(Scorer):
    """A fused model and its paged KV cache.

    Args:
        model: The model. Its weights are rearranged, and it can still be used.
    """

    cache: PagedCache
    fused: Rearranged

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = supported_model(model)
        fused = fused_model(self.base)
        self._set_up(fused)
        self._passes = GreedyPasses(fused, self.cache, self._graphs)

    def _set_up(self, fused: Rearranged) -> None:
        """Use a fused model, with an empty KV cache."""
        self.fused = fused
        self.config = self.base.config
        self.vocab_size, self.context = self.fused.vocab_size, self.fused.tokens - 1
        self.device, self.dtype = self.fused.device, self.fused.dtype
        self.has_kernels = self.fused.has_kernels
        self.cache = self._new_cache(self.fused.tokens)
        self._state = self.fused.state
        self._graphs, self._version = Graphs(self.device), self.cache.version
        self._prefills = PrefillGraphs(self._graphs)

    def _new_cache(self, tokens: int) -> PagedCache:
        """Return an empty KV cache for sequences of up to this many tokens."""
        page = PAGE if self.has_kernels else SMALL_PAGE
        return PagedCache(self.fused.shape, self.device, tokens, page, self.has_kernels)

    def pages(self, slots: Tensor | int) -> Pages:
        """Return what a forward pass of some slots reads and writes, as ``PagedCache.pages`` does."""
        return self.cache.pages(slots)

    def attach(self, model: Any) -> None:
        self.model, self.base = model, supported_model(model)

    def detach(self) -> None:
        self.model = self.base = None

    @property
    def is_current(self) -> bool:
        return self.fused.base is self.base and self.fused.is_current

    def check_weights(self) -> None:
        state = self.fused.state
        if state[:2] != self._state[:2]:
            raise self._moved()
        if state != self._state:  # weights changed in place
            self.forget()
            self._state = state

    @torch.inference_mode()
    def append(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        counts, longest = [len(new) for new in tokens], max(map(len, tokens))
        lengths = [self.cache.length(slot) for slot in slots]
        self.cache.reserve(slots, [length + count for length, count in zip(lengths, counts, strict=True)])
        ids = torch.tensor([[*new, *[0] * (longest - len(new))] for new in tokens])
        # A draft model may be fed more tokens than its context. What it then drafts is not used.
        at = (torch.tensor(lengths)[:, None] + torch.arange(longest)).clamp(max=self.fused.tokens - 1)
        at = at.where(torch.arange(longest) < torch.tensor(counts)[:, None], PADDING)
        logits = self.fused.last_logits(
            to_device(ids, self.device),
            to_device(at, self.device),
            self.pages(to_device(torch.tensor(slots), self.device)),
            to_device(torch.tensor(counts), self.device),
        )
        for slot, new in zip(slots, tokens, strict=True):
            self.cache.commit(slot, len(new), new)
        return logits

    @torch.inference_mode()
    def score(self, slots: Sequence[int], tokens: Tensor, prefill: bool = False) -> Tensor:
        n = tokens.shape[1]
        lengths = [self.cache.length(slot) for slot in slots]
        self.cache.reserve(slots, [length + n for length in lengths])
        at = (torch.tensor(lengths)[:, None] + torch.arange(n)).clamp(max=self.fused.tokens - 1)
        pages = self.pages(to_device(torch.tensor(slots), self.device))
        return self.fused.logits(tokens.to(self.device), to_device(at, self.device), pages, prefill)

    @property
    def capture_seconds(self) -> float:
        return self._graphs.capture_seconds

    def append_prompt(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor | None:
        with self._current_graphs():
            return self._prefills.append(self, slots, tokens)

    def greedy(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], count: int) -> Tensor:
        """See ``Scorer.greedy``; with kernels, the forward passes are CUDA graphs."""
        if not self.has_kernels:
            return super().greedy(slots, tokens, count)
        with self._current_graphs():
            self._append_long(slots, tokens)
            new_tokens = [new[-FEW:] for new in tokens]
            written = [len(new) + count - 1 for new in new_tokens]
            ends = [self.cache.length(slot) + size for slot, size in zip(slots, written, strict=True)]
            self.cache.reserve(slots, ends)
            found = self._passes.run(slots, new_tokens, count)
        for slot, size in zip(slots, written, strict=True):
            self.cache.commit(slot, size)
        return found

    def _append_long(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append all but the last ``FEW`` tokens of each sequence."""
        rest = {slot: new[:-FEW] for slot, new in zip(slots, tokens, strict=True) if len(new) > FEW}
        while rest:
            self._prefills.append(self, list(rest), [new[:CHUNK] for new in rest.values()])
            rest = {slot: new[CHUNK:] for slot, new in rest.items() if len(new) > CHUNK}

    @contextmanager
    def _current_graphs(self) -> Iterator[None]:
        """Use the device of the model, and no graph that reads memory which has moved."""
        if self._version != self.version:
            self._graphs.clear()
            self._version = self.version
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            yield

    def release(self) -> None:
        self._graphs.clear()
        super().release()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.fused.logits(ids, positions, self.pages(len(ids)))

    def fill(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> None:
        pages = self.pages(len(ids) if slots is None else slots)
        self.fused.fill(ids, positions, pages, prefill=slots is not None)

    def launch_once(self, B: int, n: int) -> Tensor:
        return self.fused.launch_once(B, n, self.pages(B))

    def describe(self) -> str:
        return (
            f"{type(self.base).__name__} fused, {self.dtype}, {self.device}, vocabulary {self.vocab_size}, "
            f"context {self.context}, KV cache {self.cache.describe()}"
        )


Kind = TypeVar("Kind", bound=Rearranged)


def fused_model(model: Any) -> FusedModel:
    """Return the fused model of a model of the Transformers library, which all scorers share."""
    return rearranged(model, FusedModel)


def rearranged(model: Any, kind: type[Kind]) -> Kind:
    """Return the ``kind`` of a model, which all scorers share.

    Its creation moves the model's weights, so a second one would invalidate the first.
    """
    with _lock:
        found = _rearranged.get(id(model))
        if not isinstance(found, kind) or found.base is not model or not found.is_current:
            found = _rearranged[id(model)] = kind(model)
        return found


_lock = threading.Lock()  # two threads may ask for one model
_rearranged: WeakValueDictionary[int, Rearranged] = WeakValueDictionary()  # by the id of the model

"""A fused model as a ``Scorer``, over a paged KV cache; and the choice of a model's scorer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from outpace.checks.arguments import to_device
from outpace.models.capture import Graphs
from outpace.models.causal import CausalScorer, has_adapters, positions, supported_model
from outpace.models.fused import FusedModel, has_kernels, why_not
from outpace.models.greedy import FEW, GreedyPasses
from outpace.models.paged import PagedCache
from outpace.models.prefill import PrefillGraphs
from outpace.models.scorer import CHUNK, Scorer
from outpace.models.seq2seq import Seq2SeqScorer

PAGE = 128  # tokens of a block that kernels read
SMALL_PAGE = 16  # tokens of a block that PyTorch's operations read
PADDING = -1  # position of padding


class FusedScorer(Scorer):
    """A fused model and its paged KV cache.

    Args:
        model: The model. Its weights are rearranged, and it can still be used.
    """

    cache: PagedCache

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = supported_model(model)
        self.config = self.base.config
        self.fused = fused_model(self.base)
        self.vocab_size, self.context = self.fused.vocab_size, positions(self.config)
        self.device, self.dtype = self.fused.device, self.fused.dtype
        self.has_kernels = self.fused.has_kernels
        page = PAGE if self.has_kernels else SMALL_PAGE
        self.cache = PagedCache(self.fused.shape, self.device, self.fused.tokens, page, self.has_kernels)
        self._state = self.fused.state
        self._graphs, self._version = Graphs(self.device), self.cache.version
        self._prefills = PrefillGraphs(self._graphs)
        self._passes = GreedyPasses(self.fused, self.cache, self._graphs)

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
            self.cache.pages(to_device(torch.tensor(slots), self.device)),
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
        pages = self.cache.pages(to_device(torch.tensor(slots), self.device))
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
        if self._version != self.cache.version:
            self._graphs.clear()
            self._version = self.cache.version
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            yield

    def release(self) -> None:
        self._graphs.clear()
        super().release()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.fused.logits(ids, positions, self.cache.pages(len(ids)))

    def fill(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> None:
        pages = self.cache.pages(len(ids) if slots is None else slots)
        self.fused.fill(ids, positions, pages, prefill=slots is not None)

    def launch_once(self, B: int, n: int) -> Tensor:
        return self.fused.launch_once(B, n, self.cache.pages(B))

    def describe(self) -> str:
        return (
            f"{type(self.base).__name__} fused, {self.dtype}, {self.device}, vocabulary {self.vocab_size}, "
            f"context {self.context}, KV cache {self.cache.describe()}"
        )


def scorer_of(model: Any, fused: bool = False) -> Scorer:
    """Return a scorer of a model.

    Args:
        model: A model, or a scorer. A scorer of the right kind is returned as it is.
        fused: Whether to fuse the model, if it can be.
    """
    scorer = model if isinstance(model, Scorer) else None
    if isinstance(scorer, FusedScorer) and scorer.is_current:
        return scorer
    model = model if scorer is None else scorer.model
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    wanted: type[Scorer] = Seq2SeqScorer if encodes else CausalScorer
    if fused and not encodes and why_not_fused(model) is None:
        wanted = FusedScorer
    if scorer is not None and scorer.is_current and (isinstance(scorer, wanted) or not fused):
        return scorer
    new = wanted(model)  # type: ignore[call-arg]
    new.cache.max_bytes = None if scorer is None else scorer.cache.max_bytes
    return new


def why_not_fused(model: Any) -> str | None:
    """Return the reason why forward passes of a model are not fused on its device, or None if they are."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base is not model or has_adapters(base):
        return "has adapters"
    reason = why_not(base)
    if reason is None:
        embedding = base.get_input_embeddings().weight
        if embedding.device.type != "cpu" and not has_kernels(embedding.device, embedding.dtype):
            return f"has no kernels for {embedding.dtype} on this device"
    return reason


def fused_model(model: Any) -> FusedModel:
    """Return a fused model, which all scorers share.

    Fusing moves the model's weights, so a second time would invalidate the first.
    """
    with _lock:
        fused = _fused.get(id(model))
        if fused is None or fused.base is not model or not fused.is_current:
            fused = _fused[id(model)] = FusedModel(model)
        return fused


_lock = threading.Lock()  # two threads may ask for one model
# By the id of the model
_fused: WeakValueDictionary[int, FusedModel] = WeakValueDictionary()

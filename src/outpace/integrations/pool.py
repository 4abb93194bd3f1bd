"""Decoders that are kept between calls of ``generate`` while their models exist."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.models.causal import CausalScorer, has_adapters
from outpace.models.fused_scorer import FusedScorer
from outpace.models.scorer import Scorer

MAX_DECODERS = 4  # kept per target; the least recently used one is dropped


@dataclass(frozen=True)
class Idle:
    """A decoder that no call uses. It holds no reference to its models."""

    decoder: Decoder
    draft: weakref.ref[torch.nn.Module] | None


class DecoderPool:
    """A pool of decoders, each with its KV caches and captured graphs.

    A model without other references is freed, and its decoders with it. A call gets a new decoder while
    another call uses the pooled one.
    """

    def __init__(self) -> None:
        self._idle: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, Idle]]
        self._idle = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # a model may be freed, and its decoders dropped, at any time

    @contextlib.contextmanager
    def lend(
        self, model: torch.nn.Module, draft: Any, options: Hashable, create: Callable[..., Decoder]
    ) -> Iterator[Decoder]:
        """Lend a decoder for a ``with`` block; it returns to the pool unless the block fails.

        Args:
            model: The target.
            draft: The draft model, or anything else that ``Decoder`` takes.
            options: What else distinguishes decoders of these models.
            create: Creates a decoder, if there is no idle one.
        """
        is_model = isinstance(draft, torch.nn.Module)
        key = (id(draft) if is_model else draft, options)
        if not is_model and not isinstance(draft, str):
            # The drafter is the caller's, and may hold a model. Capturing graphs for one call does not pay.
            yield create(engine=False)
            return
        with self._lock:
            idle = self._idle.get(model, {}).pop(key, None)
        decoder = None if idle is None else idle.decoder
        if idle is not None and idle.draft is not None and idle.draft() is not draft:
            decoder = None
        if decoder is None or not _reattach(decoder, [model, *([draft] if is_model else [])]):
            decoder = create()
        yield decoder  # after an error it does not return to the pool
        scorers = _scorers(decoder)
        known = type(decoder.drafter) in (ModelDrafter, LookupDrafter)
        if not known or any(type(one) not in (CausalScorer, FusedScorer) for one in scorers):
            return
        for scorer in scorers:
            scorer.detach()
        reference = weakref.ref(draft, lambda _: self._drop(key)) if is_model else None
        with self._lock:
            decoders = self._idle.setdefault(model, {})
            decoders[key] = Idle(decoder, reference)
            while len(decoders) > MAX_DECODERS:
                del decoders[next(iter(decoders))]

    def _drop(self, key: Hashable) -> None:
        """Drop the decoders of a draft model that was freed."""
        with self._lock:
            for decoders in list(self._idle.values()):
                decoders.pop(key, None)

    def clear(self) -> None:
        """Drop all idle decoders."""
        with self._lock:
            self._idle.clear()


def _scorers(decoder: Decoder) -> list[Scorer]:
    draft = None if decoder.drafter is None else decoder.drafter.scorer
    return [decoder.scorer, *([] if draft is None else [draft])]


def _reattach(decoder: Decoder, models: list[Any]) -> bool:
    """Attach a decoder to its models; return whether it still fits them."""
    for scorer, model in zip(_scorers(decoder), models, strict=True):
        scorer.attach(model)
        if has_adapters(scorer.base):  # switching adapters does not change the weights
            scorer.forget()
        base = scorer.base
        fits = scorer.config is base.config and (scorer.vocab_size, scorer.device, scorer.dtype) == (
            base.get_output_embeddings().weight.shape[0],
            base.get_input_embeddings().weight.device,
            base.dtype,
        )
        if not fits:
            return False
    return True

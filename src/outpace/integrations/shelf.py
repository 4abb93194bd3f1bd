"""Scorers between calls: set up once and stored, with their KV caches, as long as their model exists."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from outpace.draft.model import ModelDrafter
from outpace.models.causal import CausalScorer, has_adapters
from outpace.models.seq2seq import Seq2SeqScorer

Made = TypeVar("Made", CausalScorer, ModelDrafter)


class Shelf(Generic[Made]):
    """A store of one object per model, which ``make`` creates, for the next caller with the same model.

    A stored object holds no reference to its model. So a model that nobody else uses can be freed, and the
    object with it. A caller who comes while the object is lent gets a new one.
    """

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self._make: Callable[[Any], Made] = make
        self._waiting: weakref.WeakKeyDictionary[torch.nn.Module, Made] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, model: torch.nn.Module) -> Iterator[Made]:
        """Lend the object of a model inside a ``with`` block; store it after a block without error."""
        with self._lock:
            made = self._waiting.pop(model, None)
        if made is None or not _take_up(_scorer(made), model):
            made = self._make(model)
        yield made  # after an error it is not stored again
        scorer = _scorer(made)
        if isinstance(scorer, Seq2SeqScorer):  # `detach` does not remove all of its references to the model
            return
        scorer.detach()
        with self._lock:
            self._waiting[model] = made

    def clear(self) -> None:
        """Drop all stored objects."""
        with self._lock:
            self._waiting.clear()


def _scorer(made: CausalScorer | ModelDrafter) -> CausalScorer:
    return made.scorer if isinstance(made, ModelDrafter) else made


def _take_up(scorer: CausalScorer, model: Any) -> bool:
    """Attach a scorer to its model; return whether the model is still what the scorer was set up for."""
    scorer.attach(model)
    if has_adapters(scorer.base):  # switching them leaves no trace in the weights
        scorer.forget()
    return scorer.config is scorer.base.config and (scorer.vocab_size, scorer.device, scorer.dtype) == (
        scorer.base.get_output_embeddings().weight.shape[0],
        scorer.base.get_input_embeddings().weight.device,
        scorer.base.dtype,
    )

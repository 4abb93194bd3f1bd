"""Scorers between calls: set up once, and with the texts they hold, as long as the model they score with."""

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
    """Keeps one of what `make` makes of a model, for the next caller with the same model.

    While it waits it holds no model, so that a model nobody else needs can go, and takes it along. Whoever
    comes while it is lent gets one of their own.
    """

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self._make: Callable[[Any], Made] = make
        self._waiting: weakref.WeakKeyDictionary[torch.nn.Module, Made] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, model: torch.nn.Module) -> Iterator[Made]:
        with self._lock:
            made = self._waiting.pop(model, None)
        if made is None or not _take_up(_scorer(made), model):
            made = self._make(model)
        yield made  # after an error it does not come back
        scorer = _scorer(made)
        if isinstance(scorer, Seq2SeqScorer):  # what it holds of the model is more than can be taken away
            return
        scorer.detach()
        with self._lock:
            self._waiting[model] = made

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()


def _scorer(made: CausalScorer | ModelDrafter) -> CausalScorer:
    return made.scorer if isinstance(made, ModelDrafter) else made


def _take_up(scorer: CausalScorer, model: Any) -> bool:
    """Give a scorer its model back; whether it is still the model that it was set up for."""
    scorer.attach(model)
    if has_adapters(scorer.base):  # they are switched without a trace in the weights
        scorer.forget()
    return scorer.config is scorer.base.config and (scorer.vocab_size, scorer.device, scorer.dtype) == (
        scorer.base.get_output_embeddings().weight.shape[0],
        scorer.base.get_input_embeddings().weight.device,
        scorer.base.dtype,
    )

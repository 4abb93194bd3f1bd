"""Pools of scorers and drafters, which keep their KV caches between calls while their model exists."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from outpace.draft.model import ModelDrafter
from outpace.models.causal import CausalScorer, has_adapters
from outpace.models.scorer import Scorer

Pooled = TypeVar("Pooled", Scorer, ModelDrafter)


class ModelPool(Generic[Pooled]):
    """A pool with one object per model, which calls with the same model reuse.

    An idle object holds no reference to its model. So a model without other references is freed, and the
    object with it. A call gets a new object while another call uses the pooled one.

    Args:
        create: Function that creates the object of a model.
    """

    def __init__(self, create: Callable[[Any], Pooled]) -> None:
        self._create: Callable[[Any], Pooled] = create
        self._idle: weakref.WeakKeyDictionary[torch.nn.Module, Pooled] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, model: torch.nn.Module) -> Iterator[Pooled]:
        """Lend the object of a model for a ``with`` block; it returns to the pool unless the block fails."""
        with self._lock:
            pooled = self._idle.pop(model, None)
        scorer = None if pooled is None else _detachable(pooled)
        if pooled is None or scorer is None or not _reattach(scorer, model):
            pooled = self._create(model)
        yield pooled  # after an error it does not return to the pool
        scorer = _detachable(pooled)
        if scorer is None:
            return
        scorer.detach()
        with self._lock:
            self._idle[model] = pooled

    def clear(self) -> None:
        """Drop all idle objects."""
        with self._lock:
            self._idle.clear()


def _detachable(pooled: Scorer | ModelDrafter) -> CausalScorer | None:
    """Return the scorer, or None if ``detach`` does not remove all of its references to the model."""
    scorer = pooled.scorer if isinstance(pooled, ModelDrafter) else pooled
    return scorer if type(scorer) is CausalScorer else None


def _reattach(scorer: CausalScorer, model: Any) -> bool:
    """Attach a scorer to its model; return whether the model still fits the scorer."""
    scorer.attach(model)
    if has_adapters(scorer.base):  # switching adapters does not change the weights
        scorer.forget()
    return scorer.config is scorer.base.config and (scorer.vocab_size, scorer.device, scorer.dtype) == (
        scorer.base.get_output_embeddings().weight.shape[0],
        scorer.base.get_input_embeddings().weight.device,
        scorer.base.dtype,
    )

"""The graph executor of a decoder, where models and sequences allow it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from outpace.draft.base import Drafter
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.engine.graph import Engine
from outpace.engine.sequence import SequenceState
from outpace.models.causal import CausalScorer, has_adapters, version
from outpace.models.fused import FusedModel, why_not
from outpace.models.generic import GenericModel
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.verification import Rule

CACHE_GROWTH = 256  # tokens


class Engines:
    """Owner of a decoder's graph executor, which calls reuse.

    The engine is created when a call first needs it. It is created again if a call needs more slots or longer
    sequences, or if weights were moved.
    """

    def __init__(self, scorer: CausalScorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        self.scorer, self.drafter = scorer, drafter
        self.rule, self.lenience = rule, lenience
        self.engine: Engine | None = None
        self._weights: tuple[object, ...] = ()
        self._versions: tuple[int, ...] = ()
        self.unsupported_reason = self._unsupported_reason()

    def forget(self) -> None:
        """Discard the cached prefixes of all slots."""
        if self.engine is not None:
            self.engine.forget()

    def engine_for(self, rows: Sequence[SequenceState], slots: int, max_tokens: int) -> Engine | None:
        """Return an engine for sequences of up to ``max_tokens``, or None if it cannot decode them."""
        self.unsupported_reason = self._unsupported_reason()  # adapters may have been added or removed
        if self.unsupported_reason is not None or not self._share_sampling(rows):
            return None
        try:
            return self._get(slots, max_tokens)
        except torch.OutOfMemoryError:
            self.engine = None
            warnings.warn(
                f"engine: a KV cache of {slots} sequences of {max_tokens} tokens does not fit in memory; "
                "this call uses the eager executor, which is slower; reduce batch_size or max_new_tokens",
                stacklevel=5,
            )
            return None

    @staticmethod
    def _share_sampling(rows: Sequence[SequenceState]) -> bool:
        """Return whether the engine supports the sampling parameters and outputs of these sequences.

        All sequences must have equal sampling parameters, also for drafting. Penalties, logit bias,
        processors, logprobs, scores and logits need the host after each token, so they are not supported.
        """
        first = rows[0]
        return all(
            row.sampling == first.sampling
            and (row.draft_sampling is None or row.draft_sampling == row.sampling)
            and not (row.sampling.logit_bias or row.sampling.reads_prefix)
            and row.top is None
            and row.scores is None
            and row.logits is None
            for row in rows
        )

    @torch.inference_mode(False)  # the engine's tensors are used inside and outside that mode
    def _get(self, slots: int, max_tokens: int) -> Engine:
        weights = self._fingerprint()
        engine = self.engine
        fits = engine is not None and slots <= engine.slots and max_tokens <= engine.max_tokens
        if engine is None or weights != self._weights or not fits:
            if engine is not None and weights == self._weights:
                slots, max_tokens = max(slots, engine.slots), max(max_tokens, engine.max_tokens)
            self.engine = engine = None  # frees its memory first
            max_tokens = -(-max_tokens // CACHE_GROWTH) * CACHE_GROWTH
            converted = {model: _converted(model) for model in self._models()}  # both may be the same model
            models = [converted[model] for model in self._models()]
            self.engine = engine = Engine(
                models[0],
                models[1] if len(models) > 1 else None,
                slots,
                max_tokens,
                rule=self.rule,
                lenience=self.lenience,
                lookup_ngrams=self._lookup_ngrams(),
            )
            self._weights = self._fingerprint()
        versions = self._weight_versions()
        if versions != self._versions:
            engine.forget()
            self._versions = versions
        return engine

    def _weight_versions(self) -> tuple[int, ...]:
        """Return values that change when weights change in place, which makes KV caches stale."""
        return tuple(version(weight) for model in self._models() for weight in model.parameters())

    def _fingerprint(self) -> tuple[object, ...]:
        return tuple(value for model in self._models() for value in _fingerprint(model))

    def describe(self) -> str:
        """Describe the engine in one line, for users."""
        if self.unsupported_reason is not None:
            return f"none: {self.unsupported_reason}"
        kind = "one CUDA graph per step" if self.scorer.device.type == "cuda" else "without graphs"
        reasons = [(type(model).__name__, why_not(model)) for model in self._models()]
        models = "; ".join(
            f"{name} fused" if reason is None else f"{name} not fused, since it {reason}"
            for name, reason in reasons
        )
        if not self.drafts_in_graph:
            models += f"; {type(self.drafter).__name__} drafts on the host"
        return (
            f"{kind}, if all sequences have equal sampling parameters without penalties, logit bias and "
            f"processors, and return no logprobs, scores or logits ({models})"
        )

    @property
    def drafts_in_graph(self) -> bool:
        """True if drafting is part of the graph; otherwise draft tokens come from the host."""
        has_model = isinstance(self.drafter, ModelDrafter)
        return self.drafter is None or has_model or self._lookup_ngrams() is not None

    def _models(self) -> list[torch.nn.Module]:
        drafts = [self.drafter.scorer.base] if isinstance(self.drafter, ModelDrafter) else []
        return [self.scorer.base, *drafts]

    def _lookup_ngrams(self) -> tuple[int, int] | None:
        """Return ``min_ngram`` and ``max_ngram`` if the drafter is prompt lookup, else None."""
        drafter = self.drafter
        return (drafter.min_ngram, drafter.max_ngram) if type(drafter) is LookupDrafter else None

    def _unsupported_reason(self) -> str | None:
        if self.rule.name == "rejection":
            return "it does not support rule rejection, which is for comparison only"
        drafts = [self.drafter.scorer] if isinstance(self.drafter, ModelDrafter) else []
        for scorer in (self.scorer, *drafts):
            if isinstance(scorer, Seq2SeqScorer):
                return f"{type(scorer.base).__name__} has an encoder"
            if scorer.model is not scorer.base or has_adapters(scorer.base):
                return f"{type(scorer.base).__name__} has adapters, whose changes the engine cannot detect"
            if {parameter.device for parameter in scorer.base.parameters()} != {self.scorer.device}:
                return "the models' weights are on several devices"
        return None


def _converted(model: torch.nn.Module) -> FusedModel | GenericModel:
    """Return a model in the engine's form, which all decoders share.

    The conversion moves the model's weights, so a second conversion would invalidate the first.
    """
    converted = _models.get(_fingerprint(model))
    if converted is None:
        converted = FusedModel(model) if why_not(model) is None else GenericModel(model)
        _models[_fingerprint(model)] = converted
    return converted


def _fingerprint(model: torch.nn.Module) -> tuple[object, ...]:
    """Return values that change if weights move, or if a model can no longer be fused."""
    return why_not(model), *(parameter.data_ptr() for parameter in model.parameters())


_models: WeakValueDictionary[tuple[object, ...], FusedModel | GenericModel] = WeakValueDictionary()

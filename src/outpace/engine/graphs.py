"""Engines of a decoder: the graph executor, where models and sequences allow it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from outpace.draft.base import Drafter
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.engine.graph import Engine
from outpace.engine.sequence import Row
from outpace.models.causal import CausalScorer, has_adapters, version
from outpace.models.fused import FusedModel, why_not
from outpace.models.generic import GenericModel
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.verification import Rule

STEP = 256  # tokens that a KV cache grows by


class Engines:
    """An engine that is created on demand and reused while it is large enough."""

    def __init__(self, scorer: CausalScorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        self.scorer, self.drafter = scorer, drafter
        self.rule, self.lenience = rule, lenience
        self.engine: Engine | None = None
        self._weights: tuple[object, ...] = ()
        self._versions: tuple[int, ...] = ()
        self.why_not = self._why_not()

    def take(self, rows: Sequence[Row], slots: int, tokens: int) -> Engine | None:
        """Return an engine for sequences of up to ``tokens`` tokens, or None if it cannot decode them."""
        self.why_not = self._why_not()  # adapters and hooks come and go
        if self.why_not is not None or not self._alike(rows):
            return None
        try:
            return self._get(slots, tokens)
        except torch.OutOfMemoryError:
            self.engine = None
            warnings.warn(
                f"no engine: a cache of {slots} rows of {tokens} tokens does not fit beside the models",
                stacklevel=5,
            )
            return None

    @staticmethod
    def _alike(rows: Sequence[Row]) -> bool:
        """Return whether all sequences are sampled alike, without need of the host between two tokens."""
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

    @torch.inference_mode(False)  # its tensors are used inside and outside that mode
    def _get(self, rows: int, tokens: int) -> Engine:
        weights = self._fingerprint()
        engine = self.engine
        if engine is None or weights != self._weights or rows > engine.rows or tokens > engine.tokens:
            if engine is not None and weights == self._weights:
                rows, tokens = max(rows, engine.rows), max(tokens, engine.tokens)
            self.engine = engine = None  # frees its memory first
            tokens = -(-tokens // STEP) * STEP
            each = {model: _rearranged(model) for model in self._models()}  # two may be the same
            models = [each[model] for model in self._models()]
            self.engine = engine = Engine(
                models[0],
                models[1] if len(models) > 1 else None,
                rows,
                tokens,
                rule=self.rule,
                lenience=self.lenience,
                copies=self._copies(),
            )
            self._weights = self._fingerprint()
        versions = self._changes()
        if versions != self._versions:
            engine.forget()
            self._versions = versions
        return engine

    def _changes(self) -> tuple[int, ...]:
        """Return values that change when weights change in place, which makes KV caches stale."""
        return tuple(version(one) for model in self._models() for one in model.parameters())

    def _fingerprint(self) -> tuple[object, ...]:
        return tuple(place for model in self._models() for place in _places(model))

    def describe(self) -> str:
        """Describe the engine in one line, for users."""
        if self.why_not is not None:
            return f"none: {self.why_not}"
        kind = "one CUDA graph an iteration" if self.scorer.device.type == "cuda" else "without graphs"
        reasons = [(type(model).__name__, why_not(model)) for model in self._models()]
        passes = "; ".join(
            f"{name} rearranged" if why is None else f"{name} as it is, since it {why}"
            for name, why in reasons
        )
        if not self.inside:
            passes += f"; {type(self.drafter).__name__} drafts on the host"
        return f"{kind}, for rows drawn alike, without penalties, processors or logprobs ({passes})"

    @property
    def inside(self) -> bool:
        """True if drafting is part of a step; otherwise draft tokens come from the host."""
        return self.drafter is None or isinstance(self.drafter, ModelDrafter) or self._copies() is not None

    def _models(self) -> list[torch.nn.Module]:
        drafts = [self.drafter.scorer.base] if isinstance(self.drafter, ModelDrafter) else []
        return [self.scorer.base, *drafts]

    def _copies(self) -> tuple[int, int] | None:
        """Return the least and the most tokens that prompt lookup matches, if it alone drafts."""
        one = self.drafter
        return (one.min_ngram, one.max_ngram) if type(one) is LookupDrafter else None

    def _why_not(self) -> str | None:
        if self.rule.name == "rejection":
            return "rule rejection is for comparison only"
        drafts = [self.drafter.scorer] if isinstance(self.drafter, ModelDrafter) else []
        for scorer in (self.scorer, *drafts):
            if isinstance(scorer, Seq2SeqScorer):
                return f"{type(scorer.base).__name__} has an encoder"
            if scorer.model is not scorer.base or has_adapters(scorer.base):
                return f"{type(scorer.base).__name__} has adapters, which can be switched unseen"
            if {parameter.device for parameter in scorer.base.parameters()} != {self.scorer.device}:
                return "the models' weights lie on several devices"
        return None


def _rearranged(model: torch.nn.Module) -> FusedModel | GenericModel:
    """Return the engine's form of a model, one for all decoders.

    Rearranging moves the model's weights, so a second form would undo the first.
    """
    made = _made.get(_places(model))
    if made is None:
        made = FusedModel(model) if why_not(model) is None else GenericModel(model)
        _made[_places(model)] = made
    return made


def _places(model: torch.nn.Module) -> tuple[object, ...]:
    """Return values that change when weights move, or a model can no longer be rearranged."""
    return why_not(model), *(parameter.data_ptr() for parameter in model.parameters())


_made: WeakValueDictionary[tuple[object, ...], FusedModel | GenericModel] = WeakValueDictionary()

"""Which engine a decoder has, if its models and rows are such that there can be one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from outpace.draft.base import Drafter
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.models.causal import CausalScorer, has_adapters, version
from outpace.models.compiled import Engine
from outpace.models.fused import FusedModel, why_not
from outpace.models.generic import GenericModel
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.rows import Row
from outpace.verify import Rule

STEP = 256  # tokens that a cache grows by


class Engines:
    """Makes an engine when one is asked for, and keeps it while it is large enough."""

    def __init__(self, scorer: CausalScorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        self.scorer, self.drafter = scorer, drafter
        self.rule, self.lenience = rule, lenience
        self._engine: Engine | None = None
        self._weights: tuple[object, ...] = ()
        self._versions: tuple[int, ...] = ()
        self.why_not = self._why_not()

    def take(self, rows: Sequence[Row], slots: int, tokens: int) -> Engine | None:
        """One with room for so many texts of so many tokens, if these rows can be decoded by it."""
        self.why_not = self._why_not()  # adapters and hooks come and go
        if self.why_not is not None or not self._alike(rows):
            return None
        try:
            return self._get(slots, tokens)
        except torch.OutOfMemoryError:
            self._engine = None
            warnings.warn(
                f"no engine: a cache of {slots} rows of {tokens} tokens does not fit beside the models",
                stacklevel=5,
            )
            return None

    @staticmethod
    def _alike(rows: Sequence[Row]) -> bool:
        """Whether rows are drawn alike, with nothing that needs the host between two tokens."""
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

    @torch.inference_mode(False)  # what is made here is used in that mode and out of it
    def _get(self, rows: int, tokens: int) -> Engine:
        weights = self._fingerprint()
        engine = self._engine
        if engine is None or weights != self._weights or rows > engine.rows or tokens > engine.tokens:
            if engine is not None and weights == self._weights:
                rows, tokens = max(rows, engine.rows), max(tokens, engine.tokens)
            self._engine = engine = None  # its memory first
            tokens = -(-tokens // STEP) * STEP
            each = {model: _rearranged(model) for model in self._models()}  # which may be the same
            models = [each[model] for model in self._models()]
            self._engine = engine = Engine(
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
        """Change when weights are changed where they lie: then what the caches hold is no longer theirs."""
        return tuple(version(one) for model in self._models() for one in model.parameters())

    def _fingerprint(self) -> tuple[object, ...]:
        return tuple(place for model in self._models() for place in _places(model))

    def describe(self) -> str:
        """One line for a user."""
        if self.why_not is not None:
            return f"none: {self.why_not}"
        kind = "one CUDA graph an iteration" if self.scorer.device.type == "cuda" else "without graphs"
        reasons = [(type(model).__name__, why_not(model)) for model in self._models()]
        passes = "; ".join(
            f"{name} rearranged" if why is None else f"{name} as it is, since it {why}"
            for name, why in reasons
        )
        if not self.inside:
            passes += f"; {type(self.drafter).__name__} guesses on the host"
        return f"{kind}, for rows drawn alike, without penalties, processors or logprobs ({passes})"

    @property
    def inside(self) -> bool:
        """Whether guessing is part of an iteration; otherwise guesses come from the host."""
        return self.drafter is None or isinstance(self.drafter, ModelDrafter) or self._copies() is not None

    def _models(self) -> list[torch.nn.Module]:
        drafts = [self.drafter.scorer.base] if isinstance(self.drafter, ModelDrafter) else []
        return [self.scorer.base, *drafts]

    def _copies(self) -> tuple[int, int] | None:
        """What must be alike for a copy, where the drafter copies and nothing else."""
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
    """One for all decoders of a model: rearranging moves its weights, and each would undo the others'."""
    made = _made.get(_places(model))
    if made is None:
        made = FusedModel(model) if why_not(model) is None else GenericModel(model)
        _made[_places(model)] = made
    return made


def _places(model: torch.nn.Module) -> tuple[object, ...]:
    """Change when weights lie elsewhere, or a model can no longer be rearranged."""
    return why_not(model), *(parameter.data_ptr() for parameter in model.parameters())


_made: WeakValueDictionary[tuple[object, ...], FusedModel | GenericModel] = WeakValueDictionary()

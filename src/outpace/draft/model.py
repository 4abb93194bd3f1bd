"""Drafter that runs a smaller model, one token after another, with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.draft.base import Draft, Drafter, DraftSampler, DraftTensors, GraphDraft, GraphState, State
from outpace.draft.graph_sampler import GraphSampler
from outpace.models.choice import scorer_of
from outpace.models.scorer import Scorer
from outpace.models.source import Source

PADDING = 1024  # largest difference by padding between two models' vocabularies of one tokenizer
INSTEAD = "outpace.TextDrafter(model, tokenizer, target_tokenizer) drafts through text"


class ModelDrafter(Drafter):
    """Drafter with any supported model, on the model's own device.

    Args:
        model: The draft model.
        tokenizer: Tokenizer of the draft model, optional. With it, a target with another tokenizer is
            refused.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.scorer: Scorer = scorer_of(model)
        self.tokenizer = tokenizer
        self.vocab_size = self.scorer.vocab_size
        self._texts: dict[int, Sequence[int]] = {}  # by slot
        self._proposed: list[tuple[int, int]] = []  # slots last proposed for, and their lengths then
        self._unusable: list[bool] = []  # which of them may have NaN in the cache

    @torch.inference_mode()
    def propose(self, state: State, g: int) -> Draft:
        self._proposed = []
        # A sequence may outgrow this model's context before the target's. The last draft token is not fed.
        lengths = [min(g, max(0, self.scorer.context - len(text) + 1)) for text in state.tokens]
        g = max(lengths)
        if g == 0:
            return replace(Draft.chosen([[] for _ in state.slots], state.device), steps=0)
        logits = self._catch_up(state)
        sampler = DraftSampler(state, g)
        for i in range(g):
            tokens = sampler.sample_next(logits.to(state.device))
            if i < g - 1:
                fed = tokens.to(self.scorer.device)
                if self.vocab_size < state.vocab_size:
                    fed = fed.masked_fill(fed >= self.vocab_size, 0)
                logits = self.scorer.score(state.slots, fed[:, None])[:, 0]
                for slot in state.slots:
                    self.scorer.cache.commit(slot, 1)
        draft = sampler.draft(lengths)
        num_sampled = len(sampler.tokens)
        self._unusable = [
            usable < min(length, num_sampled) for usable, length in zip(sampler.usable, lengths, strict=True)
        ]
        return draft

    def _catch_up(self, state: State) -> Tensor:
        """Return the logits after each sequence, and add the tokens that the KV cache lacks."""
        self._proposed = [(row, len(text)) for row, text in zip(state.slots, state.tokens, strict=True)]
        new, cache = [], self.scorer.cache
        for row, text in zip(state.slots, state.tokens, strict=True):
            self._texts[row] = text
            rest = text[cache.length(row) :] if cache.is_open(row) else text
            new.append(self.known(rest))
        return feed(self.scorer, state.slots, new, state.sources)

    def known(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens with 0 for those that the draft model has no embedding for.

        This gives a worse draft, not an error.
        """
        return [token if token < self.vocab_size else 0 for token in tokens]

    def commit(self, accepted: Tensor, next_token: Tensor) -> None:
        """Remove rejected draft tokens from the KV cache.

        After a full acceptance the cache lacks the last draft token, which was never fed.
        """
        if not self._proposed:
            return
        for (row, length), num_accepted, has_nan in zip(
            self._proposed, accepted.tolist(), self._unusable, strict=True
        ):
            self.scorer.cache.truncate(row, length + num_accepted)
            if has_nan:  # a mask does not hide NaN left in the KV cache
                self.scorer.reset([row])

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self.scorer.cache.is_open(slot):
                self.scorer.reset([slot], [self.known(self._texts.pop(slot, ()))])

    def in_graph(self) -> GraphDraft | None:
        return ModelGraphDraft(self.scorer)

    def check(self, target: Scorer, tokenizer: Any) -> None:
        """Check that the target has the same tokenizer.

        Raises:
            ValueError: The tokenizers differ. Without both tokenizers the vocabulary sizes decide.
        """
        if tokenizer is not None and self.tokenizer is not None:
            if not same_tokenizer(tokenizer, self.tokenizer):
                num_shared, size = num_shared_tokens(tokenizer, self.tokenizer), len(tokenizer.get_vocab())
                raise ValueError(
                    f"draft: got a model whose tokenizer shares {num_shared} of the target's {size} token "
                    f"ids; it must have the target's tokenizer; {INSTEAD}"
                )
        elif abs(self.vocab_size - target.vocab_size) > PADDING:
            raise ValueError(
                f"draft: got a model of {self.vocab_size} tokens for a target of {target.vocab_size}; it "
                f"must have the target's tokenizer; {INSTEAD}"
            )

    def describe(self) -> str:
        """Return a description of the drafter and its model."""
        return f"{type(self).__name__}: {self.scorer.describe()}"


class ModelGraphDraft(GraphDraft):
    """Drafting with a model inside a graph."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer: Scorer = scorer

    def propose(self, state: GraphState, g: int) -> DraftTensors:
        """See ``GraphDraft.propose``.

        The first forward pass is over the last two tokens, since the KV cache may lack both.
        """
        positions = state.positions.clamp(max=self.scorer.context)
        ids, sampler = self._known(state.last, state.vocab_size), GraphSampler(state)
        for i in range(g):
            at = positions[:, :2] if i == 0 else positions[:, i + 1 : i + 2]
            token = sampler.sample_next(self.scorer.forward(ids, at))
            ids = self._known(token[:, None], state.vocab_size)
        return sampler.draft()

    def launch_once(self, state: GraphState, g: int) -> DraftTensors | None:
        if g == 0:
            return None
        self.scorer.launch_once(len(state.lengths), 1)
        q = self.scorer.launch_once(len(state.lengths), 2)
        if q is None:
            return None
        sampler = GraphSampler(state)
        sampler.sample_next(q)
        return sampler.repeated(g)

    def _known(self, ids: Tensor, vocab_size: int) -> Tensor:
        """Return tokens with 0 for those that the draft model has no embedding for."""
        known = self.scorer.vocab_size
        return ids if known >= vocab_size else ids.masked_fill(ids >= known, 0)


def feed(
    scorer: Scorer,
    slots: Sequence[int],
    tokens: Sequence[Sequence[int]],
    sources: Sequence[Source | None] = (),
) -> Tensor:
    """Return the logits after each sequence's new tokens, ``[R, V]``.

    Slots without a sequence are prefilled.

    Args:
        scorer: The model.
        slots: Slot of each sequence.
        tokens: New tokens of each sequence.
        sources: Encoder input of each sequence.
    """
    continued = [i for i, slot in enumerate(slots) if scorer.cache.is_open(slot)]
    new = [i for i, slot in enumerate(slots) if not scorer.cache.is_open(slot)]
    logits = []
    if continued:
        logits.append(scorer.append([slots[i] for i in continued], [tokens[i] for i in continued]))
    if new:
        new_sources = [sources[i] if sources else None for i in new]
        scorer.encode_sources([slots[i] for i in new], new_sources, max(len(tokens[i]) for i in new))
        logits.append(scorer.prefill([slots[i] for i in new], [tokens[i] for i in new], new_sources))
    if len(logits) == 1:
        return logits[0]
    order = [*continued, *new]
    return torch.cat(logits)[[order.index(i) for i in range(len(slots))]]


def num_shared_tokens(tokenizer: Any, other: Any) -> int:
    """Return the number of tokens that have the same id in both tokenizers."""
    other_vocab = other.get_vocab()
    return sum(other_vocab.get(token) == id for token, id in tokenizer.get_vocab().items())


def same_tokenizer(tokenizer: Any, other: Any) -> bool:
    """Return whether two tokenizers are the same, but for a few added tokens."""
    if tokenizer is other:
        return True
    return num_shared_tokens(tokenizer, other) >= 0.99 * min(
        len(tokenizer.get_vocab()), len(other.get_vocab())
    )

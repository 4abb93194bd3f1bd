"""Drafter that runs a smaller model, one token after another, with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.draft.base import Draft, DraftSampler, State
from outpace.models.causal import CausalScorer
from outpace.models.seq2seq import scorer_of
from outpace.models.source import Source

PADDING = 1024  # largest difference by padding between two models' vocabularies of one tokenizer
INSTEAD = "outpace.TextDrafter(model, tokenizer, target_tokenizer) drafts through text"


class ModelDrafter:
    """Drafter with any supported model, on the model's own device.

    Args:
        model: The draft model.
        tokenizer: Tokenizer of the draft model, optional. With it, a target with another tokenizer is
            refused.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.scorer = scorer_of(model)
        self.tokenizer = tokenizer
        self.vocab_size = self.scorer.vocab_size
        self._texts: dict[int, Sequence[int]] = {}  # by slot
        self._proposed: list[tuple[int, int]] = []  # slots last proposed for, and their lengths then
        self._unusable: list[bool] = []  # which of them may have NaN in the cache

    @torch.inference_mode()
    def propose(self, state: State, g: int) -> Draft:
        """See ``Drafter.propose``."""
        self._proposed = []
        # A sequence may outgrow this model's context before the target's. The last draft token is not fed.
        lengths = [min(g, max(0, self.scorer.context - len(text) + 1)) for text in state.tokens]
        g = max(lengths)
        if g == 0:
            return replace(Draft.chosen([[] for _ in state.slots], state.device), steps=0)
        logits = self._catch_up(state)
        sampler = DraftSampler(state, g)
        for i in range(g):
            logits = logits.to(state.device)
            if sampler.enough(logits):
                break
            tokens = sampler.sample_next(logits)
            if i < g - 1:
                fed = tokens.to(self.scorer.device)
                if self.vocab_size < state.vocab_size:
                    fed = fed.clamp(max=self.vocab_size - 1)
                logits = self.scorer.score(state.slots, fed[:, None])[:, 0]
                self.scorer.commit(state.slots, [1] * len(state.slots))
        draft = sampler.draft(lengths)
        num_sampled = len(sampler.tokens)
        self._unusable = [
            usable < min(length, num_sampled) for usable, length in zip(sampler.usable, lengths, strict=True)
        ]
        return draft

    def reserve(self, rows: int, tokens: int) -> None:
        """Allocate the KV cache at once rather than in steps."""
        self.scorer.reserve(rows, tokens)

    def _catch_up(self, state: State) -> Tensor:
        """Return the logits after each sequence, and add the tokens that the KV cache lacks."""
        self._proposed = [(row, len(text)) for row, text in zip(state.slots, state.tokens, strict=True)]
        prefilled = set(self._texts)
        new = []
        for row, text in zip(state.slots, state.tokens, strict=True):
            self._texts[row] = text
            # A token that this model has no embedding for becomes 0: a worse draft, not an error.
            rest = text[self.scorer.length(row) :] if row in prefilled else text
            new.append([t if t < self.vocab_size else 0 for t in rest])
        return feed(self.scorer, state.slots, new, prefilled, state.sources)

    def commit(self, accepted: Tensor, next_token: Tensor) -> None:
        """Remove rejected draft tokens from the KV cache.

        After a full acceptance the cache lacks the last draft token, which was never fed.
        """
        if not self._proposed:
            return
        for (row, length), num_accepted, has_nan in zip(
            self._proposed, accepted.tolist(), self._unusable, strict=True
        ):
            self.scorer.truncate([row], [length + num_accepted])
            if has_nan:  # a mask does not hide NaN left in the KV cache
                self.scorer.reset([row])
                del self._texts[row]

    def reset(self, slots: Sequence[int]) -> None:
        """See ``Drafter.reset``."""
        for slot in slots:
            if slot in self._texts:
                self.scorer.reset([slot], [self._texts.pop(slot)])

    def check(self, vocab_size: int, tokenizer: Any) -> None:
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
        elif abs(self.vocab_size - vocab_size) > PADDING:
            raise ValueError(
                f"draft: got a model of {self.vocab_size} tokens for a target of {vocab_size}; it must have "
                f"the target's tokenizer; {INSTEAD}"
            )

    def forget(self) -> None:
        """Discard the cached tokens of earlier sequences, and pack the weights again if they were packed."""
        self.scorer.forget()
        self.scorer.repack()

    def describe(self) -> str:
        """Return a description of the drafter and its model."""
        return f"{type(self).__name__}: {self.scorer.describe()}"


def feed(
    scorer: CausalScorer,
    rows: Sequence[int],
    tokens: Sequence[Sequence[int]],
    prefilled: Container[int],
    sources: Sequence[Source | None] = (),
) -> Tensor:
    """Return the logits after each sequence's new tokens, ``[R, V]``.

    Args:
        scorer: The model.
        rows: Slot of each sequence.
        tokens: New tokens of each sequence.
        prefilled: Slots that are already prefilled. The others are prefilled now.
        sources: Encoder input of each sequence.
    """
    continued = [i for i, row in enumerate(rows) if row in prefilled]
    new = [i for i, row in enumerate(rows) if row not in prefilled]
    logits = []
    if continued:
        logits.append(scorer.append([rows[i] for i in continued], [tokens[i] for i in continued]))
    if new:
        new_sources = [sources[i] if sources else None for i in new]
        logits.append(scorer.prefill([rows[i] for i in new], [tokens[i] for i in new], new_sources))
    if len(logits) == 1:
        return logits[0]
    order = [*continued, *new]
    return torch.cat(logits)[[order.index(i) for i in range(len(rows))]]


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

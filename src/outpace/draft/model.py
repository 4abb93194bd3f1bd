"""A smaller model drafts, one token after another, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.draft.base import Draft, Draws, State
from outpace.models.seq2seq import scorer_of

PADDING = 1024  # vocabularies of one tokenizer, padded for two models, differ by less


class ModelDrafter:
    """Drafts with any supported causal model, on its own device.

    The tokenizer is optional; with it, a draft whose tokenizer is not the target's is refused.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.scorer = scorer_of(model)
        self.tokenizer = tokenizer
        self.vocab_size = self.scorer.vocab_size
        self._texts: dict[int, Sequence[int]] = {}  # by slot
        self._proposed: list[tuple[int, int]] = []  # slots last proposed for, and their texts' lengths then
        self._unusable: list[bool] = []  # which of them may have NaN in the cache

    @torch.inference_mode()
    def propose(self, state: State, g: int) -> Draft:
        self._proposed = []
        # A text may outgrow this model's context before the target's. The last drafted token is not fed.
        lengths = [min(g, max(0, self.scorer.context - len(text) + 1)) for text in state.tokens]
        g = max(lengths)
        if g == 0:
            return Draft.chosen([[] for _ in state.rows], state.device)
        logits = self._catch_up(state)
        draws = Draws(state, g)
        for i in range(g):
            tokens = draws.take(logits.to(state.device))
            if i < g - 1:
                fed = tokens.to(self.scorer.device)
                if self.vocab_size < state.vocab_size:
                    fed = fed.clamp(max=self.vocab_size - 1)
                logits = self.scorer.score(state.rows, fed[:, None])[:, 0]
                self.scorer.commit(state.rows, [1] * len(state.rows))
        draft = draws.draft(lengths)
        self._unusable = [usable < length for usable, length in zip(draws.usable, lengths, strict=True)]
        return draft

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room in the cache at once rather than in steps."""
        self.scorer.reserve(rows, tokens)

    def _catch_up(self, state: State) -> Tensor:
        """Logits after each row's text, of which the cache may lack any number of tokens."""
        self._proposed = [(row, len(text)) for row, text in zip(state.rows, state.tokens, strict=True)]
        missing: dict[int, list[int]] = {}
        begun: dict[int, list[int]] = {}
        sources = dict(zip(state.rows, state.sources, strict=True)) if state.sources else {}
        for row, text in zip(state.rows, state.tokens, strict=True):
            known = row in self._texts
            self._texts[row] = text
            # A token that this model has no embedding for becomes 0: a poorer guess, not an error.
            new = text[self.scorer.length(row) :] if known else text
            (missing if known else begun)[row] = [t if t < self.vocab_size else 0 for t in new]
        logits = []
        if missing:
            logits.append(self.scorer.append(list(missing), list(missing.values())))
        if begun:
            theirs = [sources.get(row) for row in begun]
            logits.append(self.scorer.prefill(list(begun), list(begun.values()), theirs))
        if len(logits) == 1:
            return logits[0]
        place = {row: i for i, row in enumerate([*missing, *begun])}
        return torch.cat(logits)[[place[row] for row in state.rows]]

    def commit(self, accepted: Tensor, next_token: Tensor) -> None:
        """Lost drafts leave the cache; after a full acceptance it lacks the last one, which was never fed."""
        if not self._proposed:
            return
        for (row, length), kept, wipe in zip(self._proposed, accepted.tolist(), self._unusable, strict=True):
            self.scorer.truncate([row], [length + kept])
            if wipe:  # NaN in a cache outlives rollback
                self.scorer.reset([row])
                del self._texts[row]

    def reset(self, rows: Sequence[int]) -> None:
        for row in rows:
            if row in self._texts:
                self.scorer.reset([row], [self._texts.pop(row)])

    def check(self, vocab_size: int, tokenizer: Any) -> None:
        """Refuse a target that speaks another language."""
        if tokenizer is not None and self.tokenizer is not None:
            ours_by_id, theirs_by_id = tokenizer.get_vocab(), self.tokenizer.get_vocab()
            same = sum(theirs_by_id.get(token) == id for token, id in ours_by_id.items())
            if same < 0.99 * min(len(ours_by_id), len(theirs_by_id)):
                raise ValueError(
                    f"drafter: its tokenizer is another one: {same} of the target's {len(ours_by_id)} tokens "
                    "have the same id there; a draft must share the target's"
                )
        elif abs(self.vocab_size - vocab_size) > PADDING:
            raise ValueError(
                f"drafter: it knows {self.vocab_size} tokens and the target {vocab_size}: more than padding "
                "apart, so their tokenizers differ; a draft must share the target's"
            )

    def forget(self) -> None:
        """Keep nothing of earlier texts, nor of weights."""
        self.scorer.forget()
        self.scorer.repack()

    def describe(self) -> str:
        return f"{type(self).__name__}: {self.scorer.describe()}"

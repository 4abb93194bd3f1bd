"""The interface between the iteration and whatever scores: a model and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outpace.models.source import Source


class Scorer(Protocol):
    """Scores tokens after a committed text per row.

    Rows are named by slots, small ints that the caller picks and may use again after `reset`. A row has a
    committed text; `score` looks past it without committing, `commit` moves its end, so that a lost draft
    costs nothing but the move.
    """

    vocab_size: int
    context: int  # most tokens a row may have
    device: torch.device  # where logits come out

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for slots 0..rows-1 of that many tokens each, so that it need not be made in steps."""

    def prefill(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Source | None] = (),
    ) -> Tensor:
        """Begin rows with these tokens, committed; logits `[R, V]` after the last. What a row or another
        held of the same beginning is used again. Sources are what encoder-decoder models write about."""

    def append(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Commit at least one more token a row, not the same number for each; logits `[R, V]` after the
        last."""

    def score(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Logits `[R, n, V]` after each of tokens `[R, n]`, which follow the committed text."""

    def commit(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """The first counts[r] of the tokens just scored belong to the text."""

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Go back to a text of at most so many tokens."""

    def length(self, row: int) -> int:
        """Tokens committed."""

    def reset(self, rows: Sequence[int], texts: Sequence[Sequence[int]] | None = None) -> None:
        """Rows are free. With the texts they had, what they hold may serve a later prompt; without, it is
        wiped."""

    def describe(self) -> str:
        """One line for a user: what scores, where, and what its cache costs."""

"""The interface between the decode step and the model, with its KV cache, that scores its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outpace.models.source import Source


class Scorer(Protocol):
    """Interface that scores tokens after the committed tokens of each sequence.

    Slots name the sequences. They are small ints that the caller picks and may use again after ``reset``.
    Each sequence has committed tokens. ``score`` looks past them without committing, and ``commit`` moves
    their end. So a rejected draft costs nothing but the move.

    Attributes:
        vocab_size: Size of the vocabulary.
        context: Maximum number of tokens of a sequence.
        device: Device of the logits.
    """

    vocab_size: int
    context: int
    device: torch.device

    def reserve(self, rows: int, tokens: int) -> None:
        """Reserve the KV cache once, so that it does not grow in steps.

        Args:
            rows: Number of slots, from 0 to ``rows - 1``.
            tokens: Tokens per slot.
        """

    def prefill(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Source | None] = (),
    ) -> Tensor:
        """Prefill slots with prompts, and commit them.

        Cached tokens of the same beginning are reused, of this slot or another.

        Args:
            rows: Slots of the sequences.
            prompts: Token ids of each sequence.
            sources: Encoder inputs, for encoder-decoder models.

        Returns:
            Logits ``[R, V]`` after the last token of each prompt.
        """

    def append(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Commit at least one more token per sequence; the number may differ between sequences.

        Args:
            rows: Slots of the sequences.
            tokens: New token ids of each sequence.

        Returns:
            Logits ``[R, V]`` after the last token of each sequence.
        """

    def score(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Score tokens that follow the committed ones, without committing them.

        Args:
            rows: Slots of the sequences.
            tokens: Token ids ``[R, n]``.

        Returns:
            Logits ``[R, n, V]`` after each token.
        """

    def commit(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Commit the first ``counts[r]`` of the tokens just scored."""

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten each sequence to at most ``lengths[r]`` committed tokens."""

    def length(self, row: int) -> int:
        """Return the number of committed tokens."""

    def reset(self, rows: Sequence[int], texts: Sequence[Sequence[int]] | None = None) -> None:
        """Free slots.

        Args:
            rows: Slots to free.
            texts: Token ids of the sequences. With them, the KV cache may serve a later prompt. Without them,
                it is zeroed.
        """

    def describe(self) -> str:
        """Return one line for a user: the model, its device, and the cost of its KV cache."""

"""Interface of a scorer: a model with a KV cache, which computes the logits of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outpace.models.source import Source


class Scorer(Protocol):
    """Interface that scores tokens after the committed tokens of each sequence.

    Each sequence has a slot, a small int that the caller picks. A slot may be used again after ``reset``.
    ``score`` computes logits of further tokens, and ``commit`` then commits some of them. Tokens that are
    not committed, such as rejected draft tokens, are overwritten by the next call.

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
        """Prefill slots with prompts, and commit the prompts.

        If the KV cache of this or another slot holds a prefix of a prompt, the prefix is reused.

        Args:
            rows: Slots of the sequences.
            prompts: Token ids of each sequence.
            sources: Encoder inputs, for encoder-decoder models.

        Returns:
            Logits ``[R, V]`` after the last token of each prompt.
        """

    def append(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append at least one token to each sequence, and commit it. Sequences may get different numbers.

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
            texts: Token ids of the sequences. With them, a later prompt may reuse the KV cache. Without them,
                the KV cache of the slots is zeroed.
        """

    def describe(self) -> str:
        """Return one line for a user: the model, its device, and the cost of its KV cache."""

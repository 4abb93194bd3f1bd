"""Encoder inputs of encoder-decoder models: text or speech."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from outpace.checks.arguments import kind


class Source:
    """The encoder input of one sequence, with its encoder states, so that each encoder runs once.

    Args:
        ids: Token ids of a text. Pass either ``ids`` or ``features``.
        features: ``[bins, frames]``, as the model's feature extractor computes them from speech.
        start: First tokens of the decoder. By default the model's own.

    Raises:
        ValueError: Both or neither of ``ids`` and ``features`` are passed, or ``features`` is not a 2-D
            tensor.
    """

    def __init__(
        self,
        ids: Sequence[int] | None = None,
        *,
        features: Tensor | None = None,
        start: Sequence[int] | None = None,
    ) -> None:
        if (ids is None) == (features is None):
            raise ValueError(
                f"ids, features: got {'neither' if ids is None else 'both'}; pass exactly one of them"
            )
        if features is not None and (not isinstance(features, Tensor) or features.dim() != 2):
            raise ValueError(f"features: got {kind(features)[:80]}; it must be a 2-D tensor [bins, frames]")
        self.ids = None if ids is None else list(ids)
        self.features = features
        self.start = None if start is None else list(start)
        # By encoder: the fingerprint of its weights, and states `[S, D]`
        self.states: WeakKeyDictionary[nn.Module, tuple[int, Tensor]] = WeakKeyDictionary()
        self.copyable: list[int] = []  # ids that the decoder's vocabulary shares, for prompt lookup

    def __len__(self) -> int:
        """Return the length of the encoder input, in tokens or frames."""
        if self.ids is not None:
            return len(self.ids)
        assert self.features is not None
        return self.features.shape[1]

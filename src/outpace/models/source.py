"""What an encoder-decoder model writes about: a text that it reads, or speech that it hears."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from outpace.arguments import kind


class Source:
    """The encoder's input of one row, and what encoders made of it, so that each works once.

    ids       token ids; or
    features  `[bins, frames]`, as the model's feature extractor makes them of speech
    start     the decoder's first tokens; by default the model's own
    """

    def __init__(
        self,
        ids: Sequence[int] | None = None,
        *,
        features: Tensor | None = None,
        start: Sequence[int] | None = None,
    ) -> None:
        if (ids is None) == (features is None):
            raise ValueError("source: give ids= or features=, one of them")
        if features is not None and (not isinstance(features, Tensor) or features.dim() != 2):
            raise ValueError(f"features: got {kind(features)[:80]}; they must be a 2-D tensor [bins, frames]")
        self.ids = None if ids is None else list(ids)
        self.features = features
        self.start = None if start is None else list(start)
        # By encoder: what its weights were then, and states `[S, D]`
        self.states: WeakKeyDictionary[nn.Module, tuple[int, Tensor]] = WeakKeyDictionary()
        self.copyable: list[int] = []  # ids that are the decoder's, too: what a lookup may copy

    def __len__(self) -> int:
        """Of what the encoder is given."""
        if self.ids is not None:
            return len(self.ids)
        assert self.features is not None
        return self.features.shape[1]

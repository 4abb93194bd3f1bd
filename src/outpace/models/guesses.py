"""What an iteration of an engine verifies: guesses of its own draft, or from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outpace.draft.base import Draft
from outpace.sampling import Sampling
from outpace.verify import Drawn


@dataclass(frozen=True)
class Guesses:
    """What a draft has to say, or a copy."""

    tokens: Tensor  # [rows, g]
    logits: Tensor | None = None  # [rows, g, V]; None where tokens were chosen
    drawn: Sequence[Drawn] = ()  # what else is known of those
    lengths: Tensor | None = None  # how many of them count in each row; None: all
    sampling: Sampling | None = None  # what the logits are still to be adjusted by

    def first(self, rows: int) -> Guesses:
        """Of so many rows."""
        logits = None if self.logits is None else self.logits[:rows]
        lengths = None if self.lengths is None else self.lengths[:rows]
        return replace(self, tokens=self.tokens[:rows], logits=logits, lengths=lengths)


@dataclass(frozen=True)
class Given:
    """Guesses from outside, of rows in these slots."""

    slots: Sequence[int]
    draft: Draft

    @property
    def sampling(self) -> Sampling | None:
        """What the logits are still to be adjusted by, which is the same for all rows."""
        told = self.draft.told
        return None if told is None or told.sampling is None else told.sampling[0]

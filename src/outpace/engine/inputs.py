"""Inputs of the engine's verification: draft tokens of its own, or from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outpace.draft.base import Draft
from outpace.sampling import SamplingParams
from outpace.verification import Drawn


@dataclass(frozen=True)
class DraftInputs:
    """Draft tokens of a step, and what is known of their distributions."""

    tokens: Tensor  # [rows, g]
    logits: Tensor | None = None  # [rows, g, V]; None where tokens were not sampled
    drawn: Sequence[Drawn] = ()  # one per position, if `sample` sampled them
    lengths: Tensor | None = None  # [rows], draft tokens of each sequence; None: g
    sampling: SamplingParams | None = None  # still to be applied to the logits

    def first(self, rows: int) -> DraftInputs:
        """Return the draft tokens of the first rows."""
        logits = None if self.logits is None else self.logits[:rows]
        lengths = None if self.lengths is None else self.lengths[:rows]
        return replace(self, tokens=self.tokens[:rows], logits=logits, lengths=lengths)


@dataclass(frozen=True)
class HostDraft:
    """Draft tokens from outside, for the sequences in these slots."""

    slots: Sequence[int]
    draft: Draft

    @property
    def sampling(self) -> SamplingParams | None:
        """Sampling parameters still to be applied to the logits, the same for all sequences."""
        told = self.draft.told
        return None if told is None or told.sampling is None else told.sampling[0]

"""Draft tokens that the engine verifies: its own, or those of a drafter on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outpace.draft.base import Draft
from outpace.sampling import SamplingParams
from outpace.verification import SampledTokens


@dataclass(frozen=True)
class DraftInputs:
    """Draft tokens of a step, and their distributions."""

    tokens: Tensor  # [rows, g]
    logits: Tensor | None = None  # [rows, g, V]; None where tokens were not sampled
    drawn: Sequence[SampledTokens] = ()  # one per position, where `sample` sampled the tokens
    lengths: Tensor | None = None  # [rows], number of draft tokens; None: g each
    sampling: SamplingParams | None = None  # still to be applied to the logits

    def first(self, rows: int) -> DraftInputs:
        """Return the draft tokens of the first rows."""
        logits = None if self.logits is None else self.logits[:rows]
        lengths = None if self.lengths is None else self.lengths[:rows]
        return replace(self, tokens=self.tokens[:rows], logits=logits, lengths=lengths)


@dataclass(frozen=True)
class HostDraft:
    """Draft tokens of a drafter on the host, for the sequences in these slots."""

    slots: Sequence[int]
    draft: Draft

    @property
    def sampling(self) -> SamplingParams | None:
        """Sampling parameters still to be applied to the logits, the same for all sequences."""
        precomputed = self.draft.precomputed
        return None if precomputed is None or precomputed.sampling is None else precomputed.sampling[0]

"""Python processors of a step of the graph executor, between the target's pass and verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.draft.base import DraftTensors
from outpace.engine.pending import GraphPending
from outpace.engine.sequence import SequenceState
from outpace.sampling import Prefix, process


@dataclass(frozen=True, eq=False)
class Scored:
    """Draft tokens, and the target's logits ``[B, g+1, V]``.

    Attributes:
        draft: The draft tokens.
        raw: The target's own logits.
        logits: The same, in float32 if processors change them.
    """

    draft: DraftTensors
    raw: Tensor
    logits: Tensor


class Processed:
    """The processors of a step, which the host runs between the target's pass and verification.

    Args:
        sequences: The sequences of the step, by slot.
    """

    def __init__(self, sequences: Mapping[int, SequenceState]) -> None:
        self._rows = {slot: one for slot, one in sequences.items() if one.sampling.processors}
        self._errors: dict[int, Exception] = {}  # by row

    def __call__(self, scored: Scored) -> None:
        """Apply bias, penalties and processors to the logits of the sequences that have processors."""
        rows, draft = list(self._rows.values()), scored.draft
        slots = torch.tensor(list(self._rows), device=scored.logits.device)
        prefix = Prefix.padded(
            [one.tokens for one in rows], [one.prompt_length for one in rows], scored.logits.device
        )
        lengths = None if draft.lengths is None else draft.lengths[slots] + 1
        changed, self._rewind = process(
            scored.logits[slots], [one.sampling for one in rows], prefix, draft.tokens[slots], lengths,
            until_rejected=True, errors=self._errors,
        )  # fmt: skip
        scored.logits[slots] = changed

    def rewind(self, pending: GraphPending) -> None:
        """Set the processors' state back to after the last accepted token, and note their errors."""
        outcome, slots = pending.read(), list(self._rows)
        pending.errors.update({slots[i]: error for i, error in self._errors.items()})
        if self._rewind is not None:
            self._rewind(torch.tensor([outcome.accepted[slot] for slot in slots]))

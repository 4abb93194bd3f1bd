"""Python processors of a step of the graph executor, between the target's pass and verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.draft.base import DraftTensors
from outpace.engine.executor import Outcome
from outpace.engine.sequence import SequenceState
from outpace.sampling import Errors, Prefix, process
from outpace.sampling.params import Rewind


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

    Attributes:
        errors: The errors of processors, by slot.
    """

    def __init__(self, sequences: Mapping[int, SequenceState]) -> None:
        self._rows = {slot: one for slot, one in sequences.items() if one.sampling.processors}
        self._rewind: Rewind | None = None
        self.errors: Errors = {}

    def __call__(self, scored: Scored) -> None:
        """Adjust the logits of the sequences that have processors, up to and with those."""
        rows, slots, draft = list(self._rows.values()), list(self._rows), scored.draft
        at, errors = torch.tensor(slots, device=scored.logits.device), Errors()
        prefix = Prefix.padded(
            [one.tokens for one in rows], [one.prompt_length for one in rows], scored.logits.device
        )
        lengths = None if draft.lengths is None else draft.lengths[at] + 1
        changed, self._rewind = process(
            scored.logits[at], [one.sampling for one in rows], prefix, draft.tokens[at], lengths,
            until_rejected=True, errors=errors,
        )  # fmt: skip
        scored.logits[at] = changed
        self.errors = {slots[i]: error for i, error in errors.items()}

    def rewind(self, outcome: Outcome) -> None:
        """Set the processors' state back to after the last new token."""
        if self._rewind is not None:
            self._rewind(torch.tensor([outcome.num_new_tokens(slot) - 1 for slot in self._rows]))

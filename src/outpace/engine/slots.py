"""State of the sequences on the device, with one owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outpace.checks.arguments import to_device
from outpace.engine.sequence import SequenceState


class Slots:
    """State of the sequences on the device, which the steps read and change.

    Attributes:
        lengths: Number of tokens of each sequence ``[slots]``. Idle slots have 1.
        seeds: Seeds ``[slots]``.
        active: 1 for slots with a sequence, 0 for idle ones ``[slots]``.
        token_ids: Prompt and output ``[slots, tokens]``.
    """

    @torch.inference_mode(False)
    def __init__(self, slots: int, tokens: int, device: torch.device) -> None:
        self.lengths = torch.ones(slots, dtype=torch.int64, device=device)
        self.seeds, self.active = torch.zeros_like(self.lengths), torch.zeros_like(self.lengths)
        self.token_ids = torch.zeros(slots, tokens, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.lengths)

    def start(self, rows: Sequence[SequenceState]) -> None:
        """Write new sequences to their slots."""
        longest = max(len(row.tokens) for row in rows)
        values = [
            [row.slot, len(row.tokens), row.seed, *row.tokens, *[0] * (longest - len(row.tokens))]
            for row in rows
        ]
        columns = to_device(torch.tensor(values), self.lengths.device)
        slots = columns[:, 0]
        self.token_ids[slots, :longest] = columns[:, 3:]
        self.lengths[slots], self.seeds[slots], self.active[slots] = columns[:, 1], columns[:, 2], 1

    def end(self, slot: int) -> None:
        """Make a slot idle."""
        self.active[slot], self.lengths[slot] = 0, 1

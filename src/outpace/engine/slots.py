"""State of the sequences on the device, for the graph executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outpace.checks.arguments import on_device, to_device
from outpace.draft.base import Draft, DraftTensors
from outpace.engine.sequence import SequenceState


class Slots:
    """State of the sequences on the device, which the steps read and change.

    Args:
        slots: Number of slots.
        tokens: Most tokens of a sequence.
        device: Device of the tensors.

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
        self._drafts: dict[object, DraftTensors] = {}  # see `copy_draft`

    def grown(self, slots: int, tokens: int) -> Slots:
        """Return a larger state that begins with this one.

        Args:
            slots: Number of slots.
            tokens: Most tokens of a sequence.
        """
        new = Slots(slots, tokens, self.lengths.device)
        new.lengths[: len(self)], new.seeds[: len(self)] = self.lengths, self.seeds
        new.active[: len(self)] = self.active
        new.token_ids[: len(self), : self.token_ids.shape[1]] = self.token_ids
        return new

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.lengths)

    def start(self, sequences: Sequence[SequenceState]) -> None:
        """Write new sequences to their slots."""
        longest = max(len(one.tokens) for one in sequences)
        values = [
            [one.slot, len(one.tokens), one.seed, *one.tokens, *[0] * (longest - len(one.tokens))]
            for one in sequences
        ]
        columns = to_device(torch.tensor(values), self.lengths.device)
        slots = columns[:, 0]
        self.token_ids[slots, :longest] = columns[:, 3:]
        self.lengths[slots], self.seeds[slots], self.active[slots] = columns[:, 1], columns[:, 2], 1

    def copy_draft(self, g: int, draft: Draft, slots: Sequence[int]) -> DraftTensors:
        """Copy draft tokens from the host to buffers that graphs read; return the buffers of all slots.

        Args:
            g: Most draft tokens of a sequence.
            draft: Draft tokens from the host.
            slots: Slots of the sequences, in the order of ``draft``. Other slots get no draft tokens.
        """
        precomputed, logits = draft.precomputed, draft.logits
        sampling = None if precomputed is None or not precomputed.sampling else precomputed.sampling[0]
        key = g, sampling, None if logits is None else logits.dtype
        if key not in self._drafts:
            self._drafts[key] = DraftTensors(
                self.lengths.new_zeros(len(self), g),
                None if logits is None else logits.new_zeros(len(self), g, logits.shape[-1]),
                lengths=torch.zeros_like(self.lengths),
                sampling=sampling,
            )
        buffers, device = self._drafts[key], self.lengths.device
        assert buffers.lengths is not None
        lengths = torch.zeros(len(self), dtype=torch.int64)
        lengths[list(slots)] = torch.tensor(draft.lengths or [g] * len(slots))
        buffers.lengths.copy_(to_device(lengths, device))
        rows = on_device(slots, torch.int64, device)
        buffers.tokens[rows] = to_device(draft.tokens, device)
        if buffers.logits is not None and logits is not None:
            buffers.logits[rows] = logits
        return buffers

    def end(self, slot: int) -> None:
        """Make a slot idle."""
        self.active[slot], self.lengths[slot] = 0, 1

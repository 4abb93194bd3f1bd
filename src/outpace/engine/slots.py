"""State of the sequences on the device, for the graph executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outpace.checks.arguments import on_device, overwrite, to_device
from outpace.draft.base import Draft, DraftTensors
from outpace.engine.needs import has_edits
from outpace.engine.sequence import SequenceState
from outpace.sampling import SamplingParams
from outpace.sampling.rows import (
    NO_SHAPE,
    Edits,
    RowSampling,
    allowed_of,
    penalties_of,
    seen_of,
    shape_of,
)


class Slots:
    """State of the sequences on the device, which the steps read and change.

    Args:
        slots: Number of slots.
        tokens: Most tokens of a sequence.
        vocab_size: Size of the target's vocabulary.
        device: Device of the tensors.

    Attributes:
        lengths: Number of tokens of each sequence ``[slots]``. Idle slots have 1.
        seeds: Seeds ``[slots]``.
        active: 1 for slots with a sequence, 0 for idle ones ``[slots]``.
        match: 1 for sequences with rule ``match``, 0 for others ``[slots]``.
        limits: Most draft tokens of each sequence that the target scores ``[slots]``; see ``limit``.
        token_ids: Prompt and output ``[slots, tokens]``.
        shape: Temperature and filters of the target, as ``RowSampling`` holds them ``[slots, 4]``.
        draft_shape: The same of the drafter.
        edits: Bias, allowed tokens and penalties of the target. None until a sequence has some.
        draft_edits: The same of the drafter. The tokens that it counts are those of ``edits``.
    """

    @torch.inference_mode(False)
    def __init__(self, slots: int, tokens: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.lengths = torch.ones(slots, dtype=torch.int64, device=device)
        self.seeds, self.active = torch.zeros_like(self.lengths), torch.zeros_like(self.lengths)
        self.match = torch.zeros_like(self.lengths)
        self.limits = torch.zeros_like(self.lengths)
        self.token_ids = torch.zeros(slots, tokens, dtype=torch.int64, device=device)
        self.shape = torch.tensor(NO_SHAPE, device=device).repeat(slots, 1)
        self.draft_shape = self.shape.clone()
        self.edits: Edits | None = None
        self.draft_edits: Edits | None = None
        # See `copy_draft`: draft tokens and then their numbers, ``[slots * (g + 1)]``, and what graphs read
        self._drafts: dict[object, tuple[Tensor, DraftTensors]] = {}
        self._draft_logits: dict[object, Tensor] = {}  # of all slots, by g and dtype

    @torch.inference_mode(False)
    def add_edits(self) -> None:
        """Allocate the state of edits, without any."""
        sizes = len(self), self.vocab_size, self.lengths.device
        self.edits = Edits.none(*sizes)
        self.draft_edits = Edits.none(*sizes, seen=self.edits.seen)

    def grown(self, slots: int, tokens: int) -> Slots:
        """Return a larger state that begins with this one.

        Args:
            slots: Number of slots.
            tokens: Most tokens of a sequence.
        """
        new = Slots(slots, tokens, self.vocab_size, self.lengths.device)
        if self.edits is not None:
            new.add_edits()
        for old, larger in zip(self._tensors(), new._tensors(), strict=True):
            larger[tuple(map(slice, old.shape))] = old
        return new

    def _tensors(self) -> list[Tensor]:
        tensors = [self.lengths, self.seeds, self.active, self.match, self.limits, self.token_ids]
        tensors += [self.shape, self.draft_shape]
        if self.edits is not None and self.draft_edits is not None:
            tensors += [*self.edits.tensors(), *self.draft_edits.tensors()]
        return tensors

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.lengths)

    def start(self, sequences: Sequence[SequenceState]) -> None:
        """Write new sequences to their slots."""
        longest = max(len(one.tokens) for one in sequences)
        integers = [
            [one.slot, len(one.tokens), one.seed, one.match, *one.tokens, *[0] * (longest - len(one.tokens))]
            for one in sequences
        ]
        V, device = self.vocab_size, self.lengths.device
        samplings = [(one.sampling, one.draft_sampling or one.sampling) for one in sequences]
        numbers = [[*shape_of(p, V), *shape_of(q, V)] for p, q in samplings]
        columns = to_device(torch.tensor(integers), device)
        shapes = to_device(torch.tensor(numbers, dtype=torch.float32), device)
        slots = columns[:, 0]
        self.token_ids[slots, :longest] = columns[:, 4:]
        self.lengths[slots], self.seeds[slots], self.match[slots] = columns[:, 1:4].unbind(1)
        self.active[slots] = 1
        self.shape[slots], self.draft_shape[slots] = shapes[:, :4], shapes[:, 4:]
        if any(has_edits(one) for pair in samplings for one in pair) and self.edits is None:
            self.add_edits()
        if self.edits is not None and self.draft_edits is not None:
            for sequence, (p, q) in zip(sequences, samplings, strict=True):
                on_host = bool(p.processors)  # then the host also edits the target's logits, before them
                self._start_edits(self.edits, sequence.slot, SamplingParams() if on_host else p)
                self._start_edits(self.draft_edits, sequence.slot, q)
                if p.has_penalties or q.has_penalties:
                    prompt, output = sequence.tokens[: sequence.prompt_length], sequence.new_tokens
                    self.edits.seen[sequence.slot] = to_device(seen_of(prompt, output, V), device)

    def _start_edits(self, edits: Edits, slot: int, sampling: SamplingParams) -> None:
        """Write bias, allowed tokens and penalties of a new sequence."""
        device, bias = self.lengths.device, sampling.logit_bias or {}
        edits.penalties[slot] = on_device(list(penalties_of(sampling)), torch.float32, device)
        edits.allowed[slot] = to_device(allowed_of(sampling, self.vocab_size), device)
        edits.bias[slot] = 0
        if bias:
            ids = on_device(list(bias), torch.int64, device)
            edits.bias[slot, ids] = on_device(list(bias.values()), torch.float32, device)

    def limit(self, limits: Mapping[int, int], slots: int) -> None:
        """Set the most draft tokens of each sequence that the target scores; 0 for other slots.

        Args:
            limits: The numbers by slot.
            slots: Number of slots that take part in the step.
        """
        overwrite(self.limits[:slots], [limits.get(slot, 0) for slot in range(slots)])

    def copy_draft(self, g: int, draft: Draft, drafted: Sequence[int], slots: int) -> DraftTensors:
        """Copy draft tokens from the host to buffers that graphs read; return the buffers.

        Args:
            g: Most draft tokens of a sequence.
            draft: Draft tokens from the host.
            drafted: Slots of the sequences, in the order of ``draft``. Other slots get no draft tokens.
            slots: Number of slots that the buffers have.
        """
        logits, device = draft.logits, self.lengths.device
        unapplied = None if draft.precomputed is None else draft.precomputed.sampling
        key = g, slots, unapplied is None, None if logits is None else logits.dtype
        if key not in self._drafts:
            integers, shape = self.lengths.new_zeros(slots * (g + 1)), torch.zeros_like(self.shape[:slots])
            if logits is not None and (g, logits.dtype) not in self._draft_logits:
                self._draft_logits[g, logits.dtype] = logits.new_zeros(len(self), g, logits.shape[-1])
            self._drafts[key] = (
                integers,
                DraftTensors(
                    integers[: slots * g].view(-1, g),
                    None if logits is None else self._draft_logits[g, logits.dtype][:slots],
                    lengths=integers[slots * g :],
                    sampling=None if unapplied is None else RowSampling(shape, True),
                ),
            )
        integers, buffers = self._drafts[key]
        on_host = draft.tokens.device.type == "cpu"
        rows = dict(zip(drafted, draft.tokens.tolist(), strict=True)) if on_host else {}
        lengths = dict(zip(drafted, draft.lengths or [g] * len(drafted), strict=True))
        tokens = [token for slot in range(slots) for token in rows.get(slot, [0] * g)]
        overwrite(integers, [*tokens, *(lengths.get(slot, 0) for slot in range(slots))])
        if not on_host:
            buffers.tokens[on_device(drafted, torch.int64, device)] = draft.tokens
        if buffers.logits is not None and logits is not None:
            buffers.logits[on_device(drafted, torch.int64, device)] = logits
        if buffers.sampling is not None and unapplied is not None:
            shapes = [shape_of(one, self.vocab_size) for one in unapplied]
            shapes = shapes * len(drafted) if len(shapes) == 1 else shapes
            indices = on_device(drafted, torch.int64, device)
            buffers.sampling.shape[indices] = to_device(torch.tensor(shapes, dtype=torch.float32), device)
        return buffers

    def end(self, slot: int) -> None:
        """Make a slot idle."""
        self.active[slot], self.lengths[slot] = 0, 1

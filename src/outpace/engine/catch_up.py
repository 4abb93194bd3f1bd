"""Catch-up: before it drafts, the draft model processes tokens that were generated without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outpace.engine.sequence import SequenceState
from outpace.engine.slots import Slots
from outpace.models.capture import Graphs
from outpace.models.scorer import Scorer

CHUNK = 32  # tokens per sequence and forward pass


def known_tokens(scorer: Scorer, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that fit into a model's context, with 0 for ids outside its vocabulary."""
    return [token if token < scorer.vocab_size else 0 for token in tokens[: scorer.context]]


class CatchUp:
    """The tokens that a draft model has not processed, and the graphs in which it processes them.

    Args:
        scorer: The draft model.
        graphs: The graphs of the executor.
    """

    def __init__(self, scorer: Scorer, graphs: Graphs) -> None:
        self.scorer, self._graphs = scorer, graphs
        self._behind: dict[int, int] = {}  # by slot: tokens that the draft model has not processed
        # Number of chunks that are still to be processed
        self._chunks_left = torch.zeros((), dtype=torch.int64, device=scorer.device)

    def open(self, sequence: SequenceState) -> None:
        """Count the tokens of a new sequence that the draft model's KV cache lacks."""
        cache = self.scorer.cache
        if not cache.is_open(sequence.slot):
            reusable = () if self.scorer.has_encoder else known_tokens(self.scorer, sequence.tokens)
            cache.open(sequence.slot, reusable)
        behind = min(len(sequence.tokens), self.scorer.context) - 2 - cache.length(sequence.slot)
        self._behind[sequence.slot] = max(0, behind)

    def close(self, sequence: SequenceState) -> None:
        """Stop counting for a sequence; commit the tokens that the draft model has processed."""
        processed = min(len(sequence.tokens) - 2 - self._behind.pop(sequence.slot), self.scorer.context)
        cache = self.scorer.cache
        cache.commit(sequence.slot, max(0, processed - cache.length(sequence.slot)))

    def skip(self, slots: Iterable[int]) -> None:
        """Count the token of a step without draft tokens, which the draft model does not process."""
        for slot in slots:
            self._behind[slot] += 1

    def chunks(self, slots: Iterable[int]) -> int:
        """Return the number of forward passes that the draft model needs before it drafts for these slots."""
        return -(-max((self._behind.get(slot, 0) for slot in slots), default=0) // CHUNK)

    def run(self, sequences: Iterable[int], state: Slots, slots: int) -> float:
        """Run the draft model over the tokens that it lacks; return the seconds of captures.

        Args:
            sequences: Slots of the sequences.
            state: State of the sequences.
            slots: Number of slots that take part.
        """
        seconds = 0.0
        for chunk in range(self.chunks(sequences), 0, -1):
            self._chunks_left.fill_(chunk)
            seconds += self.run_chunk(state, slots)
        self._behind |= dict.fromkeys(sequences, 0)
        return seconds

    def run_chunk(self, state: Slots, slots: int) -> float:
        """Process one chunk of the first slots as a graph; return the seconds of a capture."""
        name = f"a catch-up of {CHUNK} tokens and {slots} slots"
        return self._graphs.run(("catch up", slots), lambda: self._fill(state, slots), name)[1]

    def _fill(self, state: Slots, slots: int) -> Tensor:
        """Run the draft model over a chunk of each sequence's tokens, up to its last two.

        Sequences that lack fewer tokens process some of them again, with the same result.
        """
        lengths, active = state.lengths[:slots, None], state.active[:slots, None].bool()
        offsets = torch.arange(CHUNK, device=lengths.device)
        at = (lengths - 2 - self._chunks_left * CHUNK).clamp(min=0) + offsets
        known = active & (at < lengths - 2) & (at < self.scorer.context)
        ids = state.token_ids[:slots].gather(1, at.clamp(max=state.token_ids.shape[1] - 1))
        ids = ids.masked_fill(ids >= self.scorer.vocab_size, 0)
        self.scorer.fill(ids, at.where(known, -1))
        return ids

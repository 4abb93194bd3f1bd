"""Greedy decoding with a fused model: its likeliest tokens, whose forward passes are CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from outpace.checks.arguments import overwrite
from outpace.models.capture import Graphs
from outpace.models.fused import FusedModel
from outpace.models.paged import PagedCache

FEW = 4  # new tokens of a sequence that the first graph appends, padding included
PADDING = -1  # position of padding


class GreedyPasses:
    """Forward passes that append tokens to sequences, and then the likeliest tokens.

    A first graph appends new tokens and finds the likeliest token after them. A second graph, which is
    replayed, appends that token and finds the next one. So the host waits once, after the last token.

    Args:
        fused: The model.
        cache: Its KV cache.
        graphs: The graphs, which others may share.
    """

    def __init__(self, fused: FusedModel, cache: PagedCache, graphs: Graphs) -> None:
        self._fused, self._cache, self._graphs = fused, cache, graphs
        # By number of sequences: what the graphs read, and the last token and its position ``[B, 2]``
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.inference_mode()
    def run(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], count: int) -> Tensor:
        """Append tokens to each sequence, and find the likeliest tokens after them.

        The KV cache has memory for all of them. Nothing is committed.

        Args:
            slots: Slots of the sequences.
            tokens: New token ids of each sequence, 1 to ``FEW``.
            count: Number of the likeliest tokens.

        Returns:
            Each token, and 1 if its logits were finite, else 0: ``[R, count, 2]``.
        """
        B = 1 << (len(slots) - 1).bit_length()
        if B not in self._buffers:
            self._add_buffers(B)
        inputs, last = self._buffers[B]
        overwrite(inputs, self._inputs(slots, tokens, B))
        found = list[Tensor]()
        for i in range(count):
            what, work = ("new tokens", self._append_new) if i == 0 else ("one token", self._append_one)
            name = f"greedy decoding of {what} of {B} sequences"
            best, _ = self._graphs.run((what, B), partial(work, B), name, [last])
            found.append(best.clone())
        return torch.stack(found, dim=1)[: len(slots)]

    @torch.inference_mode(False)
    def _add_buffers(self, B: int) -> None:
        inputs = torch.zeros(B, 2 * FEW + 2, dtype=torch.int64, device=self._cache.device)
        self._buffers[B] = inputs, inputs.new_zeros(B, 2)

    def _inputs(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], B: int) -> list[list[int]]:
        """Return ids, their positions, the index of the last one, and the slot: ``[B, 2 * FEW + 2]``."""
        rows = [[*[0] * FEW, *[PADDING] * FEW, 0, 0] for _ in range(B)]
        for row, slot, new in zip(rows, slots, tokens, strict=False):
            start, n = self._cache.length(slot), len(new)
            row[:n], row[FEW : FEW + n] = new, range(start, start + n)
            row[-2:] = n - 1, slot
        return rows

    def _append_new(self, B: int) -> Tensor:
        """Append the tokens of ``_inputs``; return the likeliest token, and whether logits were finite."""
        inputs = self._buffers[B][0]
        ids, positions, last = inputs[:, :FEW], inputs[:, FEW : 2 * FEW], inputs[:, -2]
        logits = self._fused.next_logits(ids, positions, self._cache.pages(inputs[:, -1]), last)
        return self._likeliest(B, logits, positions.gather(1, last[:, None])[:, 0])

    def _append_one(self, B: int) -> Tensor:
        """Append the token that was found last; return the same of the next one."""
        inputs, last = self._buffers[B]
        position = last[:, 1]
        logits = self._fused.logits(last[:, :1], position[:, None], self._cache.pages(inputs[:, -1]))
        return self._likeliest(B, logits[:, 0], position)

    def _likeliest(self, B: int, logits: Tensor, position: Tensor) -> Tensor:
        """Return the likeliest token, and whether its logits ``[B, V]`` are finite, ``[B, 2]``.

        The token and its position are stored, for ``_append_one`` to read.
        """
        last = self._buffers[B][1]
        best, token = logits.max(-1)
        last[:, 0] = token
        last[:, 1] = (position + 1).where(position >= 0, PADDING)
        return torch.stack((token, best.isfinite().long()), dim=1)

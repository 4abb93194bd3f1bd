"""KV cache with one run of memory per slot, for Transformers' own forward passes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.models.cache import RaggedCache, Span
from outpace.models.kv_cache import (
    KEPT_SHARE,
    MIN_REUSED_PREFIX,
    KVCache,
    common_prefix_length,
    longest_prefix,
)

log = logging.getLogger("outpace")


class ContiguousCache(KVCache):
    """KV cache with one run of memory per slot, as a ``Cache`` of the Transformers library.

    Args:
        layers: Number of layers.
        device: Device of the keys and values.
        bytes_per_token: Bytes of a token, as far as the configuration tells. They are measured later.
        budget: Most bytes. None: a share of the free memory.

    Attributes:
        rows: The keys and values. Rows change places, so a slot need not have the row of its number.
    """

    def __init__(
        self, layers: int, device: torch.device, bytes_per_token: int, budget: int | None = None
    ) -> None:
        super().__init__(device, budget)
        self.layers, self._computed_bytes = layers, bytes_per_token
        self.on_swap: Callable[[int, int], None] | None = None  # cross-attention moves with its row
        self.release()

    def release(self) -> None:
        """See ``KVCache.release``."""
        self.rows = RaggedCache(self.layers)
        self._order: list[int] = []  # the slot that each row belongs to
        self._cached: dict[int, list[int]] = {}  # by slot without sequence: tokens that its row still holds
        self._reserved: dict[int, int] = {}  # by slot: tokens that forward passes may have written
        self._lengths, self._tokens = {}, {}
        self.version += 1

    @property
    def nbytes(self) -> int:
        """See ``KVCache.nbytes``."""
        return self.rows.nbytes()

    @property
    def bytes_per_token(self) -> int:
        """See ``KVCache.bytes_per_token``; measured once there are keys, and computed before."""
        if self.nbytes:
            return self.nbytes // (self.rows.rows * self.rows.capacity)
        return self._computed_bytes

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """See ``KVCache.bytes_for``; rows are equally long, and do not shrink while one is in use."""
        grown = self.rows if self._lengths else RaggedCache(0)
        rows, tokens = grown.size(len(lengths), max(lengths, default=0))
        return rows * tokens * self.bytes_per_token

    def open(self, slot: int, tokens: Sequence[int]) -> int:
        """See ``KVCache.open``."""
        self.prepare(slot + 1, len(tokens))
        cached = common_prefix_length(self._cached.pop(slot, ()), tokens, len(tokens) - 1)
        others = itertools.chain(self._tokens.items(), self._cached.items())
        shared, source = longest_prefix(((held, (one,)) for one, held in others), tokens)
        if shared >= cached + MIN_REUSED_PREFIX:
            self._copy(source[0], slot, shared)
            cached = shared
        self._lengths[slot], self._tokens[slot] = cached, list(tokens[:cached])
        self._reserved[slot] = cached
        return cached

    def fork(self, source: int, slot: int) -> None:
        """See ``KVCache.fork``."""
        self.prepare(slot + 1, self._lengths[source])
        self._cached.pop(slot, None)
        self._copy(source, slot, self._lengths[source])
        self._lengths[slot], self._tokens[slot] = self._lengths[source], list(self._tokens[source])
        self._reserved[slot] = self._lengths[source]

    def _copy(self, source: int, slot: int, length: int) -> None:
        self.rows.copy(self._order.index(source), self._order.index(slot), length)

    def reserve(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """See ``KVCache.reserve``."""
        self.prepare(max(slots) + 1, max(lengths))
        self._reserved |= zip(slots, lengths, strict=True)

    def prepare(self, slots: int, tokens: int) -> None:
        """See ``KVCache.prepare``."""
        size = self.rows.size(slots, tokens)
        if size == (self.rows.rows, self.rows.capacity):
            return
        if not self._lengths:  # no slot is in use: start again with the needed size
            self.release()
            size = self.rows.size(slots, tokens)
        nbytes = size[0] * size[1] * self.bytes_per_token
        if nbytes > self.budget:
            raise self._too_large(nbytes)
        log.info("KV cache of %d rows of %d tokens in %.0f MiB", *size, nbytes / 2**20)
        self.rows.reserve(*size)
        self._order += range(len(self._order), size[0])
        self.version += 1

    def close(self, slot: int, tokens: Sequence[int] | None = None) -> None:
        """See ``KVCache.close``."""
        length = self._lengths.pop(slot, None)
        if length is None:
            return
        del self._tokens[slot], self._reserved[slot]
        if tokens is None:
            self.rows.clear(self._order.index(slot))  # a mask does not hide NaN
        else:
            # Forward passes of other rows may overwrite the last entry of an idle row.
            self._cached[slot] = self._reusable(slot, tokens, min(length, self.rows.capacity - 1))

    def forget(self) -> None:
        """See ``KVCache.forget``."""
        super().forget()
        self._cached.clear()

    def trim(self) -> None:
        """See ``KVCache.trim``."""
        if not self._lengths and self.nbytes > KEPT_SHARE * self.budget:
            self.release()

    def arrange(self, slots: Sequence[int]) -> int:
        """Move the rows of these slots side by side, behind the others in use; return the first.

        No row moves if the last call had the same slots.
        """
        first = sum(length > 0 for length in self._lengths.values()) - sum(
            self._lengths.get(slot, 0) > 0 for slot in slots
        )
        for i, slot in enumerate(slots, first):
            self._place(slot, i)
        return first

    def arrange_all(self, slots: int) -> None:
        """Give each of the first slots the row of its number."""
        for slot in range(slots):
            self._place(slot, slot)

    def _place(self, slot: int, row: int) -> None:
        """Move a slot to a row, by swapping it with the slot that has the row."""
        other = self._order[row]
        if other == slot:
            return
        old = self._order.index(slot)
        # A step in flight may have written tokens that are not committed yet.
        held = (max(self._reserved.get(one, 0), len(self._cached.get(one, ()))) for one in (slot, other))
        self.rows.swap(row, old, min(max(held), self.rows.capacity))
        if self.on_swap is not None:
            self.on_swap(row, old)
        self._order[row], self._order[old] = slot, other

    def row(self, slot: int) -> int:
        """Return the row of a slot."""
        return self._order.index(slot)

    def slots_of(self, rows: slice) -> list[int]:
        """Return the slots of some rows."""
        return self._order[rows]

    def place(self, first: int, positions: Tensor, start: int | None, reach: int) -> None:
        """Set the rows and positions that the next forward pass writes, and how far it reads."""
        self.rows.span = Span(first, positions, start, reach)

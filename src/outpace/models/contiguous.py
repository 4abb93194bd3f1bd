"""KV cache with one tensor row per slot and layer, for Transformers' own forward passes.

A layer holds ``[rows, heads, T, d]``, in tensors that are never cropped or concatenated. A forward pass
writes its n new tokens at each row's own positions. Entries at or past a row's length are undefined. The
attention mask hides them until they are overwritten. So a rollback changes a length and no tensor.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outpace.models.kv_cache import (
    KEPT_SHARE,
    MIN_REUSED_PREFIX,
    KVCache,
    common_prefix_length,
    longest_prefix,
)

STEP = 64  # tokens; T grows in multiples of it
log = logging.getLogger("outpace")


class ContiguousCache(KVCache):
    """KV cache with one tensor row per slot and layer.

    Rows are swapped, so slot i need not have row i.

    Args:
        layers: Number of layers.
        device: Device of the keys and values.
        bytes_per_token: Bytes of a token, as far as the configuration tells. They are measured later.
        budget: Most bytes. None: a share of the free memory.

    Attributes:
        past_key_values: The keys and values, as a ``Cache`` of the Transformers library.
        rows: Number of rows.
        capacity: Most tokens of a row.
        span: Positions that the next forward pass writes. They are set before it.
    """

    span: Span

    def __init__(
        self, layers: int, device: torch.device, bytes_per_token: int, budget: int | None = None
    ) -> None:
        super().__init__(device, budget)
        self._layers, self._bytes_per_token = layers, bytes_per_token
        self.on_swap: Callable[[int, int], None] | None = None  # cross-attention moves with its row
        self.past_key_values = Cache(layers=[])
        self.release()

    def release(self) -> None:
        self._bytes_per_token = self.bytes_per_token  # measured, if there were keys
        self.past_key_values = Cache(layers=[Layer(self) for _ in range(self._layers)])
        self.rows = self.capacity = 0
        self._order: list[int] = []  # the slot that each row belongs to
        self._cached: dict[int, list[int]] = {}  # by slot without sequence: tokens that its row still holds
        self._reserved: dict[int, int] = {}  # by slot: tokens that forward passes may have written
        self._reset()
        self.version += 1

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables())

    def _tables(self) -> list[Tensor]:
        layers = (layer for layer in self.past_key_values.layers if layer.is_initialized)
        return [table for layer in layers for table in (layer.keys, layer.values)]

    @property
    def bytes_per_token(self) -> int:
        """See ``KVCache.bytes_per_token``; measured once there are keys, and computed before."""
        return self.nbytes // (self.rows * self.capacity) if self.nbytes else self._bytes_per_token

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """See ``KVCache.bytes_for``; rows are equally long, and do not shrink while one is in use."""
        rows, capacity = self._size(len(lengths), max(lengths, default=0))
        return rows * capacity * self.bytes_per_token

    def _size(self, slots: int, tokens: int) -> tuple[int, int]:
        """Return the rows and tokens per row that ``prepare`` would allocate."""
        capacity = -(-tokens // STEP) * STEP
        return (max(slots, self.rows), max(capacity, self.capacity)) if self._lengths else (slots, capacity)

    def open(self, slot: int, tokens: Sequence[int]) -> int:
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
        self.prepare(slot + 1, self._lengths[source])
        self._cached.pop(slot, None)
        self._copy(source, slot, self._lengths[source])
        self._lengths[slot], self._tokens[slot] = self._lengths[source], list(self._tokens[source])
        self._reserved[slot] = self._lengths[source]

    @torch.inference_mode()
    def _copy(self, source: int, slot: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot to another."""
        old, new = self.row(source), self.row(slot)
        for table in self._tables():
            table[new, :, :length] = table[old, :, :length]

    def reserve(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.prepare(max(slots) + 1, max(lengths))
        self._reserved |= zip(slots, lengths, strict=True)

    def prepare(self, slots: int, tokens: int) -> None:
        if slots <= self.rows and tokens <= self.capacity:
            return
        rows, capacity = self._size(slots, tokens)
        nbytes = rows * capacity * self.bytes_per_token
        if nbytes > self.budget:
            raise self._too_large(nbytes)
        log.info("KV cache of %d rows of %d tokens in %.0f MiB", rows, capacity, nbytes / 2**20)
        kept: slice | list[int] = slice(None)
        if not self._lengths:  # no slot is in use: only the newest prefixes are kept, in the first rows
            newest = [slot for slot, held in self._cached.items() if held][-rows:]
            kept = [self.row(slot) for slot in newest]
            self._cached = {i: self._cached[slot][: capacity - 1] for i, slot in enumerate(newest)}
            self._order = list(range(len(kept)))
        for layer in self.past_key_values.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (
                    grown(one[kept], rows, capacity) for one in (layer.keys, layer.values)
                )
        self.rows, self.capacity = rows, capacity
        self._order += range(len(self._order), rows)
        self.version += 1

    @torch.inference_mode()
    def close(self, slot: int, tokens: Sequence[int] | None = None) -> None:
        length = self._lengths.pop(slot, None)
        if length is None:
            return
        del self._tokens[slot], self._reserved[slot]
        if tokens is None:
            self._stale.discard(slot)
            for table in self._tables():
                table[self.row(slot)] = 0  # a mask does not hide NaN
        else:
            # Forward passes of other rows may overwrite the last entry of an idle row.
            self._cached[slot] = self._reusable(slot, tokens, min(length, self.capacity - 1))

    def forget(self) -> None:
        super().forget()
        self._cached.clear()

    def trim(self) -> None:
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
        old = self.row(slot)
        # A step in flight may have written tokens that are not committed yet.
        held = (max(self._reserved.get(one, 0), len(self._cached.get(one, ()))) for one in (slot, other))
        self._swap(row, old, min(max(held), self.capacity))
        self._order[row], self._order[old] = slot, other

    @torch.inference_mode()
    def _swap(self, one: int, other: int, length: int) -> None:
        """Swap the first ``length`` tokens of two rows."""
        for table in self._tables():
            first, second = table[one, :, :length], table[other, :, :length]
            saved = first.clone()
            first.copy_(second)
            second.copy_(saved)
        if self.on_swap is not None:
            self.on_swap(one, other)

    def row(self, slot: int) -> int:
        """Return the row of a slot."""
        return self._order.index(slot)

    def slots_of(self, rows: slice) -> list[int]:
        """Return the slots of some rows."""
        return self._order[rows]


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer.

    The first keys that arrive determine shape and device.
    """

    is_sliding = False  # masks implement sliding windows

    def __init__(self, cache: ContiguousCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeros with the shape, dtype and device of the first keys and values."""
        rows, T = self.cache.rows, self.cache.capacity
        # Zeros, not garbage: a masked NaN is still NaN after the softmax.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], T, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], T, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[R, heads, n, d]`` at the positions of ``span``.

        Returns:
            All keys and values that the forward pass may attend to.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.cache.span.write(self.keys, key_states)
        self.cache.span.write(self.values, value_states)
        return self.cache.span.read(self.keys), self.cache.span.read(self.values)

    def get_seq_length(self) -> int:
        """Return the first position of ``span``, for a single token, which has no mask."""
        return self.cache.span.reach - self.cache.span.positions.shape[1]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of keys that the forward pass attends to, and their offset, 0."""
        return self.cache.span.reach, 0

    def get_max_length(self) -> int:
        """Return the capacity in tokens."""
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in older versions of Transformers


class Span:
    """Positions of adjacent rows that one forward pass writes.

    Args:
        first: Number of the first row.
        positions: Positions ``[R, n]``.
        reach: One past the last position of any row.
    """

    def __init__(self, first: int, positions: Tensor, reach: int) -> None:
        self.rows = slice(first, first + positions.shape[0])
        self.positions, self.reach = positions, reach
        self._indices: dict[tuple[int, int, torch.device], Tensor] = {}

    def write(self, table: Tensor, new: Tensor) -> None:
        """Assign ``table[r, :, positions[r, i]] = new[r, :, i]``."""
        d = new.shape[-1]
        table.view(-1, d).index_copy_(0, self._index(table), new.reshape(-1, d))

    def read(self, table: Tensor) -> Tensor:
        """Return all entries that the rows may attend to, ``[R, heads, reach, d]``."""
        return table[self.rows, :, : self.reach]

    def _index(self, table: Tensor) -> Tensor:
        """Return the index of each new vector in the table viewed as ``[rows·heads·T, d]``.

        It is computed once for all layers.
        """
        heads, T = table.shape[1:3]
        key = (heads, T, table.device)
        if key not in self._indices:
            positions = self.positions.to(table.device)
            lines = torch.arange(self.rows.start * heads, self.rows.stop * heads, device=table.device)
            self._indices[key] = (lines.view(-1, heads, 1) * T + positions[:, None]).flatten()
        return self._indices[key]


@torch.inference_mode()
def grown(table: Tensor, rows: int, tokens: int) -> Tensor:
    """Return a table ``[rows, heads, tokens, d]`` that begins with the entries of another one."""
    new = table.new_zeros(rows, table.shape[1], tokens, table.shape[3])
    new[: table.shape[0], :, : table.shape[2]] = table[:, :, :tokens]
    return new

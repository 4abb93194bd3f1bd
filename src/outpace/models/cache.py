"""KV cache of sequences with different lengths, in tensors that are never cropped or concatenated.

A layer holds ``[rows, heads, T, d]``. A forward pass writes its n new tokens at each row's own positions.
Entries at or past a row's length are undefined. The attention mask hides them until they are overwritten. The
scorer keeps the lengths, so a rollback changes a length there and nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

STEP = 64  # tokens; T grows in multiples of it


class RaggedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer.

    The first keys that arrive determine shape and device.
    """

    is_sliding = False  # masks implement sliding windows

    def __init__(self, cache: RaggedCache) -> None:
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
        """Return the first position of ``span`` if all rows share it, else 0."""
        return self.cache.span.start or 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of keys that the forward pass attends to, and their offset, 0."""
        return self.cache.span.reach, 0

    def get_max_length(self) -> int:
        """Return the capacity in tokens."""
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in older versions of Transformers


class Span:
    """Positions ``[R, n]`` of R adjacent rows that one forward pass writes."""

    def __init__(self, first: int, positions: Tensor, start: int | None, reach: int) -> None:
        self.rows = slice(first, first + positions.shape[0])
        self.positions = positions
        self.start = start  # the first position if all rows write the same n consecutive ones; else None
        self.reach = reach  # one past the last position of any row
        self._indices: dict[tuple[int, int, torch.device], Tensor] = {}

    def write(self, table: Tensor, new: Tensor) -> None:
        """Assign ``table[r, :, positions[r, i]] = new[r, :, i]``."""
        n, d = new.shape[2:]
        if self.start is not None:
            table[self.rows, :, self.start : self.start + n] = new
        else:
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


class RaggedCache(Cache):  # type: ignore[misc]
    """KV cache of all layers and rows.

    Before a forward pass, ``span`` is set to the positions that the pass writes.
    """

    span: Span

    def __init__(self, layers: int) -> None:
        self.rows = self.capacity = 0
        super().__init__(layers=[RaggedLayer(self) for _ in range(layers)])

    @torch.inference_mode()
    def reserve(self, rows: int, tokens: int) -> None:
        """Grow to at least this many rows and tokens per row; contents stay."""
        rows, tokens = self.size(rows, tokens)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (
                    _grown(layer.keys, rows, tokens),
                    _grown(layer.values, rows, tokens),
                )
        self.rows, self.capacity = rows, tokens

    def size(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the rows and tokens per row that ``reserve`` would allocate."""
        return max(rows, self.rows), max(-(-tokens // STEP) * STEP, self.capacity)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row to another."""
        for table in self._tables():
            table[target, :, :length] = table[source, :, :length]

    @torch.inference_mode()
    def swap(self, one: int, other: int, length: int) -> None:
        """Swap the first ``length`` tokens of two rows."""
        for table in self._tables():
            first, second = table[one, :, :length], table[other, :, :length]
            saved = first.clone()
            first.copy_(second)
            second.copy_(saved)

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Zero a row, since a mask does not hide NaN."""
        for table in self._tables():
            table[row] = 0

    def nbytes(self) -> int:
        """Return the bytes of all keys and values."""
        return sum(table.nbytes for table in self._tables())

    def _tables(self) -> list[Tensor]:
        return [
            table for layer in self.layers if layer.is_initialized for table in (layer.keys, layer.values)
        ]


def _grown(table: Tensor, rows: int, tokens: int) -> Tensor:
    grown = table.new_zeros(rows, table.shape[1], tokens, table.shape[3])
    grown[: table.shape[0], :, : table.shape[2]] = table
    return grown

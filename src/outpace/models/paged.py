"""KV cache of fixed-size blocks, which a table assigns to slots, for fused forward passes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.checks.arguments import to_device
from outpace.models.kv_cache import KEPT_SHARE, KVCache, longest_prefix

MAX_PREFIXES = 256  # unused prefixes that are kept; the oldest are evicted first
SLOTS = 64  # table rows at first; more rows need new captures
SCRATCH = 0  # the block that idle slots and padding write to


@dataclass(frozen=True)
class Shape:
    """Shape of the keys and values of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block(self, page: int) -> tuple[int, ...]:
        """Return the shape of a block of ``page`` tokens: layers, keys and values, heads, tokens, d."""
        return self.layers, 2, self.kv_heads, page, self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class Blocks(ABC):
    """Memory of the blocks of a ``PagedCache``. Blocks are numbered from 0."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of blocks that memory is allocated for."""

    @abstractmethod
    def add(self, limit: int) -> int:
        """Allocate a block and return its number.

        Args:
            limit: Most blocks to allocate memory for, if that is not fewer than needed.
        """

    @abstractmethod
    def remove(self, block: int) -> None:
        """Free the memory of a block, whose number may be used again."""

    def trim(self) -> dict[int, int]:
        """Return the memory of removed blocks to the device, if ``remove`` has not done so.

        Returns:
            The new number of each block, if blocks have moved.
        """
        return {}

    @abstractmethod
    def __getitem__(self, block: int) -> Tensor:
        """Return the keys and values of a block ``[layers, 2, heads, page, d]``."""

    @abstractmethod
    def entry(self, block: int) -> int:
        """Return the table entry of a block: its address, or its number."""

    @property
    def tensor(self) -> Tensor:
        """Keys and values ``[blocks, layers, 2, heads, page, d]``, if PyTorch's operations read them."""
        raise TypeError(f"{type(self).__name__} has blocks that only kernels read")


class Addresses(Blocks):
    """Blocks that are each a tensor of their own; the table holds their addresses.

    So blocks come and go without a copy, and captured graphs stay valid.
    """

    def __init__(self, shape: Shape, page: int, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape.block(page), shape.dtype, device
        self._memory: dict[int, Tensor] = {}

    @property
    def count(self) -> int:
        return len(self._memory)

    @torch.inference_mode(False)
    def add(self, limit: int) -> int:
        """See ``Blocks.add``; nothing is zeroed, since kernels read only what was written."""
        block = next(number for number in itertools.count(len(self._memory)) if number not in self._memory)
        self._memory[block] = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return block

    def remove(self, block: int) -> None:
        del self._memory[block]

    def __getitem__(self, block: int) -> Tensor:
        return self._memory[block]

    def entry(self, block: int) -> int:
        return self._memory[block].data_ptr()


class Pool(Blocks):
    """Blocks in one tensor, for PyTorch's operations; the table holds their numbers."""

    def __init__(self, shape: Shape, page: int, device: torch.device) -> None:
        self._tensor = torch.zeros(1, *shape.block(page), dtype=shape.dtype, device=device)
        self._free = [0]

    @torch.inference_mode(False)
    def add(self, limit: int) -> int:
        """See ``Blocks.add``; the tensor doubles, up to the limit."""
        if not self._free:
            size = self._tensor.shape[0]
            more = max(1, min(size, limit - size))
            self._tensor = torch.cat((self._tensor, self._tensor.new_zeros(more, *self._tensor.shape[1:])))
            self._free = list(range(size + more - 1, size - 1, -1))
        return self._free.pop()

    @property
    def count(self) -> int:
        return len(self._tensor)

    def remove(self, block: int) -> None:
        self._free.append(block)

    @torch.inference_mode(False)
    def trim(self) -> dict[int, int]:
        if not self._free:
            return {}
        used = sorted(set(range(len(self._tensor))) - set(self._free))
        self._tensor, self._free = self._tensor[used], []
        return {block: i for i, block in enumerate(used)}

    def __getitem__(self, block: int) -> Tensor:
        return self._tensor[block]

    def entry(self, block: int) -> int:
        return block

    @property
    def tensor(self) -> Tensor:
        return self._tensor


@dataclass(frozen=True)
class Pages:
    """Rows of the block table that a forward pass reads and writes through.

    Attributes:
        table: Entries of the rows' blocks, int64 ``[B, blocks]``.
        page: Tokens of a block.
        memory: The blocks, which stay allocated as long as this object exists.
    """

    table: Tensor
    page: int
    memory: Blocks

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, reach: int) -> list[Tensor]:
        """Write keys and values with PyTorch's operations.

        Args:
            layer: Index of the layer.
            keys: Keys ``[B, heads, n, d]``.
            values: Values ``[B, heads, n, d]``.
            positions: Positions ``[B, n]``. Padding has -1.
            reach: Number of tokens to return.

        Returns:
            The first ``reach`` keys and values, ``[B, heads, reach, d]`` each.
        """
        self.write(layer, keys, values, positions)
        return self.read(layer, reach)

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write keys and values as ``update`` does."""
        memory = self.memory.tensor
        block = self.table.gather(1, (positions // self.page).clamp(min=0))
        block = block.masked_fill(positions < 0, SCRATCH)
        padding = (positions < 0)[:, :, None, None]
        for kind, new in enumerate((keys, values)):
            new = new.transpose(1, 2).masked_fill(padding, 0)  # a mask does not hide NaN
            memory[block, layer, kind, :, positions % self.page] = new

    def read(self, layer: int, reach: int) -> list[Tensor]:
        """Return the first ``reach`` keys and values of a layer, ``[B, heads, reach, d]`` each."""
        memory, used = self.memory.tensor, self.table[:, : -(-reach // self.page)]
        # [B, blocks, heads, page, d]
        return [memory[used, layer, kind].transpose(1, 2).flatten(2, 3)[:, :, :reach] for kind in (0, 1)]


class PagedCache(KVCache):
    """KV cache of blocks, which a table assigns to slots, and which sequences share by reference.

    Args:
        shape: Shape of the keys and values.
        device: Device of the keys and values.
        tokens: Most tokens of a sequence.
        page: Tokens of a block.
        kernels: Whether kernels read the blocks. Otherwise PyTorch's operations do.
        budget: Most bytes. None: a share of the free memory.

    Attributes:
        table: Table entries of each slot's blocks, int64 ``[slots, blocks]``. Entries past a sequence's
            blocks, and those of idle slots, are that of block ``SCRATCH``, which no sequence uses.
    """

    table: Tensor

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        tokens: int,
        page: int,
        kernels: bool,
        budget: int | None = None,
    ) -> None:
        super().__init__(device, budget)
        self.shape, self.page, self._kernels = shape, page, kernels
        self._max_blocks = -(-tokens // page)
        self.release()

    @torch.inference_mode(False)
    def release(self) -> None:
        self._reset()
        self._blocks: dict[int, list[int]] = {}  # by slot
        self._references: dict[int, int] = {}  # by block: how many slots and prefixes hold it
        self._free: list[int] = []  # allocated blocks that nothing holds
        self._prefixes: list[Prefix] = []  # of ended sequences, the oldest first
        self.memory: Blocks = (Addresses if self._kernels else Pool)(self.shape, self.page, self.device)
        self.memory[self.memory.add(1)].zero_()  # SCRATCH
        self.table = torch.zeros(0, self._max_blocks, dtype=torch.int64, device=self.device)
        self.version += 1

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks that sequences or prefixes hold."""
        return len(self._references)

    @property
    def nbytes(self) -> int:
        return self.memory.count * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        return self.page * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        return self.shape.bytes_per_token

    def bytes_for(self, lengths: Sequence[int]) -> int:
        return (sum(-(-length // self.page) for length in lengths) + 1) * self._block_bytes

    def pages(self, slots: Tensor | int) -> Pages:
        """Return table rows for a forward pass.

        Args:
            slots: Slots ``[B]``, whose rows are copied. An int B: the first B slots, whose rows are views.
        """
        rows = self.table[:slots] if isinstance(slots, int) else self.table.index_select(0, slots)
        return Pages(rows, self.page, self.memory)

    @torch.inference_mode(False)
    def prepare(self, slots: int, tokens: int) -> None:
        """See ``KVCache.prepare``; blocks are allocated later, when they are needed."""
        old = self.table
        if slots > len(old):
            slots = max(slots, SLOTS)
            self.table = old.new_full((slots, self._max_blocks), self.memory.entry(SCRATCH))
            self.table[: len(old)] = old
            self.version += 1

    def open(self, slot: int, tokens: Sequence[int]) -> int:
        self.close(slot, ())
        self.prepare(slot + 1, len(tokens))
        active = ((list_, self._blocks[one]) for one, list_ in self._tokens.items())
        kept = ((prefix.tokens, prefix.blocks) for prefix in self._prefixes)
        length, blocks = longest_prefix(itertools.chain(active, kept), tokens)
        self._start(slot, tokens[:length], blocks)
        return length

    def fork(self, source: int, slot: int) -> None:
        self.prepare(slot + 1, self._lengths[source])
        length = self._lengths[source]
        self._start(slot, self._tokens[source][:length], self._blocks[source], length)

    def _start(
        self, slot: int, tokens: Sequence[int], blocks: Sequence[int], length: int | None = None
    ) -> None:
        """Let a slot share the blocks of some tokens. The last one is copied before it is written to."""
        length = len(tokens) if length is None else length
        shared = list(blocks[: -(-length // self.page)])
        for block in shared:
            self._references[block] += 1
        self._blocks[slot], self._lengths[slot], self._tokens[slot] = shared, length, list(tokens)
        self._write([(slot, i) for i in range(len(shared))])

    def reserve(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """See ``KVCache.reserve``; blocks that a slot may write to are its own afterwards."""
        changed = list[tuple[int, int]]()  # slots, and numbers of their blocks
        try:
            for slot, length in zip(slots, lengths, strict=True):
                self._reserve(slot, length, changed)
        finally:
            self._write(changed)

    def _reserve(self, slot: int, length: int, changed: list[tuple[int, int]]) -> None:
        """Reserve memory of one slot, and add the blocks that it got to ``changed``."""
        blocks = self._blocks[slot]
        for i in range(self._lengths[slot] // self.page, min(-(-length // self.page), self._max_blocks)):
            if i == len(blocks):
                blocks.append(self._allocate())
            elif self._is_shared(blocks[i]):
                own = self._allocate()
                self.memory[own].copy_(self.memory[blocks[i]])
                self._drop([blocks[i]])
                blocks[i] = own
            else:
                continue
            changed.append((slot, i))

    def _write(self, changed: Sequence[tuple[int, int]]) -> None:
        """Write the entries of some slots' blocks to the table, without waiting for the device."""
        if changed:
            entries = [(slot, i, self.memory.entry(self._blocks[slot][i])) for slot, i in changed]
            slots, numbers, values = to_device(torch.tensor(entries), self.device).unbind(1)
            self.table[slots, numbers] = values

    def _is_shared(self, block: int) -> bool:
        """Return whether others hold a block, after the oldest prefixes were evicted if memory is short."""
        if self._references[block] > 1 and self._is_full:
            self._evict(lambda: self._is_full and self._references[block] > 1)
        return self._references[block] > 1

    @property
    def _is_full(self) -> bool:
        in_use = len(self._references) + 1  # with SCRATCH
        return not self._free and (in_use + 1) * self._block_bytes > self.budget

    def _allocate(self) -> int:
        """Return a block that one sequence holds, and evict the oldest prefixes if memory is short."""
        if self._is_full:
            self._evict(lambda: not self._free)
            if not self._free:
                raise self._too_large(self.nbytes + self._block_bytes)
        limit = self.budget // self._block_bytes
        try:
            block = self._free.pop() if self._free else self.memory.add(limit)
        except torch.OutOfMemoryError:
            self._evict(lambda: True)
            self._free_memory()
            block = self.memory.add(limit)
        self._references[block] = 1
        return block

    def _evict(self, more: Callable[[], bool]) -> None:
        """Evict unused prefixes, the oldest first, while ``more`` returns True."""
        while self._prefixes and more():
            self._drop(self._prefixes.pop(0).blocks)

    def _drop(self, blocks: Iterable[int]) -> None:
        """Let go of blocks; those that nothing else holds are free."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                self._free.append(block)

    def _free_memory(self) -> None:
        """Return the memory of free blocks to the device."""
        while self._free:
            self.memory.remove(self._free.pop())

    def close(self, slot: int, tokens: Sequence[int] | None = None) -> None:
        if slot not in self._blocks:
            return
        blocks, length = self._blocks.pop(slot), self._lengths.pop(slot)
        del self._tokens[slot]
        self.table[slot] = self.memory.entry(SCRATCH)
        if tokens is None:
            self._stale.discard(slot)
            for block in blocks:
                if self._references[block] == 1:
                    self.memory[block].zero_()  # a mask does not hide NaN
            self._drop(blocks)
            return
        kept = self._reusable(slot, tokens, length)
        used = -(-len(kept) // self.page)
        self._drop(blocks[used:])
        for prefix in list(self._prefixes):
            if prefix.tokens == kept[: len(prefix.tokens)]:  # the new prefix contains it
                self._prefixes.remove(prefix)
                self._drop(prefix.blocks)
        self._prefixes.append(Prefix(kept, blocks[:used]))
        self._evict(lambda: len(self._prefixes) > MAX_PREFIXES)

    def forget(self) -> None:
        super().forget()
        self._evict(lambda: True)

    def trim(self) -> None:
        kept = KEPT_SHARE * self.budget
        self._evict(lambda: len(self._references) * self._block_bytes > kept)
        if self.nbytes > kept:
            self._free_memory()
        if moved := self.memory.trim():
            self._renumber(moved)

    def _renumber(self, moved: Mapping[int, int]) -> None:
        """Use new numbers of all blocks."""
        self._references = {moved[block]: count for block, count in self._references.items()}
        self._free = [moved[block] for block in self._free]
        for prefix in self._prefixes:
            prefix.blocks[:] = [moved[block] for block in prefix.blocks]
        for slot, blocks in self._blocks.items():
            blocks[:] = [moved[block] for block in blocks]
            self._write([(slot, i) for i in range(len(blocks))])


@dataclass(frozen=True)
class Prefix:
    """Tokens of an ended sequence, and the blocks that hold them."""

    tokens: list[int]
    blocks: list[int]

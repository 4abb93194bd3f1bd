"""The KV cache: keys and values of the sequences in the slots, and of prefixes that prompts may reuse.

There are two kinds of KV cache with one interface. ``PagedCache`` is for fused models. It holds fixed-size
blocks, which a table assigns to slots. Sequences share blocks by reference. ``ContiguousCache`` is for
Transformers' own forward passes. It holds one tensor row per slot and layer, and copies shared prefixes.

A forward pass writes keys and values, and ``commit`` then counts the accepted tokens. Rejected draft tokens
are not counted, and the next forward pass overwrites them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

MIN_REUSED_PREFIX = 16  # tokens; computing a shorter prefix is as fast as copying it
BUDGET_SHARE = 0.9  # of the free memory, which the KV cache may take by default
KEPT_SHARE = 0.25  # of the budget, which unused prefixes may keep after the last sequence has ended


class KVCache(ABC):
    """KV cache of sequences, each in a slot.

    Args:
        device: Device of the keys and values.
        budget: Most bytes of the KV cache. None: ``BUDGET_SHARE`` of the memory that is free.

    Attributes:
        max_bytes: The ``budget`` argument.
        share: Fraction of the budget or of the free memory that is for this KV cache. Others have the rest.
        version: Number that changes when memory moves, so that captured graphs are no longer valid.
    """

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self.device, self.max_bytes, self.share = device, budget, 1.0
        self._default_budget: int | None = None  # measured when the first sequence opens
        self.version = 0
        self._lengths: dict[int, int] = {}  # by slot: committed tokens
        self._tokens: dict[int, list[int]] = {}  # by slot: those of them whose ids are known
        self._stale: set[int] = set()  # slots whose tokens no later prompt may reuse

    # Sequences

    def is_open(self, slot: int) -> bool:
        """Return whether a slot has a sequence."""
        return slot in self._lengths

    def length(self, slot: int) -> int:
        """Return the number of committed tokens of a slot."""
        return self._lengths[slot]

    def commit(self, slot: int, count: int, tokens: Sequence[int] = ()) -> None:
        """Commit ``count`` tokens that a forward pass wrote; ``tokens`` are their ids, where known."""
        if tokens and len(self._tokens[slot]) == self._lengths[slot]:
            self._tokens[slot] += tokens
        self._lengths[slot] += count

    def truncate(self, slot: int, length: int) -> None:
        """Shorten a sequence to at most ``length`` committed tokens."""
        self._lengths[slot] = min(length, self._lengths[slot])
        del self._tokens[slot][length:]

    @abstractmethod
    def prepare(self, slots: int, tokens: int) -> None:
        """Prepare for sequences of up to ``tokens`` tokens in the first slots, so that nothing moves later.

        Raises:
            MemoryError: The budget does not suffice, or memory is short.
        """

    @abstractmethod
    def open(self, slot: int, tokens: Sequence[int]) -> int:
        """Start a sequence in a free slot, and reuse the longest cached prefix of its tokens.

        The last token is never reused, since its logits are needed.

        Args:
            slot: The slot.
            tokens: Token ids of the sequence.

        Returns:
            The number of tokens that need no forward pass.
        """

    @abstractmethod
    def fork(self, source: int, slot: int) -> None:
        """Start a sequence in a free slot, with all tokens of another slot."""

    @abstractmethod
    def reserve(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Allocate memory, so that each slot can hold ``lengths`` tokens.

        Raises:
            MemoryError: The budget does not suffice, or memory is short.
        """

    @abstractmethod
    def close(self, slot: int, tokens: Sequence[int] | None = None) -> None:
        """End the sequence of a slot.

        Args:
            slot: The slot.
            tokens: Token ids of the sequence. Later prompts may reuse what is committed of them. None: they
                may not, for instance because keys or values are NaN.
        """

    def forget(self) -> None:
        """Let no later prompt reuse what is cached now. Active sequences go on."""
        self._tokens = {slot: [] for slot in self._tokens}
        self._stale = set(self._lengths)

    def _reset(self) -> None:
        """Forget all sequences."""
        self._lengths, self._tokens, self._stale = {}, {}, set()

    def _reusable(self, slot: int, tokens: Sequence[int], length: int) -> list[int]:
        """Return the tokens of an ended sequence that later prompts may reuse."""
        stale = slot in self._stale
        self._stale.discard(slot)
        return [] if stale else list(tokens[:length])

    @abstractmethod
    def release(self) -> None:
        """Free all memory. No sequence may be active."""

    # Memory

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are allocated."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""

    @abstractmethod
    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the bytes that sequences of these lengths take at most."""

    @property
    def budget(self) -> int:
        """Most bytes of the KV cache."""
        if self.max_bytes is not None:
            return int(self.share * self.max_bytes)
        if self._default_budget is None or not self._lengths:
            free = BUDGET_SHARE * self.share * memory_free(self.device)
            self._default_budget = self.nbytes + int(free)
        return self._default_budget

    @abstractmethod
    def trim(self) -> None:
        """Free memory of unused prefixes beyond ``KEPT_SHARE`` of the budget."""

    def describe(self) -> str:
        """Return a few words for a user: the cost of a token, and the budget."""
        limit = f"{BUDGET_SHARE * self.share:.0%} of the free memory"
        if self.max_bytes is not None:
            limit = size(self.budget)
        return f"{self.bytes_per_token / 1024:.1f} KiB a token, at most {limit}"

    def _too_large(self, nbytes: int) -> MemoryError:
        return MemoryError(
            f"the KV cache needs {size(nbytes)} on {self.device}; at most {size(self.budget)} are allowed: "
            "pass a smaller batch_size or max_new_tokens, or a larger kv_cache_bytes"
        )


def longest_prefix(
    candidates: Iterable[tuple[Sequence[int], Sequence[int]]], tokens: Sequence[int]
) -> tuple[int, Sequence[int]]:
    """Return the length of the longest cached prefix of a prompt, and where it is.

    The last token does not count. A prefix of fewer than ``MIN_REUSED_PREFIX`` tokens does not count either.

    Args:
        candidates: Cached token ids, each with the blocks or the slot that hold them.
        tokens: Token ids of the prompt.
    """
    best: tuple[int, Sequence[int]] = (0, ())
    if len(tokens) > MIN_REUSED_PREFIX:
        head = list(tokens[:MIN_REUSED_PREFIX])
        for cached, blocks in candidates:
            if cached[:MIN_REUSED_PREFIX] == head:
                length = common_prefix_length(cached, tokens, len(tokens) - 1)
                best = max(best, (length, blocks), key=lambda found: found[0])
    return best


def common_prefix_length(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix of two token sequences, at most ``limit``."""
    common, limit = 0, max(0, min(len(one), len(other), limit))
    middle = limit  # the two are mostly equal up to the limit
    while common < limit:
        if list(one[common:middle]) == list(other[common:middle]):
            common = middle
        else:
            limit = middle - 1
        middle = (common + limit + 1) // 2
    return common


def size(nbytes: int) -> str:
    """Return a number of bytes as text, in KiB or MiB."""
    return f"{nbytes / 1024:.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:.1f} MiB"


def memory_free(device: torch.device) -> int:
    """Return the bytes of free memory on a device; unknown memory counts as unlimited."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])  # first, because it initializes CUDA
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (stats[f"{name}_bytes"]["all"]["current"] for name in ("reserved", "allocated"))
        return free + int(reserved - allocated)
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return 1 << 62

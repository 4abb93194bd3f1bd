"""The KV cache returns what each sequence's own tokens imply, within its budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.models import contiguous as runs
from outpace.models import kv_cache
from outpace.models import paged as paging
from outpace.models.causal import CausalScorer
from outpace.models.contiguous import ContiguousCache, Span
from outpace.models.fused_scorer import FusedScorer
from outpace.models.kv_cache import KEPT_SHARE, KVCache
from outpace.models.paged import PagedCache, Shape
from outpace.models.scorer import Scorer
from tests.tiny import tiny

CPU = torch.device("cpu")
LAYERS, HEADS, D, PAGE, TOKENS, SLOTS = 2, 2, 3, 4, 32, 4
SHAPE = Shape(LAYERS, HEADS, D, torch.float64)
BLOCK_BYTES = PAGE * SHAPE.bytes_per_token
PLENTY = 1000 * BLOCK_BYTES


def paged(blocks: int = 1000, tokens: int = TOKENS) -> PagedCache:
    """Return an empty cache with a budget of so many blocks, the scratch block included."""
    return PagedCache(SHAPE, CPU, tokens, PAGE, kernels=False, budget=blocks * BLOCK_BYTES)


def contiguous(budget: int = PLENTY) -> ContiguousCache:
    return ContiguousCache(LAYERS, CPU, SHAPE.bytes_per_token, budget)


def keys_of(text: Sequence[int], layer: int, kind: int) -> Tensor:
    """Return keys or values ``[1, heads, n, d]`` of a text; each depends on all tokens up to it."""
    prefixes = [hash(tuple(text[: i + 1])) % 2**40 for i in range(len(text))]
    base = torch.tensor(prefixes, dtype=torch.float64).view(1, 1, -1, 1)
    parts = torch.arange(HEADS * D, dtype=torch.float64).view(1, HEADS, 1, D)
    return base + parts / 8 + (2 * layer + kind) * 2.0**41


class Sequences(ABC):
    """A cache, and what a user knows of it: the committed tokens of each open slot."""

    cache: KVCache

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.closed: list[list[int]] = []  # texts that later prompts may begin like

    def open(self, slot: int, prompt: list[int]) -> None:
        cached = self.cache.open(slot, prompt)
        assert cached < len(prompt), "the last token comes from the cache"
        self.texts[slot] = prompt[:cached]

    def fork(self, source: int, slot: int) -> None:
        self.cache.fork(source, slot)
        self.texts[slot] = list(self.texts[source])

    def forward(self, slots: list[int], new: list[list[int]]) -> None:
        """Write tokens after the committed ones, without committing them."""
        ends = [len(self.texts[slot]) + len(tokens) for slot, tokens in zip(slots, new, strict=True)]
        self.cache.reserve(slots, ends)
        self.write(slots, new)

    def commit(self, slot: int, tokens: list[int], known: bool) -> None:
        self.cache.commit(slot, len(tokens), tokens if known else ())
        self.texts[slot] += tokens

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)
        del self.texts[slot][length:]

    def close(self, slot: int, keep: bool, extra: list[int]) -> None:
        text = self.texts.pop(slot)
        self.cache.close(slot, [*text, *extra] if keep else None)
        self.closed.append(text)

    def check(self) -> None:
        """Check that every committed position of every slot has the keys of that slot's own tokens."""
        for slot, text in self.texts.items():
            assert self.cache.length(slot) == len(text)
            found = torch.stack([one for layer in range(LAYERS) for one in self.read(slot, layer)])
            expected = torch.cat([keys_of(text, layer, kind) for layer in range(LAYERS) for kind in (0, 1)])
            assert torch.equal(found, expected), f"slot {slot} of {self.texts}"

    @abstractmethod
    def write(self, slots: list[int], new: list[list[int]]) -> None:
        """Write the keys and values of a forward pass."""

    @abstractmethod
    def read(self, slot: int, layer: int) -> list[Tensor]:
        """Return the committed keys and values ``[heads, n, d]`` of a slot."""

    def padded(self, slots: list[int], new: list[list[int]], layer: int, kind: int, left: bool) -> Tensor:
        """Return the new keys or values ``[R, heads, n, d]``, with wrong ones for padding."""
        longest = max(map(len, new))
        rows = []
        for slot, tokens in zip(slots, new, strict=True):
            text = self.texts[slot]
            keys = keys_of([*text, *tokens], layer, kind)[:, :, len(text) :]
            padding = keys.new_full((1, HEADS, longest - len(tokens), D), -7.0)
            rows.append(torch.cat((padding, keys) if left else (keys, padding), dim=2))
        return torch.cat(rows)


class PagedSequences(Sequences):
    def __init__(self, blocks: int = 1000) -> None:
        super().__init__()
        self.cache: PagedCache = paged(blocks)

    def blocks(self, slot: int) -> set[int]:
        return {int(block) for block in self.cache.table[slot]} - {paging.SCRATCH}

    @torch.inference_mode()
    def write(self, slots: list[int], new: list[list[int]]) -> None:
        longest = max(map(len, new))
        positions = torch.full((len(slots), longest), -1)
        for row, (slot, tokens) in enumerate(zip(slots, new, strict=True)):
            at = torch.arange(len(self.texts[slot]), len(self.texts[slot]) + len(tokens))
            positions[row, : len(tokens)] = at
            written = {int(block) for block in self.cache.table[slot][at // PAGE]}
            assert paging.SCRATCH not in written, "a token was written to the scratch block"
            others = set[int]().union(*(self.blocks(other) for other in self.texts if other != slot))
            assert not written & others, "a block that two slots hold was written"
        every = len(slots) % 2 == 0  # as the graph executor: all first slots take part, idle ones with -1
        pages = self.cache.pages(max(slots) + 1 if every else torch.tensor(slots))
        for layer in range(LAYERS):
            keys, values = (self.padded(slots, new, layer, kind, left=False) for kind in (0, 1))
            if every:
                all_at, (all_keys, all_values) = _all_slots(slots, positions, keys, values)
                pages.update(layer, all_keys, all_values, all_at, TOKENS)
            else:
                pages.update(layer, keys, values, positions, TOKENS)

    def read(self, slot: int, layer: int) -> list[Tensor]:
        nothing = torch.zeros(1, HEADS, 0, D, dtype=torch.float64)
        at = torch.zeros(1, 0, dtype=torch.int64)
        reach = len(self.texts[slot])
        return [
            found[0]
            for found in self.cache.pages(torch.tensor([slot])).update(layer, nothing, nothing, at, reach)
        ]


def _all_slots(slots: list[int], positions: Tensor, *news: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return positions and keys for all first slots; idle ones have position -1."""
    all_at = torch.full((max(slots) + 1, positions.shape[1]), -1)
    all_at[slots] = positions
    spread = []
    for new in news:
        every = torch.full((max(slots) + 1, *new.shape[1:]), -9.0, dtype=torch.float64)
        every[slots] = new
        spread.append(every)
    return all_at, spread


class ContiguousSequences(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.cache: ContiguousCache = contiguous()

    @torch.inference_mode()
    def write(self, slots: list[int], new: list[list[int]]) -> None:
        longest = max(map(len, new))
        first = self.cache.arrange(slots)
        assert [self.cache.row(slot) for slot in slots] == list(range(first, first + len(slots)))
        positions = []
        for slot, tokens in zip(slots, new, strict=True):
            length = len(self.texts[slot])
            end = length + len(tokens)
            positions.append([*range(end, length + longest), *range(length, end)])  # padding comes first
        at = torch.tensor(positions).clamp(max=self.cache.capacity - 1)
        self.cache.span = Span(first, at, int(at.max()) + 1)
        for layer in range(LAYERS):
            keys, values = (self.padded(slots, new, layer, kind, left=True) for kind in (0, 1))
            self.cache.past_key_values.update(keys, values, layer)

    def read(self, slot: int, layer: int) -> list[Tensor]:
        one = self.cache.past_key_values.layers[layer]
        row, length = self.cache.row(slot), len(self.texts[slot])
        if not length:
            return [torch.zeros(HEADS, 0, D, dtype=torch.float64)] * 2
        return [table[row, :, :length] for table in (one.keys, one.values)]


def run_program(sequences: Sequences, draw: Any, steps: int) -> None:
    """Run random operations, and check all contents after each."""

    def integer(low: int, high: int) -> int:
        return int(draw(st.integers(low, high)))

    def tokens(low: int, high: int) -> list[int]:
        return [int(bit) for bit in draw(st.lists(st.integers(0, 1), min_size=low, max_size=high))]

    for _ in range(steps):
        open_slots = sorted(sequences.texts)
        free = [slot for slot in range(SLOTS) if slot not in sequences.texts]
        room = [slot for slot in open_slots if len(sequences.texts[slot]) < TOKENS - 1]
        ops = ["forget", "trim"] + ["open"] * 6 * bool(free) + ["fork"] * 3 * bool(free and open_slots)
        ops += ["forward"] * 10 * bool(room) + ["truncate", "close", "close"] * bool(open_slots)
        op = draw(st.sampled_from(ops))
        if op == "open":
            texts = [[], *sequences.closed, *sequences.texts.values()]
            known = draw(st.sampled_from(texts[-6:]))
            prompt = [*known[: integer(0, TOKENS - 4)], *tokens(1, 3)]
            sequences.open(draw(st.sampled_from(free)), prompt)
        elif op == "fork":
            sequences.fork(draw(st.sampled_from(open_slots)), draw(st.sampled_from(free)))
        elif op == "forward":
            slots = draw(st.lists(st.sampled_from(room), min_size=1, unique=True))
            space = [TOKENS - 1 - len(sequences.texts[slot]) for slot in slots]
            new = [tokens(1, min(7, most)) for most in space]
            sequences.forward(slots, new)
            known = integer(0, 1) == 1  # a prompt's tokens are known, accepted draft tokens are not
            for slot, written in zip(slots, new, strict=True):
                sequences.commit(slot, written[: integer(0, len(written))], known)
        elif op == "truncate":
            slot = draw(st.sampled_from(open_slots))
            sequences.truncate(slot, integer(0, TOKENS))
        elif op == "close":
            slot = draw(st.sampled_from(open_slots))
            sequences.close(slot, keep=integer(0, 3) > 0, extra=tokens(0, 2))
        elif op == "forget":
            sequences.cache.forget()
        else:
            sequences.cache.trim()
        sequences.check()


@given(st.data())
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_blocks_hold_each_sequences_own_tokens_after_any_operations(data: st.DataObject) -> None:
    blocks = data.draw(st.sampled_from([4 * TOKENS // PAGE + 1, 1000]))
    sequences = PagedSequences(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "MIN_REUSED_PREFIX", 2)
        patch.setattr(runs, "MIN_REUSED_PREFIX", 2)
        run_program(sequences, data.draw, 25)
    cache = sequences.cache
    for slot in list(sequences.texts):
        sequences.close(slot, keep=True, extra=[])
    cache.forget()
    cache.max_bytes = BLOCK_BYTES
    cache.trim()
    assert cache.nbytes == BLOCK_BYTES, "only the scratch block is left"
    # No block is lost: together, sequences can have all of the budget.
    cache.max_bytes = (4 * TOKENS // PAGE + 1) * BLOCK_BYTES
    for slot in range(4):
        cache.open(slot, [slot])
        cache.reserve([slot], [TOKENS])
    assert cache.nbytes == cache.max_bytes


@given(st.data())
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_contiguous_rows_hold_each_sequences_own_tokens_after_any_operations(data: st.DataObject) -> None:
    sequences = ContiguousSequences()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "MIN_REUSED_PREFIX", 2)
        patch.setattr(runs, "MIN_REUSED_PREFIX", 2)
        run_program(sequences, data.draw, 25)
    allocated = sequences.cache.nbytes
    for slot in list(sequences.texts):
        sequences.close(slot, keep=True, extra=[])
    sequences.cache.forget()
    sequences.cache.max_bytes = allocated
    sequences.cache.trim()
    assert sequences.cache.nbytes == 0


def finished(sequences: Sequences, slot: int, text: list[int]) -> None:
    """Generate a text in a slot, and end it."""
    sequences.open(slot, text)
    rest = text[len(sequences.texts[slot]) :]
    sequences.forward([slot], [rest])
    sequences.commit(slot, rest, known=True)
    sequences.close(slot, keep=True, extra=[])


def test_the_oldest_unused_prefix_is_evicted_first() -> None:
    texts = [[number, *range(1, 20)] for number in range(3)]  # of 5 blocks each
    sequences = PagedSequences(blocks=1 + 15)
    for text in texts:
        finished(sequences, 0, text)
    assert sequences.cache.nbytes == sequences.cache.budget
    sequences.open(1, [9])
    sequences.forward([1], [[9, 9, 9]])  # takes one block
    reused = [len(text) - 1 for text in texts[1:]]
    assert [sequences.cache.open(slot, text) for slot, text in enumerate(texts, 2)] == [0, *reused]


def test_a_prefix_that_a_sequence_uses_is_not_evicted() -> None:
    first, second = ([number, *range(1, 20)] for number in range(2))
    sequences = PagedSequences(blocks=1 + 11)
    finished(sequences, 0, first)
    sequences.open(1, [*first, 7])
    assert len(sequences.texts[1]) == len(first)
    finished(sequences, 0, second)
    sequences.open(2, [8])
    sequences.forward([2], [[8] * 20])  # evicts both prefixes, but not the blocks of slot 1
    sequences.commit(2, [8] * 20, known=True)
    sequences.check()


@pytest.mark.parametrize(
    "cache", [paged(blocks=4), contiguous(63 * SHAPE.bytes_per_token)], ids=["paged", "rows"]
)
def test_a_budget_too_small_raises_an_error_that_names_kv_cache_bytes(cache: KVCache) -> None:
    def open_and_reserve() -> None:
        cache.open(0, [1])
        cache.reserve([0], [TOKENS])

    with pytest.raises(MemoryError, match="kv_cache_bytes"):
        open_and_reserve()
    assert cache.nbytes <= cache.budget
    cache.close(0)
    assert not cache.is_open(0)


def test_a_sequence_goes_on_after_a_reservation_that_failed() -> None:
    sequences = PagedSequences(blocks=1 + 5)
    sequences.open(0, [1])
    sequences.forward([0], [[1, 2, 3]])
    sequences.commit(0, [1, 2, 3], known=True)
    with pytest.raises(MemoryError, match="kv_cache_bytes"):
        sequences.cache.reserve([0], [TOKENS])
    sequences.forward([0], [[4, 5, 6, 7, 8, 9]])
    sequences.commit(0, [4, 5, 6, 7, 8, 9], known=True)
    sequences.check()


def test_growing_the_memory_keeps_contents_and_captured_graphs() -> None:
    sequences = PagedSequences()
    sequences.cache.prepare(SLOTS, TOKENS)
    version, table = sequences.cache.version, sequences.cache.table
    for slot in range(SLOTS):
        sequences.open(slot, [slot])
        sequences.forward([slot], [[slot, *range(25)]])
        sequences.commit(slot, [slot, *range(25)], known=True)
        sequences.check()
    assert sequences.cache.version == version
    assert sequences.cache.table is table


def test_more_table_rows_keep_contents_and_invalidate_captured_graphs() -> None:
    sequences = PagedSequences()
    sequences.open(0, [1])
    sequences.forward([0], [[1, 2, 3]])
    sequences.commit(0, [1, 2, 3], known=True)
    version = sequences.cache.version
    sequences.cache.prepare(len(sequences.cache.table), TOKENS)
    assert sequences.cache.version == version
    sequences.cache.prepare(len(sequences.cache.table) + 1, TOKENS)
    assert sequences.cache.version != version
    sequences.check()


def test_rows_that_grow_keep_contents_and_invalidate_captured_graphs() -> None:
    sequences = ContiguousSequences()
    sequences.open(0, [1])
    sequences.forward([0], [[1, 2, 3]])
    sequences.commit(0, [1, 2, 3], known=True)
    version = sequences.cache.version
    sequences.cache.prepare(1, 200)
    assert sequences.cache.version != version
    sequences.check()


@pytest.mark.parametrize("kind", ["paged", "rows"])
def test_memory_kept_after_the_last_sequence_is_bounded_by_a_share_of_the_budget(kind: str) -> None:
    sequences: Sequences = PagedSequences(blocks=40) if kind == "paged" else ContiguousSequences()
    for number in range(10):
        finished(sequences, 0, [number, *range(20)])
    cache = sequences.cache
    if kind == "rows":
        cache.max_bytes = cache.nbytes
    assert cache.nbytes > KEPT_SHARE * cache.budget
    cache.trim()
    assert cache.nbytes <= KEPT_SHARE * cache.budget
    if kind == "paged":
        reused = [cache.open(slot, [number, *range(20), 0]) for slot, number in enumerate(range(10))]
        assert reused[-1] == 21, "the newest prefix stays"
        assert reused[0] == 0, "the oldest one does not"


def test_trimmed_memory_goes_back_to_the_device() -> None:
    cache = paged(blocks=40)
    cache.open(0, [1])
    cache.reserve([0], [TOKENS])
    cache.close(0)
    cache.trim()
    assert cache.memory.tensor.nbytes <= max(BLOCK_BYTES, KEPT_SHARE * cache.budget)


@pytest.mark.parametrize("kind", [FusedScorer, CausalScorer])
def test_only_committed_tokens_are_reused(kind: type[FusedScorer] | type[CausalScorer]) -> None:
    scorer: Scorer = kind(tiny())
    text = torch.randint(61, (30,)).tolist()
    scorer.prefill([0], [text[:20]])
    scorer.score([0], torch.tensor([text[20:26]]))
    assert scorer.cache.length(0) == 20, "scored tokens count"
    scorer.cache.commit(0, 3)
    assert scorer.cache.length(0) == 23
    scorer.score([0], torch.tensor([[text[23], 1, 1, 1]]))
    scorer.reset([0], [text])
    assert scorer.open(0, text, None) == 23
    expected = kind(tiny()).prefill([0], [text])
    torch.testing.assert_close(scorer.append([0], [text[23:]]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["paged", "rows"])
def test_what_is_closed_without_tokens_is_not_reused(kind: str) -> None:
    sequences: Sequences = PagedSequences() if kind == "paged" else ContiguousSequences()
    text = list(range(20))
    sequences.open(0, text)
    sequences.forward([0], [text])
    sequences.commit(0, text, known=True)
    sequences.close(0, keep=False, extra=[])
    assert [sequences.cache.open(slot, [*text, 1]) for slot in (0, 1)] == [0, 0]


def test_a_contiguous_cache_that_grows_keeps_the_newest_prefixes() -> None:
    cache = ContiguousCache(1, torch.device("cpu"), 16)
    texts = [[slot] * 20 for slot in range(3)]
    cache.prepare(3, 30)
    for slot, text in enumerate(texts):
        cache.open(slot, text)
        cache.span = Span(cache.row(slot), torch.arange(20)[None], 20)
        new = torch.full((1, 2, 20, 4), float(slot))
        cache.past_key_values.layers[0].update(new, -new)
        cache.commit(slot, 20, text)
    for slot in (2, 0, 1):
        cache.close(slot, texts[slot])
    assert cache.open(0, [*texts[1], *range(100)]) == 20  # only one row is needed, and more tokens
    assert (cache.rows, cache.capacity) == (1, 128)
    layer = cache.past_key_values.layers[0]
    assert bool((layer.keys[cache.row(0), :, :20] == 1).all())
    assert bool((layer.values[cache.row(0), :, :20] == -1).all())


def test_the_measured_size_of_a_token_is_kept_when_memory_is_freed() -> None:
    cache = ContiguousCache(1, torch.device("cpu"), 999)
    cache.prepare(1, 30)
    cache.open(0, [1, 2])
    cache.span = Span(0, torch.arange(2)[None], 2)
    new = torch.zeros(1, 2, 2, 4)
    cache.past_key_values.layers[0].update(new, new)
    cache.close(0, None)
    cache.release()
    assert cache.bytes_per_token == 2 * 2 * 4 * 4


def test_blocks_in_one_tensor_take_no_more_than_the_budget() -> None:
    shape = Shape(1, 2, 4, torch.float32)
    budget = 21 * 16 * shape.bytes_per_token
    cache = PagedCache(shape, torch.device("cpu"), 1024, 16, False, budget)
    cache.open(0, [])
    for length in range(16, 321, 16):
        cache.reserve([0], [length])
        assert cache.memory.tensor.nbytes == cache.nbytes <= budget
    with pytest.raises(MemoryError):
        cache.reserve([0], [336])


@pytest.mark.parametrize("tokens", [None, ()])
def test_a_prompt_after_forgotten_ones_is_kept(tokens: tuple[int, ...] | None) -> None:
    cache = PagedCache(Shape(1, 2, 4, torch.float32), torch.device("cpu"), 1024, 16, False)
    text = list(range(40))
    cache.open(0, text)
    cache.forget()
    cache.close(0, tokens)
    for cached in (0, 39):
        assert cache.open(0, text) == cached
        cache.reserve([0], [40])
        cache.commit(0, 40 - cached, text[cached:])
        cache.close(0, text)

"""Ranges: the work of the thread blocks of attention over a paged KV cache, and the shape of the blocks.

The tokens of all rows are cut into ranges, so that there are enough blocks for all processors. This happens
on the GPU, so that no CUDA graph depends on a length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.models.kernels.launch import Device, device
from outpace.verification.kernels.ahead import launch

# If B·kv_heads is at most the number of processors, and if it is more:
BLOCKS = 1, 16  # blocks per processor
MIN_RANGE = 64, 512  # least tokens of a full range
FIELDS = 8  # numbers per range
ROWS_AT_ONCE = 256  # rows that the list of ranges is compiled for; for more, the next power of two
BLOCK = 64  # earlier tokens loaded at once; see `blocks_of`
FEW_BLOCKS = 160  # with fewer blocks, each may take a whole processor, and tokens are prefetched
FEW_QUERIES = 2  # new tokens of a row
FEW_HEADS = 16  # key heads of all rows
SHORT_LINE = 128  # bytes of a key up to which a block needs no more warps
LONG_LINE = 256  # bytes of a key up to which REGISTERS suffice in 16 bits
REGISTERS = 168  # of a thread of such a block, so that blocks of the next kernel fit beside it
STAGES = 3  # most pipeline stages, Triton's `num_stages`


@dataclass(frozen=True)
class BlockShape:
    """Shape of the blocks of ``few_queries``.

    Attributes:
        page: Tokens of a page, a power of two from 16 on.
        max_ranges: Most full ranges of all rows together. The last range of each row need not be full.
        min_range: Least tokens of a full range.
        few: Whether there are few blocks, each of which may take a whole processor.
        tokens: Earlier tokens loaded at once, a divisor of ``page``.
        warps: Number of warps.
        stages: Number of pipeline stages, Triton's ``num_stages``.
        registers: Most registers of a thread, Triton's ``maxnreg``. None: as many as the compiler likes.
    """

    page: int
    max_ranges: int
    min_range: int
    few: bool
    tokens: int
    warps: int
    stages: int
    registers: int | None


def blocks_of(
    B: int, n: int, heads: int, kv_heads: int, d: int, *, page: int, dtype: torch.dtype, at: torch.device
) -> BlockShape:
    """Return the shape of blocks that was fastest on an H200.

    Args:
        B: Number of rows.
        n: Number of new tokens of a row.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        d: Size of a head.
        page: Tokens of a page.
        dtype: Dtype of keys and values.
        at: The device.
    """
    here = device(at)
    many = B * kv_heads > here.processors
    max_ranges = max(1, BLOCKS[many] * here.processors // kv_heads)
    few = (B + max_ranges - 1) * kv_heads < FEW_BLOCKS
    line = max(16, triton.next_power_of_2(d)) * dtype.itemsize
    tokens, warps, registers = BLOCK, 4, None
    if not few and n > FEW_QUERIES:
        tokens, warps = max(16, BLOCK // 2), 2
    elif few and line > SHORT_LINE:
        tokens, warps = 2 * BLOCK if B * kv_heads > FEW_HEADS else BLOCK, 8
        registers = REGISTERS if dtype.itemsize == 2 and line <= LONG_LINE else None
    rows = max(16, triton.next_power_of_2(heads // kv_heads * n))
    tokens, stages = fitting(min(tokens, page), rows, line, here)
    return BlockShape(page, max_ranges, MIN_RANGE[many], few, tokens, warps, stages, registers)


def fitting(block: int, rows: int, line: int, here: Device) -> tuple[int, int]:
    """Return the number of tokens loaded at once, and of stages, that fit a device's shared memory.

    Args:
        block: Preferred number of tokens loaded at once.
        rows: Queries of a block.
        line: Bytes of a token.
        here: The device.
    """
    stages = STAGES
    while shared(block, rows, line, stages) > here.shared and block > 16:
        block, stages = (block, stages - 1) if stages > 2 else (block // 2, stages)
    return block, stages


def shared(block: int, rows: int, line: int, stages: int) -> int:
    """Return the most bytes of shared memory that a block takes.

    It holds keys and values of all stages but one, queries, and scores between the two products.
    """
    return 2 * block * line * (stages - 1) + 2 * rows * line + 4 * rows * block


@triton.jit(
    do_not_specialize=["positions", "table", "B", "n", "max_ranges", "positions_stride", "table_stride"]
)
def cut_rows(
    positions, table, ranges, B, n, max_ranges, min_range, window, positions_stride, table_stride,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Write one item of the list of ranges.

    All ranges have the same length, a multiple of BLOCK. Only the last range of a row may be shorter.
    """
    item = tl.program_id(0)
    rows = tl.arange(0, MANY)
    starts = tl.load(positions + rows * positions_stride, mask=rows < B, other=0).to(tl.int32)
    starts = tl.maximum(starts, 0)
    begins = tl.where(window > 0, tl.maximum(0, (starts + 1 - window) // PAGE * PAGE), 0)
    stops = tl.minimum(starts + n, table_stride * PAGE)
    span = tl.cdiv(tl.cdiv(tl.sum(tl.where(rows < B, stops - begins, 0), axis=0), max_ranges), BLOCK) * BLOCK
    span = tl.maximum(min_range, span)
    counts = tl.where(rows < B, tl.cdiv(stops - begins, span), 0)
    ends = tl.cumsum(counts, axis=0)
    here = (rows < B) & (ends > item) & (ends - counts <= item)
    num_ranges = tl.sum(tl.where(here, counts, 0), axis=0)
    r = item - tl.sum(tl.where(here, ends - counts, 0), axis=0)
    b = tl.sum(tl.where(here, rows, 0), axis=0)
    first = tl.sum(tl.where(here, begins, 0), axis=0) + r * span
    start = tl.sum(tl.where(here, starts, 0), axis=0)
    stop = tl.minimum(tl.sum(tl.where(here, stops, 0), axis=0), first + span)
    if num_ranges > 0:
        tl.store(ranges + item * FIELDS + 1, b)
        tl.store(ranges + item * FIELDS + 2, r)
        tl.store(ranges + item * FIELDS + 3, first)
        tl.store(ranges + item * FIELDS + 4, stop)
        tl.store(ranges + item * FIELDS + 5, start)
        last = tl.maximum(first, tl.minimum(stop, start) - 1)
        tl.store(ranges + item * FIELDS + 6, tl.load(table + b * table_stride + last // PAGE))
    tl.store(ranges + item * FIELDS, num_ranges)


def source_ranges_of(lengths: Tensor, table: Tensor, blocks: BlockShape) -> Tensor:
    """Cut the cached tokens of rows, ``lengths`` int64 ``[B]``, into ranges for cross-attention.

    The result is that of ``ranges_of``, without new tokens. A row without tokens has no range.
    """
    return _ranges(lengths[:, None], 0, table, blocks, None)


def ranges_of(positions: Tensor, table: Tensor, blocks: BlockShape, window: int | None = None) -> Tensor:
    """Cut the tokens of rows into ranges, which the blocks of ``few_queries`` handle.

    Each row has ranges in proportion to its tokens, and at least one. All layers of a forward pass
    with the same window have the same ranges.

    Args:
        positions: Positions ``[B, n]``; see ``few_queries``.
        table: Address of each page of each row; see ``few_queries``.
        blocks: Shape of the blocks.
        window: How far back the layers look; None for no limit.

    Returns:
        A list of ranges, int64 ``[items, FIELDS]``. An item holds the number of ranges of the row, the row,
        and the number of this range in the row. Then follow the first token, the end, the first new token of
        the row, and the address of the last earlier token's page. Items without a range begin with 0, and
        come last.
    """
    return _ranges(positions, positions.shape[1], table, blocks, window)


def _ranges(positions: Tensor, n: int, table: Tensor, blocks: BlockShape, window: int | None) -> Tensor:
    """Return the ranges of rows with n new tokens from their first positions on."""
    B = len(positions)
    # Each row may have a range that is not full.
    out = torch.empty(B + blocks.max_ranges - 1, FIELDS, dtype=torch.int64, device=positions.device)
    launch(
        cut_rows, (len(out),),
        positions, table, out, B, n, blocks.max_ranges, blocks.min_range, window or 0,
        positions.stride(0), table.stride(0), blocks.tokens, blocks.page, FIELDS,
        max(ROWS_AT_ONCE, triton.next_power_of_2(B)),
    )  # fmt: skip
    return out

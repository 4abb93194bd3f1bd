"""Launcher of the fused kernels: the counterpart of ``eager`` on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.sampling import SamplingParams
from outpace.sampling.rows import NO_SHAPE, Edits, RowSampling, shape_of
from outpace.verification.block import Block, SampledTokens, Verdict
from outpace.verification.kernels import ahead
from outpace.verification.kernels.cut import narrow, widen
from outpace.verification.kernels.decide import finish, scan
from outpace.verification.kernels.edit import edit_rows
from outpace.verification.kernels.match import compare, race
from outpace.verification.kernels.pieces import RULES
from outpace.verification.kernels.sample import sample_draft
from outpace.verification.kernels.workspace import workspace_size
from outpace.verification.rules import Rule

# Low bits that are 0 when a number of the dtype is stored as float32
SHIFTS = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}
BLOCKS = 512  # desired blocks of the last launch; there are at most twice as many
CHUNKS = 64  # chunks of a split; the maximum of each is stored
SCAN_TILE = 2048  # tokens of listed chunks that a block loads at once
MAX_LISTED = 256  # capacity of a row's list of surviving tokens
ROW_TILE = 8192  # tokens that a block loads at once in a pass over a whole row
UNCHANGED, TEMPERED, CUT = 0, 1, 2  # the kernels apply: nothing; temperature; temperature and filters


@functools.cache
def sizes(V: int) -> tuple[int, int, int]:
    """Return the tokens of a split, the splits of a row, and the power of two that holds the splits.

    There are enough splits to spread one row over the device, and few enough to combine fast.
    """
    size = 2048 if V <= 1 << 16 else 4096
    splits = -(-V // size)
    return size, splits, power_of_2(splits)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def fits(rule: Rule, logits: Tensor) -> bool:
    """Return whether the kernels support this rule and such logits."""
    return logits.dtype in SHIFTS and logits.stride(-1) == 1 and rule.name != "rejection"


Sampling = Sequence[SamplingParams] | RowSampling | None
"""Parameters for all rows or one per row, tensors, or nothing to apply."""


class KernelSampling(NamedTuple):
    """Sampling parameters for one model's logits, as the kernels take them.

    The four numbers of a row are those of ``RowSampling.shape``.

    Attributes:
        level: Adjustment that the kernels make: ``UNCHANGED``, ``TEMPERED`` or ``CUT``.
        greedy: True if any row may be greedy.
        per_row: Four numbers of each row, flat, or None if all rows share them.
        shared: Four numbers that all rows share.
    """

    level: int
    greedy: bool
    per_row: Tensor | None
    shared: tuple[float, float, float, float]

    @classmethod
    def of(cls, sampling: Sampling, V: int, device: torch.device) -> KernelSampling:
        """Convert sampling parameters, one for all rows or one per row."""
        if sampling is None:
            return NO_ADJUSTMENT
        if isinstance(sampling, RowSampling):
            return cls(CUT if sampling.filters else TEMPERED, True, sampling.shape, NO_ADJUSTMENT.shared)
        rows = [shape_of(one, V) for one in sampling]
        if all(row == NO_ADJUSTMENT.shared for row in rows):
            return NO_ADJUSTMENT
        level = CUT if any(row[0] and row[1:] != NO_ADJUSTMENT.shared[1:] for row in rows) else TEMPERED
        greedy = any(not row[0] for row in rows)
        if len(rows) == 1:
            return cls(level, greedy, None, rows[0])
        flat = [number for row in rows for number in row]
        return cls(level, greedy, on_device(flat, torch.float32, device), NO_ADJUSTMENT.shared)


NO_ADJUSTMENT = KernelSampling(UNCHANGED, False, None, NO_SHAPE)


def verify(
    block: Block,
    rule: Rule,
    lenience: float = 1.0,
    sampling: Sampling = None,
    draft_sampling: Sampling = None,
) -> Verdict:
    """Apply a rule to a block with the kernels.

    The logits are adjusted already, except for temperature, top-k, top-p and min-p.
    """
    target, draft, tokens, lengths = block.target_logits, block.draft_logits, block.tokens, block.counts
    device = target.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return verify(block, rule, lenience, sampling, draft_sampling)
    B, positions, V = target.shape
    g = positions - 1
    size, splits, S = sizes(V)
    chunk = max(1, size // CHUNKS)
    p, q = KernelSampling.of(sampling, V, device), NO_ADJUSTMENT
    has_q = draft is not None
    if draft is None:
        draft = target  # a placeholder, never read
    else:
        q = KernelSampling.of(draft_sampling, V, device)
    samples_target = rule.name == "match" or g == 0
    if samples_target:
        has_q, q = False, NO_ADJUSTMENT
    P = positions if samples_target or p.level == CUT else g
    has_cut = has_q and block.draft_cut is not None
    any_cut = p.level == CUT or (q.level == CUT and not has_cut)
    workspace = torch.empty(
        workspace_size(B, g, P, splits, splits * (size // chunk) + 2 * MAX_LISTED if any_cut else 0),
        dtype=torch.float32,
        device=device,
    )
    tokens, lengths = as_int64(tokens), None if lengths is None else as_int64(lengths)
    accepted, next_token = tokens.new_empty(B), tokens.new_empty(B)
    bad = tokens.new_empty(B, dtype=torch.bool)
    seeds, seed = (as_int64(block.seeds), 0) if isinstance(block.seeds, Tensor) else (None, block.seeds)
    starts, start = (as_int64(block.starts), 0) if isinstance(block.starts, Tensor) else (None, block.starts)
    lse = None if block.draft_lse is None else block.draft_lse.double().contiguous()
    draft_cut, draft_tie = (
        None if one is None else one.contiguous() for one in (block.draft_cut, block.draft_tie)
    )
    invalid, ragged = block.invalid, lengths is not None
    strides = (B, g, V, splits, *target.stride()[:2], *draft.stride()[:2])
    outputs = (accepted, next_token, bad)
    # Everything that Triton specializes or selects a kernel by
    key = (
        rule.name, target.dtype, draft.dtype, strides, ragged, p[:2], p.per_row is None, q[:2],
        q.per_row is None,
        has_q, lse is None, has_cut, invalid is None, seeds is None, starts is None,
        lenience < 1, device.index, target.data_ptr() % 16, draft.data_ptr() % 16,
    )  # fmt: skip
    # The draft's rows are scanned only where their logsumexp or cut is not known.
    known = lse is not None and (q.level == UNCHANGED or has_cut)
    q_rows = B * g if has_q and not known else 0
    inputs = (target, draft, lengths, p.per_row, q.per_row, workspace, *strides)
    if not samples_target or p.level == CUT:
        launch(
            scan, key, (B * P + q_rows) * splits, max(2 if any_cut else 1, size // 2048),
            (*inputs, p.shared[0], q.shared[0]),
            (size, chunk, ragged, p.level, q.level, p.greedy, q.greedy, any_cut),
        )  # fmt: skip
    if any_cut:
        shifts = SHIFTS[target.dtype], SHIFTS[draft.dtype]
        skipped = 0 if p.level == CUT else B * P
        cut_rows = B * P - skipped + (q_rows if q.level == CUT else 0)
        launch(
            narrow, key, cut_rows, 8,
            (*inputs, *p.shared, *q.shared, skipped),
            (size, chunk, SCAN_TILE, MAX_LISTED, S, ragged, p.level, q.level, *shifts),
        )  # fmt: skip
        launch(
            widen, key, cut_rows, 16,
            (*inputs, *p.shared, *q.shared, skipped),
            (ROW_TILE, ragged, p.level, q.level, *shifts),
        )  # fmt: skip
    if samples_target:
        launch(
            race, key, B * positions * splits, 4,
            (target, lengths, seeds, starts, p.per_row, workspace, seed, start, *strides[:6], p.shared[0]),
            (size, ragged, p.level),
        )  # fmt: skip
        launch(
            compare, key, B, 1,
            (tokens, lengths, invalid, workspace, *outputs, B, g, V, splits),
            (power_of_2(positions), S, ragged, invalid is not None),
        )  # fmt: skip
        return Verdict(*outputs)
    rows = B * (g + 1) if rule.name == "block" else B
    # The number of splits per block changes only how the work is spread.
    tiles = max(1, min(splits, rows * splits // BLOCKS))
    launch(
        finish, key, rows * -(-splits // tiles), max(1, size // 512),
        (target, draft, tokens, lengths, lse, draft_cut, draft_tie, seeds, starts, invalid,
         p.per_row, q.per_row, workspace, *outputs, seed, start, *strides, p.shared[0], q.shared[0],
         float(lenience),
         float(rule.alpha), float(rule.beta - rule.alpha), tiles, block.level),
        (size, size // chunk, MAX_LISTED, power_of_2(g), S, RULES[rule.name], has_q, lse is not None, has_cut,
         ragged, invalid is not None, p.level, q.level, p.greedy, q.greedy, lenience < 1),
    )  # fmt: skip
    return Verdict(*outputs)


def sample(
    logits: Tensor,
    seeds: Tensor | int,
    starts: Tensor | int,
    step: int,
    sampling: Sampling = None,
    level: int = 0,
    node: int = 0,
) -> SampledTokens:
    """Sample a draft token from each row of ``[B, V]``: see ``outpace.verification.sample``."""
    B, V = logits.shape
    device = logits.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return sample(logits, seeds, starts, step, sampling, level, node)
    size, splits, S = sizes(V)
    params = KernelSampling.of(sampling, V, device)
    chunk = max(1, size // CHUNKS)
    workspace = torch.empty(
        B * (splits * (3 + size // chunk) + 2 * MAX_LISTED), dtype=torch.float32, device=device
    )
    tokens = torch.empty(B, dtype=torch.int64, device=device)
    lse = torch.empty(B, dtype=torch.float64, device=device)
    cuts = torch.empty(B, dtype=torch.float32, device=device) if params.level else None
    ties = torch.empty(B, dtype=torch.int32, device=device) if params.level else None
    seed_tensor, seed = (as_int64(seeds), 0) if isinstance(seeds, Tensor) else (None, seeds)
    start_tensor, start = (as_int64(starts), 0) if isinstance(starts, Tensor) else (None, starts)
    key = (
        B, V, splits, logits.dtype, logits.stride(0), params.level, params.per_row is None,
        seed_tensor is None,
        start_tensor is None, device.index, logits.data_ptr() % 16,
    )  # fmt: skip
    launch(
        sample_draft, key, B, 8,
        (logits, seed_tensor, start_tensor, params.per_row, workspace, tokens, lse, cuts, ties, seed, start,
         step, level, node, V,
         splits, logits.stride(0), *params.shared),
        (size, chunk, SCAN_TILE, MAX_LISTED, S, params.level, SHIFTS[logits.dtype]),
    )  # fmt: skip
    return SampledTokens(tokens, lse, cuts, ties)


def edit(logits: Tensor, edits: Edits, drafted: Tensor) -> Tensor:
    """Apply bias, allowed tokens and penalties: see ``outpace.sampling.rows.edit``."""
    B, n, V = logits.shape
    size, splits, _ = sizes(V)
    out = torch.empty(B, n, V, dtype=torch.float32, device=logits.device)
    strides = (*logits.stride()[:2], drafted.stride(0))
    key = (logits.dtype, V, strides, logits.device.index, logits.data_ptr() % 16)
    launch(
        edit_rows, key, B * n * splits, 4,
        (logits, edits.bias, edits.allowed, edits.penalties, edits.seen, drafted, out, n,
         drafted.shape[1] - n + 1, V, splits, *strides),
        (size,),
    )  # fmt: skip
    return out


_runners: dict[Any, Any] = {}


def launch(
    kernel: Any,
    key: Any,
    programs: int,
    warps: int,
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
) -> None:
    """Run a kernel.

    From the second launch with a key on, Triton's dispatch is skipped. It takes longer than the kernel.
    """
    name = kernel.__name__, programs, key  # hashing the kernel itself takes longer than this function
    runner = _runners.get(name)
    if runner is not None:
        runner(*args, *constants)
        return
    compiled = ahead.launch(kernel, (programs,), *args, *constants, num_warps=warps)
    if compiled is not None:  # the interpreter compiles nothing
        _runners[name] = compiled[programs, 1, 1]


def as_int64(numbers: Tensor) -> Tensor:
    """Return numbers as the kernels read them: contiguous int64.

    The dtypes of these tensors are not part of the launch key.
    """
    if numbers.dtype is torch.int64 and numbers.is_contiguous():
        return numbers
    return numbers.to(torch.int64).contiguous()

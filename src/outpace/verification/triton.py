"""Launcher of the fused kernels: the counterpart of ``eager`` on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.sampling import SamplingParams
from outpace.verification.block import Block, Drawn, Verdict
from outpace.verification.kernels.decide import finish, narrow, scan, widen
from outpace.verification.kernels.draw import draw
from outpace.verification.kernels.match import compare, race
from outpace.verification.kernels.pieces import RULES
from outpace.verification.kernels.rooms import room
from outpace.verification.rules import Rule

# Low bits that are 0 when a number of the dtype is stored as float32
SHIFTS = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}
BLOCKS = 512  # blocks of the last launch, at most twice as many: more would run one after another
CHUNKS = 64  # chunks of a split, whose maxima are stored
WIDE, FEW, MANY = 2048, 256, 8192  # tokens: scanned at once, listed at most, at once in a whole row
PLAIN, TEMPERED, CUT = 0, 1, 2  # how far the kernels adjust logits


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


class Knobs(NamedTuple):
    """Sampling parameters for one model's logits, as the kernels take them.

    The four numbers of a row are temperature, top_k (0: all), 1 - top_p (-1: all) and min_p.

    Attributes:
        level: Adjustment that the kernels make: ``PLAIN``, ``TEMPERED`` or ``CUT``.
        greedy: True if any row may be greedy.
        each: Four numbers of each row, flat, or None if all rows share them.
        all: Four numbers of all rows.
    """

    level: int
    greedy: bool  # whether any row may be greedy
    each: Tensor | None
    all: tuple[float, float, float, float]

    @classmethod
    def of(cls, sampling: Sequence[SamplingParams] | None, V: int, device: torch.device) -> Knobs:
        """Return the knobs of sampling parameters, one for all rows or one per row."""
        if sampling is None:
            return NO_KNOBS
        rows = [turned(one, V) for one in sampling]
        if all(row == NO_KNOBS.all for row in rows):
            return NO_KNOBS
        level = CUT if any(row[0] and row[1:] != NO_KNOBS.all[1:] for row in rows) else TEMPERED
        greedy = any(not row[0] for row in rows)
        if len(rows) == 1:
            return cls(level, greedy, None, rows[0])
        flat = [number for row in rows for number in row]
        return cls(level, greedy, on_device(flat, torch.float32, device), NO_KNOBS.all)


NO_KNOBS = Knobs(PLAIN, False, None, (1.0, 0.0, -1.0, 0.0))


def turned(one: SamplingParams, V: int) -> tuple[float, float, float, float]:
    """Return sampling parameters as the kernels take them.

    top_p becomes the probability that may be dropped, or -1 where none may.
    """
    k = one.top_k if one.top_k < V else 0
    temperature = max(one.temperature, 1e-30) if one.temperature else 0.0  # less is 0 in float32
    # All floats: Triton would specialize the kernel for an int of 1.
    return (float(temperature), float(k), float(1 - one.top_p) if one.top_p < 1 else -1.0, float(one.min_p))


def verify(
    block: Block,
    rule: Rule,
    lenience: float = 1.0,
    sampling: Sequence[SamplingParams] | None = None,
    draft_sampling: Sequence[SamplingParams] | None = None,
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
    p, q = Knobs.of(sampling, V, device), NO_KNOBS
    has_q = draft is not None
    if draft is None:
        draft = target  # anything: it is not read
    else:
        q = Knobs.of(draft_sampling, V, device)
    raced = rule.name == "match" or g == 0
    if raced:
        has_q, q = False, NO_KNOBS
    P = positions if raced or p.level == CUT else g
    has_cut = has_q and block.draft_cut is not None
    cutting = p.level == CUT or (q.level == CUT and not has_cut)
    work = torch.empty(
        room(B, g, P, splits, splits * (size // chunk) + 2 * FEW if cutting else 0),
        dtype=torch.float32,
        device=device,
    )
    tokens, lengths = whole(tokens), None if lengths is None else whole(lengths)
    accepted, next_token = tokens.new_empty(B), tokens.new_empty(B)
    bad = tokens.new_empty(B, dtype=torch.bool)
    seeds, seed = (whole(block.seeds), 0) if isinstance(block.seeds, Tensor) else (None, block.seeds)
    starts, start = (whole(block.starts), 0) if isinstance(block.starts, Tensor) else (None, block.starts)
    stored = None if block.draft_lse is None else block.draft_lse.double().contiguous()
    draft_cut, draft_tie = (
        None if one is None else one.contiguous() for one in (block.draft_cut, block.draft_tie)
    )
    given_up, ragged = block.given_up, lengths is not None
    strides = (B, g, V, splits, *target.stride()[:2], *draft.stride()[:2])
    outputs = (accepted, next_token, bad)
    # All that Triton specializes or selects a kernel by
    key = (
        rule.name, target.dtype, draft.dtype, strides, ragged, p[:2], p.each is None, q[:2], q.each is None,
        has_q, stored is None, has_cut, given_up is None, seeds is None, starts is None,
        lenience < 1, device.index, target.data_ptr() % 16, draft.data_ptr() % 16,
    )  # fmt: skip
    # The draft's rows are scanned only where their logsumexp or cut is not known.
    known = stored is not None and (q.level == PLAIN or has_cut)
    q_rows = B * g if has_q and not known else 0
    inputs = (target, draft, lengths, p.each, q.each, work, *strides)
    if not raced or p.level == CUT:
        launch(
            scan, key, (B * P + q_rows) * splits, max(2 if cutting else 1, size // 2048),
            (*inputs, p.all[0], q.all[0]),
            (size, chunk, ragged, p.level, q.level, p.greedy, q.greedy, cutting),
        )  # fmt: skip
    if cutting:
        shifts = SHIFTS[target.dtype], SHIFTS[draft.dtype]
        skipped = 0 if p.level == CUT else B * P
        cut_rows = B * P - skipped + (q_rows if q.level == CUT else 0)
        launch(
            narrow, key, cut_rows, 8,
            (*inputs, *p.all, *q.all, skipped),
            (size, chunk, WIDE, FEW, S, ragged, p.level, q.level, *shifts),
        )  # fmt: skip
        launch(
            widen, key, cut_rows, 16,
            (*inputs, *p.all, *q.all, skipped),
            (MANY, ragged, p.level, q.level, *shifts),
        )  # fmt: skip
    if raced:
        launch(
            race, key, B * positions * splits, 4,
            (target, lengths, seeds, starts, p.each, work, seed, start, *strides[:6], p.all[0]),
            (size, ragged, p.level),
        )  # fmt: skip
        launch(
            compare, key, B, 1,
            (tokens, lengths, given_up, work, *outputs, B, g, V, splits),
            (power_of_2(positions), S, ragged, given_up is not None),
        )  # fmt: skip
        return Verdict(*outputs)
    rows = B * (g + 1) if rule.name == "block" else B
    # The number of splits per block changes only how the work is spread.
    tiles = max(1, min(splits, rows * splits // BLOCKS))
    launch(
        finish, key, rows * -(-splits // tiles), max(1, size // 512),
        (target, draft, tokens, lengths, stored, draft_cut, draft_tie, seeds, starts, given_up,
         p.each, q.each, work, *outputs, seed, start, *strides, p.all[0], q.all[0], float(lenience),
         float(rule.alpha), float(rule.beta - rule.alpha), tiles),
        (size, size // chunk, FEW, power_of_2(g), S, RULES[rule.name], has_q, stored is not None, has_cut,
         ragged, given_up is not None, p.level, q.level, p.greedy, q.greedy, lenience < 1),
    )  # fmt: skip
    return Verdict(*outputs)


def sample(
    logits: Tensor,
    seeds: Tensor | int,
    starts: Tensor | int,
    step: int,
    sampling: Sequence[SamplingParams] | None = None,
) -> Drawn:
    """Sample a draft token from each row of ``[B, V]``, ``step`` positions after the step's start."""
    B, V = logits.shape
    device = logits.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return sample(logits, seeds, starts, step, sampling)
    size, splits, S = sizes(V)
    knobs = Knobs.of(sampling, V, device)
    chunk = max(1, size // CHUNKS)
    work = torch.empty(B * (splits * (3 + size // chunk) + 2 * FEW), dtype=torch.float32, device=device)
    tokens = torch.empty(B, dtype=torch.int64, device=device)
    lse = torch.empty(B, dtype=torch.float64, device=device)
    cuts = torch.empty(B, dtype=torch.float32, device=device) if knobs.level else None
    ties = torch.empty(B, dtype=torch.int32, device=device) if knobs.level else None
    each_seed, seed = (whole(seeds), 0) if isinstance(seeds, Tensor) else (None, seeds)
    each_start, start = (whole(starts), 0) if isinstance(starts, Tensor) else (None, starts)
    key = (
        B, V, splits, logits.dtype, logits.stride(0), knobs.level, knobs.each is None, each_seed is None,
        each_start is None, device.index, logits.data_ptr() % 16,
    )  # fmt: skip
    launch(
        draw, key, B, 8,
        (logits, each_seed, each_start, knobs.each, work, tokens, lse, cuts, ties, seed, start, step, V,
         splits, logits.stride(0), *knobs.all),
        (size, chunk, WIDE, FEW, S, knobs.level, SHIFTS[logits.dtype]),
    )  # fmt: skip
    return Drawn(tokens, lse, cuts, ties)


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

    From the second time on, it skips Triton's dispatch, which takes longer than the kernel.
    """
    name = kernel.__name__, programs, key  # a kernel's own hash takes longer than all of this
    runner = _runners.get(name)
    if runner is not None:
        runner(*args, *constants)
        return
    compiled = kernel[programs,](*args, *constants, num_warps=warps)
    if compiled is not None:  # the interpreter compiles nothing
        _runners[name] = compiled[programs, 1, 1]


def whole(numbers: Tensor) -> Tensor:
    """Return numbers as the kernels read them: contiguous int64.

    The dtypes of these tensors are not part of the launch key.
    """
    if numbers.dtype is torch.int64 and numbers.is_contiguous():
        return numbers
    return numbers.to(torch.int64).contiguous()

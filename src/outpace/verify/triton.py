"""Launches the fused kernels: what `eager` is on any device, on CUDA."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from outpace.arguments import on_device
from outpace.sampling import Sampling
from outpace.verify.block import Block, Verdict
from outpace.verify.kernels import RULES, compare, finish, race, room, scan
from outpace.verify.rules import Rule

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS = 512  # of the second launch, at most twice as many: more would run one after the other


@functools.cache
def cut(V: int) -> tuple[int, int, int]:
    """Tokens in a split, splits in a row, and the power of two that holds them: enough splits to spread one
    row over the device, few enough to put together fast."""
    size = 2048 if V <= 1 << 16 else 4096
    splits = -(-V // size)
    return size, splits, power_of_2(splits)


def power_of_2(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()


def fits(rule: Rule, logits: Tensor) -> bool:
    """Whether the kernels take such logits."""
    return logits.dtype in DTYPES and logits.stride(-1) == 1 and rule.name != "rejection"


def verify(
    block: Block,
    rule: Rule,
    lenience: float = 1.0,
    sampling: list[Sampling] | None = None,
    draft_sampling: list[Sampling] | None = None,
) -> Verdict:
    """Apply a rule to a block whose logits are adjusted but for temperature, which may be 0."""
    target, draft, tokens, lengths = block.target_logits, block.draft_logits, block.tokens, block.counts
    device = target.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return verify(block, rule, lenience, sampling, draft_sampling)
    B, positions, V = target.shape
    g = positions - 1
    size, splits, S = cut(V)
    knobs = temperatures(sampling, device)
    q_knobs = temperatures(draft_sampling, device) if draft is not None else None
    work = torch.empty(room(B, max(g, 1), splits), dtype=torch.float32, device=device)
    accepted, next_token = torch.empty(2, B, dtype=torch.int64, device=device).unbind()
    bad = torch.empty(B, dtype=torch.bool, device=device)
    tokens, lengths = whole(tokens), None if lengths is None else whole(lengths)
    seeds, seed = (whole(block.seeds), 0) if isinstance(block.seeds, Tensor) else (None, block.seeds)
    starts, start = (whole(block.starts), 0) if isinstance(block.starts, Tensor) else (None, block.starts)
    stored = None if block.draft_lse is None else block.draft_lse.float().contiguous()
    given_up = block.given_up
    ragged, hot, q_hot = lengths is not None, knobs is not None, q_knobs is not None
    has_q = draft is not None
    if draft is None:
        draft = target  # anything: it is not read
    sizes = (B, g, V, splits, *target.stride()[:2])
    strides = (*sizes, *draft.stride()[:2], stride_of(knobs), stride_of(q_knobs))
    outputs = (accepted, next_token, bad)
    # All that Triton compiles or chooses by
    key = (
        rule.name, target.dtype, draft.dtype, strides, ragged, hot, q_hot, has_q, stored is None,
        given_up is None, seeds is None, starts is None, lenience < 1, device.index, target.data_ptr() % 16,
        draft.data_ptr() % 16,
    )  # fmt: skip
    if rule.name == "match" or g == 0:
        launch(
            race, key, B * positions * splits, 4,
            (target, lengths, seeds, starts, knobs, work, seed, start, *sizes, stride_of(knobs)),
            (size, ragged, hot),
        )  # fmt: skip
        launch(
            compare, key, B, 1,
            (tokens, lengths, given_up, work, *outputs, B, g, V, splits),
            (power_of_2(positions), S, ragged, given_up is not None),
        )  # fmt: skip
        return Verdict(*outputs)
    sides = 2 if has_q and (stored is None or q_hot) else 1
    launch(
        scan, key, B * g * sides * splits, max(1, size // 2048),
        (target, draft, lengths, knobs, q_knobs, work, *strides),
        (size, ragged, hot, q_hot),
    )  # fmt: skip
    rows = B * (g + 1) if rule.name == "block" else B
    # How many splits a block sums changes nothing but how the work is spread.
    tiles = max(1, min(splits, rows * splits // BLOCKS))
    launch(
        finish, key, rows * -(-splits // tiles), max(1, size // 512),
        (target, draft, tokens, lengths, stored, seeds, starts, given_up, knobs, q_knobs, work, *outputs,
         seed, start, *strides, float(lenience), float(rule.alpha), float(rule.beta - rule.alpha), tiles),
        (size, power_of_2(g), S, RULES[rule.name], has_q, stored is not None, ragged,
         given_up is not None, hot, q_hot, lenience < 1),
    )  # fmt: skip
    return Verdict(*outputs)


_runners: dict[Any, Any] = {}


def launch(
    kernel: Any, key: Any, programs: int, warps: int, args: tuple[Any, ...], constants: tuple[Any, ...]
) -> None:
    """Run a kernel; from the second time on without Triton's dispatch, which takes longer than the kernel."""
    runner = _runners.get((kernel, key))
    if runner is not None:
        runner(*args, *constants)
        return
    compiled = kernel[programs,](*args, *constants, num_warps=warps)
    if compiled is not None:  # the interpreter compiles nothing
        _runners[kernel, key] = compiled[programs, 1, 1]


def whole(numbers: Tensor) -> Tensor:
    """As the kernels read them: the types of tensors are not part of the key."""
    return numbers.to(torch.int64).contiguous()


def stride_of(knobs: Tensor | None) -> int:
    return 0 if knobs is None or len(knobs) == 1 else 1


def temperatures(sampling: list[Sampling] | None, device: torch.device) -> Tensor | None:
    """Of each row, or of all, on the device; None where logits are taken as they are."""
    if sampling is None or all(one.temperature == 1 for one in sampling):
        return None
    return on_device([one.temperature for one in sampling], torch.float32, device)

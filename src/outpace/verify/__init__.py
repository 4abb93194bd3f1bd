"""Verification: p, q and drafted tokens in; how many are kept and which token follows, out.

`outpace.verify(...)` is the entry; calling this package calls `verify` below. It knows no models and no
caches: `rules` says what each rule promises, `oracle` is the papers' text, `eager` the batched PyTorch
form, and `triton` with its `kernels` what takes its place on CUDA.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.arguments import floats, on_device, one_or_each, row_integers
from outpace.sampling import Prefix, Sampling, per_row, process, warp
from outpace.verify import check, eager
from outpace.verify.block import Block, Drawn, Verdict
from outpace.verify.rules import Rule, parse, sigmoid

__all__ = ["Drawn", "Rule", "Verdict", "sample", "sigmoid", "verify"]


def verify(
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    target_logits: Tensor,
    *,
    rule: Rule | str = "token",
    lenience: float = 1.0,
    seed: int | Sequence[int] | Tensor | None = None,
    position: int | Sequence[int] | Tensor | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    draft_sampling: Sampling | Sequence[Sampling] | None = None,
    draft_lse: Tensor | None = None,
    draft_cut: tuple[Tensor, Tensor] | None = None,
    prefix: Prefix | Tensor | Sequence[Sequence[int]] | None = None,
) -> Verdict:
    """Decide which drafted tokens stay and draw the token after them, for B rows at once.

    With an exact rule, `draft_tokens[b, :accepted[b]]` followed by `next_token[b]` is distributed as if the
    target alone had generated it, whatever the draft.

    Arguments:
        draft_tokens    int `[B, g]`, the drafted tokens; g may be 0
        draft_logits    float `[B, g, V]`, logits of the very distribution q each token was drawn from;
                        `None` when tokens were not drawn but chosen (argmax, copied from the context): q is
                        then a point mass
        target_logits   float `[B, g+1, V]`, the target's logits before each drafted token and after the last
        rule            "token", "block", "match", `sigmoid(alpha, beta)` or "sigmoid(ALPHA, BETA)", and, for
                        comparison only, "rejection": see `outpace.verify.rules` and docs/rules.md
        lenience        l in (0, 1], for "token": keep x with probability min(1, p/(l·q)); no token then
                        comes out with probability above p/l. For greedy rows (`sampling` with temperature
                        0): keep x when p(x) >= l·max p, with p as it was before the argmax
        seed            an int, or one per row; `None` takes fresh ones from PyTorch's generator. Rows with
                        equal seed and position get equal noise: give samples of one prompt different seeds
        position        absolute position of draft_tokens[:, 0], an int or one per row; by default the
                        length of `prefix`, or 0. All noise is a function of seed and position: a loop that
                        gives a seed must also move the position on
        lengths         int `[B]`, how many of the g tokens each row drafted; by default all. What lies beyond
                        (tokens, logits) is not looked at. A row that drafted nothing is plain decoding
        sampling        one `Sampling`, or one per row, to adjust the target's logits by; by default they
                        are taken as adjusted already
        draft_sampling  the same for the draft's logits. Processors with state: see `Sampling`; those of the
                        draft are called where something was drafted, those of the target also after it
        draft_lse       float `[B, g]`, logsumexp of the (adjusted) draft logits, if the drafter kept it
        draft_cut       with draft_lse and draft_sampling, `Drawn.cut` and `Drawn.tie` of `sample`, `[B, g]`
                        each: then the draft's logits need not be looked through again
        prefix          the tokens before draft_tokens, when `sampling` has penalties or processors, which
                        read them: a tensor `[B, T]`, a list of lists, or a `Prefix`

    Both logits have one dtype (float16, bfloat16, float32 or float64), all tensors one device, CPU or CUDA.
    On CUDA the host never waits, unless a sampling has processors.

    Returns a `Verdict`: `accepted [B]`, `next_token [B]`, `bad [B]`. A row whose logits hold NaN, +inf or
    nothing but -inf where the verdict depends on them is flagged in `bad` and leaves the other rows alone
    (past a lost draft they need not be noticed); so is, off the CPU, a row with a token or length out of
    range, which raises on the CPU.

    Example:
        >>> import torch, outpace
        >>> logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 3, 3)
        >>> verdict = outpace.verify(torch.tensor([[0, 2]]), logits[:, :2], logits, seed=7, position=0)
        >>> verdict.accepted  # p = q: everything is kept
        tensor([2])

    References: Leviathan et al. 2023, Alg. 1, A.2, A.5; Chen et al. 2023, Alg. 2; Sun et al. 2024, "Block
    verification accelerates speculative decoding"; Wagner et al. 2024, eq. 5.
    """
    rule = parse(rule)
    check.lenience(lenience, rule)
    B, g = check.shapes(draft_tokens, draft_logits, target_logits, draft_lse)
    V, device = target_logits.shape[-1], target_logits.device
    targets = None if sampling is None else per_row(sampling, B)
    drafters = None if draft_sampling is None else per_row(draft_sampling, B, "draft_sampling")
    if drafters is not None and draft_logits is None:
        raise ValueError("draft_sampling: given without draft_logits; point masses have nothing to adjust")

    counts, given_up = None, None
    tokens = draft_tokens if draft_tokens.dtype is torch.int64 else draft_tokens.to(torch.int64)
    fused = _fused(rule, draft_logits, target_logits) and not _reads_tokens(targets, drafters)
    fused &= lenience == 1 or targets is None or _can_adjust(targets, rule)  # as `settle` decides
    if fused:
        # The kernels look at tokens and lengths themselves.
        if lengths is not None:
            counts = row_integers("lengths", lengths, B, device, 0, g)
    else:
        counts, given_up = check.lengths(lengths, B, g, device)
        tokens, strange = check.tokens(draft_tokens, counts, V)
        if strange is not None:
            given_up = strange if given_up is None else given_up | strange
    prefix = check.prefix(prefix, B, device)
    starts = check.position(position, prefix, [*(targets or ()), *(drafters or ())], B, g, device)
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (B,), device=device)
    seeds = one_or_each("seed", seed, B, device, -(2**63), 2**64 - 1)
    block = Block(tokens, draft_logits, target_logits, draft_lse, seeds, starts, counts, given_up)
    if draft_cut is not None:
        check.cut(draft_cut, draft_lse, drafters, draft_tokens)
        block = replace(block, draft_cut=draft_cut[0], draft_tie=draft_cut[1])
    if fused and all(_can_adjust(rows, rule) for rows in (targets, drafters) if rows is not None):
        decided: Verdict = _kernels().verify(block, rule, lenience, targets, drafters)
        return decided
    return settle(block, rule, lenience, targets, drafters, prefix)


@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    seed: int | Sequence[int] | Tensor,
    position: int | Sequence[int] | Tensor,
    step: int = 0,
    sampling: Sampling | Sequence[Sampling] | None = None,
) -> Drawn:
    """Draw a drafter's tokens, one a row, from logits `[B, V]`: on CUDA in one launch.

    seed, position  as for `verify` of the same iteration
    step            which of the iteration's g tokens it is, from 0
    sampling        one `Sampling`, or one per row; without penalties, bias or processors

    The uniform is that of the draft stream, and the token the first whose running sum exceeds it. Stack the
    tokens, `lse` and `(cut, tie)` of g steps for `verify`.
    """
    floats("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}; it must be [B, V]")
    B, device = logits.shape[0], logits.device
    rows = None if sampling is None else per_row(sampling, B)
    if _reads_tokens(rows):
        raise ValueError(
            "sampling: has penalties, bias or processors; `outpace.sampling.adjust` applies them"
        )
    seeds = one_or_each("seed", seed, B, device, -(2**63), 2**64 - 1)
    starts = one_or_each("position", position, B, device, 0, 2**32 - 1)
    if _fused(parse("token"), None, logits):
        drawn: Drawn = _kernels().sample(logits, seeds, starts, step, rows)
        return drawn
    return eager.sample(logits, seeds, starts, step, rows)


@torch.no_grad()
def settle(
    block: Block,
    rule: Rule,
    lenience: float = 1.0,
    targets: list[Sampling] | None = None,
    drafters: list[Sampling] | None = None,
    prefix: Prefix | None = None,
) -> Verdict:
    """`verify` without its checks: adjust the block's logits, apply the rule, set processors' states back."""
    fused = _fused(rule, block.draft_logits, block.target_logits)
    fused &= lenience == 1 or targets is None or _can_adjust(targets, rule)
    greedy = targets is not None and all(one.greedy for one in targets) and rule.exact and lenience == 1
    rewind_draft = rewind_target = None

    def left_to_the_kernels(rows: list[Sampling]) -> bool:
        return fused and _can_adjust(rows, rule)

    if drafters is not None and block.draft_logits is not None:
        in_both = {id(processor) for one in targets or () for processor in one.processors}
        if any(id(processor) in in_both for one in drafters for processor in one.processors):
            drafters = [one.fork() for one in drafters]  # two uses must not see each other's state
        scores = block.draft_logits
        if not left_to_the_kernels(drafters) or _reads_tokens(drafters):
            scores, rewind_draft = process(scores, drafters, prefix, block.tokens, block.lengths)
            block = replace(block, draft_logits=scores)
        if not left_to_the_kernels(drafters):
            block, drafters = replace(block, draft_logits=warp(scores, drafters)), None
    if targets is not None and not all(one.neutral for one in targets):
        scores = block.target_logits
        if not left_to_the_kernels(targets) or _reads_tokens(targets):
            scores, rewind_target = process(
                scores, targets, prefix, block.tokens, block.lengths + 1, until_lost=True
            )
            block = replace(block, target_logits=scores)
        if not left_to_the_kernels(targets) and not greedy:
            if lenience < 1:
                near = _near_the_top(scores[:, : block.tokens.shape[1]], block.tokens, targets, lenience)
                block = replace(block, greedy_keep=near)
            block, targets = replace(block, target_logits=warp(scores, targets)), None
    if fused:
        verdict: Verdict = _kernels().verify(block, rule, lenience, targets, drafters)
    else:
        verdict = eager.argmax(block) if greedy else eager.verify(block, rule, lenience)
    if rewind_target is not None:
        rewind_target(verdict.accepted)
    if rewind_draft is not None:
        rewind_draft(torch.minimum(verdict.accepted, block.lengths - 1))
    return verdict


def _fused(rule: Rule, draft_logits: Tensor | None, target_logits: Tensor) -> bool:
    """Whether the kernels take such logits, and are there."""
    if not target_logits.is_cuda or (triton := _kernels()) is None:
        return False
    fits: bool = triton.fits(rule, target_logits) and (
        draft_logits is None or triton.fits(rule, draft_logits)
    )
    return fits


@functools.cache
def _kernels() -> Any:
    """The module that launches them; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("outpace.verify.triton")


def _reads_tokens(*samplings: list[Sampling] | None) -> bool:
    """Whether anything happens to the logits before temperature: it may depend on the drafted tokens."""
    return any(one.logit_bias or one.reads_prefix for rows in samplings for one in rows or ())


def _can_adjust(rows: list[Sampling], rule: Rule) -> bool:
    """Whether the kernels can do what `warp` does."""
    return rule.exact or not any(one.greedy for one in rows)


def _near_the_top(scores: Tensor, tokens: Tensor, rows: list[Sampling], lenience: float) -> Tensor:
    """Drafts of greedy rows with p(x) >= lenience·max p, p being the softmax before the argmax: `[B, g]`."""
    greedy = on_device([one.greedy for one in rows], torch.bool, scores.device)[:, None]
    score = scores.gather(-1, tokens[..., None]).squeeze(-1)
    return greedy & (score >= scores.amax(-1) + math.log(lenience))


class _Callable(types.ModuleType):
    """`outpace.verify` is this package; calling it calls `verify`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Verdict:
        return verify(*args, **kwargs)


__doc__ = f"{__doc__}\n{inspect.getdoc(verify)}"
__signature__ = inspect.signature(verify)
sys.modules[__name__].__class__ = _Callable

"""Entry points of verification: ``verify``, ``sample`` and ``verify_block``.

They check arguments, adjust logits, and run the eager or the fused form of a rule. ``rules`` lists the
guarantees of each rule. ``oracle`` follows the text of the papers. ``eager`` has the rules in batched
PyTorch. On CUDA, ``triton`` and its ``kernels`` replace ``eager``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from outpace.checks.arguments import floats, int_or_row_integers, on_device, row_integers
from outpace.sampling import Prefix, SamplingParams, per_row, process, warp
from outpace.sampling.random import check_branch
from outpace.sampling.rows import Edits, RowSampling, edit, warp_rows
from outpace.verification import check, eager
from outpace.verification.block import Block, SampledTokens, Verdict
from outpace.verification.rules import Rule, parse


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
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    draft_sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    draft_lse: Tensor | None = None,
    draft_cut: tuple[Tensor, Tensor] | None = None,
    prefix: Prefix | Tensor | Sequence[Sequence[int]] | None = None,
) -> Verdict:
    """Accept or reject draft tokens and sample the token after them, for B sequences at once.

    With an exact rule, ``draft_tokens[b, :accepted[b]]`` followed by ``next_token[b]`` is distributed as if
    the target alone had generated it, whatever the draft.

    Both logits have one dtype (float16, bfloat16, float32 or float64). All tensors are on one device, CPU or
    CUDA. On CUDA the host never waits, unless a sampling has processors.

    Args:
        draft_tokens: Draft tokens, int ``[B, g]``. g may be 0.
        draft_logits: Logits of the very distribution q that each token was sampled from, float ``[B, g, V]``.
            ``None`` if tokens were not sampled but chosen (argmax, copied from the context). q is then a
            point mass.
        target_logits: The target's logits before each draft token and after the last, float ``[B, g+1, V]``.
        rule: "token", "block", "match", ``sigmoid(alpha, beta)`` or "sigmoid(ALPHA, BETA)". For comparison
            only, "rejection". See ``outpace.verification.rules`` and docs/design/verification.md.
        lenience: l in (0, 1], for "token": accept x with probability min(1, p/(l·q)). No token then has a
            probability above p/l. In greedy rows (``sampling`` with temperature 0), x is accepted when p(x)
            >= l·max p, with p as it was before the argmax.
        seed: An int, or one per row. ``None`` takes fresh ones from PyTorch's generator. Rows with equal seed
            and position get equal noise, so use different seeds for samples of one prompt.
        position: Absolute position of ``draft_tokens[:, 0]``, an int or one per row. By default the length of
            ``prefix``, or 0. All noise is a function of seed and position. A loop that passes a seed must
            therefore advance the position, too.
        lengths: Number of draft tokens of each row, int ``[B]``. By default all g. Tokens and logits beyond
            it are ignored. A row without draft tokens is decoded without speculation.
        sampling: One ``SamplingParams``, or one per row, to adjust the target's logits by. By default they
            are taken as adjusted already.
        draft_sampling: The same for the draft's logits. For processors with state, see ``SamplingParams``.
            Those of the draft are called at drafted positions, those of the target also after them.
        draft_lse: Logsumexp of the (adjusted) draft logits, float ``[B, g]``, if the drafter stored it.
        draft_cut: ``SampledTokens.cut`` and ``.tie`` of ``sample``, ``[B, g]`` each, with ``draft_lse`` and
            ``draft_sampling``. The draft's logits then need not be scanned again.
        prefix: The tokens before ``draft_tokens``: a tensor ``[B, T]``, a list of lists, or a ``Prefix``.
            Needed when ``sampling`` has penalties or processors, which read them.

    Returns:
        A ``Verdict`` with ``accepted``, ``next_token`` and ``bad``, ``[B]`` each. Unusable logits hold NaN,
        +inf or nothing but -inf. No draft token is accepted at or after unusable logits that the rule reads.
        A row is flagged in ``bad`` if it has unusable logits after the accepted draft tokens. These tokens
        are valid, but there is no next token. Other rows are not affected. Greedy rows and "match" need not
        read the draft's logits, and "sigmoid" only those of draft tokens. Off the CPU, a row with a token or
        length out of range is flagged, too, with nothing accepted. On the CPU it raises.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong value, shape or device, or does not fit the others.

    Example:
        >>> import torch, outpace
        >>> logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 3, 3)
        >>> verdict = outpace.verify(torch.tensor([[0, 2]]), logits[:, :2], logits, seed=7, position=0)
        >>> verdict.accepted  # p = q: everything is accepted
        tensor([2])

    References:
        Leviathan et al. 2023, Alg. 1, A.2, A.5; Chen et al. 2023, Alg. 2; Sun et al. 2024, "Block
        verification accelerates speculative decoding"; Wagner et al. 2024, eq. 5.
    """
    rule = parse(rule)
    check.lenience(lenience, rule)
    B, g = check.shapes(draft_tokens, draft_logits, target_logits, draft_lse)
    V, device = target_logits.shape[-1], target_logits.device
    target_params = None if sampling is None else per_row(sampling, B)
    draft_params = None if draft_sampling is None else per_row(draft_sampling, B, "draft_sampling")
    if draft_params is not None and draft_logits is None:
        raise ValueError("draft_sampling: given without draft_logits; point masses have nothing to adjust")

    counts, invalid = None, None
    tokens = draft_tokens if draft_tokens.dtype is torch.int64 else draft_tokens.to(torch.int64)
    fused = _fused(rule, draft_logits, target_logits) and not _reads_tokens(target_params, draft_params)
    fused &= (
        lenience == 1 or target_params is None or _can_adjust(target_params, rule)
    )  # as in `verify_block`
    if fused:
        # The kernels check tokens and lengths themselves.
        if lengths is not None:
            counts = row_integers("lengths", lengths, B, device, 0, g)
    else:
        counts, invalid = check.lengths(lengths, B, g, device)
        tokens, out_of_range = check.tokens(draft_tokens, counts, V)
        if out_of_range is not None:
            invalid = out_of_range if invalid is None else invalid | out_of_range
    prefix = check.prefix(prefix, B, device)
    starts = check.position(position, prefix, [*(target_params or ()), *(draft_params or ())], B, g, device)
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (B,), device=device)
    seeds = int_or_row_integers("seed", seed, B, device, -(2**63), 2**64 - 1)
    block = Block(tokens, draft_logits, target_logits, draft_lse, seeds, starts, counts, invalid)
    if draft_cut is not None:
        check.cut(draft_cut, draft_lse, draft_params, draft_tokens)
        block = replace(block, draft_cut=draft_cut[0], draft_tie=draft_cut[1])
    if fused and all(_can_adjust(rows, rule) for rows in (target_params, draft_params) if rows is not None):
        decided: Verdict = _kernels().verify(block, rule, lenience, target_params, draft_params)
        return decided
    return verify_block(block, rule, lenience, target_params, draft_params, prefix)


@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    seed: int | Sequence[int] | Tensor,
    position: int | Sequence[int] | Tensor,
    step: int = 0,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    level: int = 0,
    node: int = 0,
) -> SampledTokens:
    """Sample one draft token per row from logits ``[B, V]``, on CUDA in one launch.

    The token is the first one whose running sum of probabilities exceeds a uniform of the draft stream. Stack
    the ``tokens``, ``lse`` and ``(cut, tie)`` of g draft steps for ``verify``.

    Args:
        logits: Logits of the draft, float ``[B, V]``.
        seed: The seed of ``verify`` in the same step.
        position: The position of ``verify`` in the same step.
        step: Index of the draft token within the step, from 0.
        sampling: One ``SamplingParams``, or one per row, without penalties, bias or processors.
        level: Depth of the drafter in a cascade, 0 to 255.
        node: Index of the draft token among its siblings in a tree, 0 to 65535.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: ``logits`` are not ``[B, V]``, ``sampling`` has penalties, bias or processors, or
            ``level`` or ``node`` is out of range.
    """
    floats("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}; it must be [B, V]")
    B, device = logits.shape[0], logits.device
    rows = None if sampling is None else per_row(sampling, B)
    if _reads_tokens(rows):
        raise ValueError(
            "sampling: got penalties, bias or processors; apply them before with `outpace.sampling.adjust`"
        )
    seeds = int_or_row_integers("seed", seed, B, device, -(2**63), 2**64 - 1)
    starts = int_or_row_integers("position", position, B, device, 0, 2**32 - 1)
    check_branch(level, node)
    if _fused(parse("token"), None, logits):
        sampled: SampledTokens = _kernels().sample(logits, seeds, starts, step, rows, level, node)
        return sampled
    return eager.sample(logits, seeds, starts, step, rows, level, node)


@torch.no_grad()
def verify_block(
    block: Block,
    rule: Rule,
    lenience: float = 1.0,
    target_params: list[SamplingParams] | None = None,
    draft_params: list[SamplingParams] | None = None,
    prefix: Prefix | None = None,
) -> Verdict:
    """Run ``verify`` without its checks.

    It adjusts the block's logits, applies the rule, and rewinds the state of processors.

    Args:
        block: Draft tokens and logits.
        rule: Rule to apply.
        lenience: Lenience of rule "token".
        target_params: Sampling parameters of the target, one for all rows or one per row.
        draft_params: Sampling parameters of the draft, one for all rows or one per row.
        prefix: Tokens before the draft tokens.
    """
    fused = _fused(rule, block.draft_logits, block.target_logits)
    fused &= lenience == 1 or target_params is None or _can_adjust(target_params, rule)
    greedy = (
        target_params is not None
        and all(one.greedy for one in target_params)
        and rule.exact
        and lenience == 1
    )
    rewind_draft = rewind_target = None

    def kernels_adjust(rows: list[SamplingParams]) -> bool:
        return fused and _can_adjust(rows, rule)

    if draft_params is not None and block.draft_logits is not None:
        in_both = {id(processor) for one in target_params or () for processor in one.processors}
        if any(id(processor) in in_both for one in draft_params for processor in one.processors):
            draft_params = [one.fork() for one in draft_params]  # two uses must not see each other's state
        scores = block.draft_logits
        if not kernels_adjust(draft_params) or _reads_tokens(draft_params):
            scores, rewind_draft = process(scores, draft_params, prefix, block.tokens, block.lengths)
            block = replace(block, draft_logits=scores)
        if not kernels_adjust(draft_params):
            block, draft_params = replace(block, draft_logits=warp(scores, draft_params)), None
    if target_params is not None and not all(one.neutral for one in target_params):
        scores = block.target_logits
        if not kernels_adjust(target_params) or _reads_tokens(target_params):
            scores, rewind_target = process(
                scores, target_params, prefix, block.tokens, block.lengths + 1, until_rejected=True
            )
            block = replace(block, target_logits=scores)
        if not kernels_adjust(target_params) and not greedy:
            if lenience < 1:
                greedy_rows = on_device([one.greedy for one in target_params], torch.bool, scores.device)
                drafted = scores[:, : block.tokens.shape[1]]
                near = _near_top(drafted, block.tokens, greedy_rows, lenience)
                block = replace(block, greedy_accept=near)
            block, target_params = replace(block, target_logits=warp(scores, target_params)), None
    if fused:
        verdict: Verdict = _kernels().verify(block, rule, lenience, target_params, draft_params)
    else:
        verdict = eager.argmax(block) if greedy else eager.verify(block, rule, lenience)
    if rewind_target is not None:
        rewind_target(verdict.accepted)
    if rewind_draft is not None:
        rewind_draft(torch.minimum(verdict.accepted, block.lengths - 1))
    return verdict


@torch.no_grad()
def verify_rows(
    block: Block, rule: Rule, lenience: float, target: RowSampling, draft: RowSampling | None
) -> Verdict:
    """Run ``verify`` without its checks, with sampling parameters from tensors.

    Args:
        block: Draft tokens and logits, with bias, allowed tokens and penalties applied.
        rule: Rule to apply.
        lenience: Lenience of rule "token".
        target: Sampling parameters of the target.
        draft: Sampling parameters of the draft. None: its logits are adjusted, or there are none.
    """
    if _fused(rule, block.draft_logits, block.target_logits):
        verdict: Verdict = _kernels().verify(block, rule, lenience, target, draft)
        return verdict
    scores, q = block.target_logits, block.draft_logits
    block = replace(block, tokens=block.tokens.masked_fill(~block.drafted, 0))
    greedy_accept = None
    if lenience < 1:
        drafted = scores[:, : block.tokens.shape[1]]
        greedy_accept = _near_top(drafted, block.tokens, target.shape[:, 0] == 0, lenience)
    q = q if q is None or draft is None else warp_rows(q, draft)
    target_logits = warp_rows(scores, target)
    adjusted = replace(
        block, target_logits=target_logits, draft_logits=q, draft_lse=None, draft_cut=None, draft_tie=None,
        greedy_accept=greedy_accept,
    )  # fmt: skip
    return eager.verify(adjusted, rule, lenience)


@torch.no_grad()
def sample_rows(
    logits: Tensor, seeds: Tensor, starts: Tensor, step: int, sampling: RowSampling
) -> SampledTokens:
    """Run ``sample`` without its checks, with sampling parameters from tensors."""
    if _fused(parse("token"), None, logits):
        sampled: SampledTokens = _kernels().sample(logits, seeds, starts, step, sampling)
        return sampled
    return eager.sample(warp_rows(logits[:, None], sampling)[:, 0], seeds, starts, step, None)


@torch.no_grad()
def edit_rows(logits: Tensor, edits: Edits, drafted: Tensor) -> Tensor:
    """Apply bias, allowed tokens and penalties from tensors: see ``outpace.sampling.rows.edit``."""
    if _fused(parse("token"), None, logits):
        edited: Tensor = _kernels().edit(logits, edits, drafted)
        return edited
    return edit(logits, edits, drafted)


def _fused(rule: Rule, draft_logits: Tensor | None, target_logits: Tensor) -> bool:
    """Return whether the kernels are available and support such logits."""
    if not target_logits.is_cuda or (triton := _kernels()) is None:
        return False
    fits: bool = triton.fits(rule, target_logits) and (
        draft_logits is None or triton.fits(rule, draft_logits)
    )
    return fits


@functools.cache
def _kernels() -> Any:
    """Return the module that launches the kernels, or None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("outpace.verification.triton")


@functools.cache
def start_kernels() -> Thread:
    """Load Triton and the kernels in a thread, once per process, while this one loads weights.

    On its first use, Triton hashes its own files, to find out whether compiled kernels are current.

    Returns:
        The thread.
    """

    def start() -> None:
        with contextlib.suppress(Exception):  # the first call that needs the kernels raises it
            if _kernels() is not None:
                importlib.import_module("triton.runtime.cache").triton_key()

    thread = Thread(target=start, name="outpace loads kernels", daemon=True)
    thread.start()
    return thread


def _reads_tokens(*samplings: list[SamplingParams] | None) -> bool:
    """Return whether a sampling has bias, allowed tokens, penalties or processors.

    The kernels do not apply these. ``process`` applies them before the kernels run.
    """
    return any(one.edits for rows in samplings for one in rows or ())


def _can_adjust(rows: list[SamplingParams], rule: Rule) -> bool:
    """Return whether the kernels can apply temperature and filters, in place of ``warp``.

    They cannot apply temperature 0 with rule sigmoid.
    """
    return rule.exact or not any(one.greedy for one in rows)


def _near_top(scores: Tensor, tokens: Tensor, greedy: Tensor, lenience: float) -> Tensor:
    """Return the draft tokens of greedy rows with p(x) >= lenience·max p, bool ``[B, g]``.

    p is the softmax before the argmax.
    """
    score = scores.gather(-1, tokens[..., None]).squeeze(-1)
    best = scores.amax(-1)
    return greedy[:, None] & best.isfinite() & (score >= best + math.log(lenience))

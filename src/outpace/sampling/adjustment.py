"""Adjustment of logits to sampling parameters.

The order is that of Transformers' ``generate``: logit bias and allowed tokens, repetition penalty, frequency
and presence penalties, custom processors. Unless greedy, temperature, top-k, top-p and min-p follow. The
arithmetic (float32) and the tie rules are Transformers' too, so the same tokens remain:

- top-k keeps every token that ties with the k-th;
- top-p drops tokens from the least likely up while their probabilities sum to at most 1 − top_p. Among equal
  logits it drops the smaller id first, and it always keeps one;
- min-p keeps tokens at least min_p times as likely as the likeliest one;
- greedy takes ``torch.argmax``.

All later code relies on adjusted logits: their softmax is p (or q), and −inf means impossible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outpace.checks.arguments import floats, integer, integers, kind, on_device, to_device
from outpace.sampling.params import Processor, Rewind, SamplingParams, copy_processors, per_row

Errors = dict[int, tuple[int, Exception]]
"""By row: the first position at which processors failed, and the error."""


@dataclass(frozen=True)
class Prefix:
    """The tokens before the first scored position, for adjustments that read them.

    Attributes:
        tokens: Token ids ``[B, T]``, padded on the right.
        lengths: Tokens of each row that are not padding, ``[B]``. None: all T.
        prompt_lengths: Tokens of each row's prompt, ``[B]``. Frequency and presence penalties count only the
            tokens after it. None: no prompt, so all tokens count.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    prompt_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        integers("prefix.tokens", self.tokens, "an int64 tensor [B, T]")
        if self.tokens.dim() != 2:
            raise ValueError(f"prefix.tokens: got shape {tuple(self.tokens.shape)}; it must be [B, T]")
        rows, longest = self.tokens.shape
        for name, lengths in (("lengths", self.lengths), ("prompt_lengths", self.prompt_lengths)):
            if lengths is None:
                continue
            integers(f"prefix.{name}", lengths, "an int64 tensor [B]")
            if lengths.shape != (rows,):
                raise ValueError(f"prefix.{name}: got shape {tuple(lengths.shape)}; it must be ({rows},)")
            if lengths.device != self.tokens.device:
                raise ValueError(
                    f"prefix.{name}: got a tensor on {lengths.device}; it must be on {self.tokens.device}, "
                    "as prefix.tokens"
                )
            if lengths.device.type == "cpu" and ((lengths < 0) | (lengths > longest)).any():
                raise ValueError(f"prefix.{name}: got {lengths.tolist()}; each must lie in 0..{longest}")

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Prefix:
        """Return a prefix made from lists of token ids of different lengths."""
        device = torch.device(device)
        fits = "a tensor [B, T], a Prefix, or one list of token ids per row"
        if not isinstance(rows, Sequence) or not all(isinstance(row, Sequence) for row in rows):
            raise TypeError(f"prefix: got {kind(rows)}; it must be {fits}")
        for row in rows:
            for token in row:
                integer("prefix", token, fits, lambda _: True)
        return cls.padded(rows, prompt_lengths, device)

    @classmethod
    def padded(
        cls, rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int] | None, device: torch.device
    ) -> Prefix:
        """Return a prefix as ``of`` does, without a check of the lists."""
        longest = max(map(len, rows), default=0)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64, device="cpu")
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths = on_device([len(row) for row in rows], torch.int64, device)
        prompts = None if prompt_lengths is None else on_device(prompt_lengths, torch.int64, device)
        return cls(to_device(tokens, device), lengths, prompts)

    def row_lengths(self) -> Tensor:
        """Return the number of tokens of each row, ``[B]``."""
        rows, longest = self.tokens.shape
        return self.tokens.new_full((rows,), longest) if self.lengths is None else self.lengths


@torch.no_grad()
def adjust(
    logits: Tensor,
    sampling: SamplingParams | Sequence[SamplingParams],
    prefix: Prefix | None = None,
    drafted: Tensor | None = None,
) -> Tensor:
    """Return the logits of the distribution that ``sampling`` asks for.

    A row that holds NaN, +inf, or nothing but -inf still has no softmax afterwards. Processors are called for
    one row after the other, positions in order. They see the prefix that decoding without speculation would
    show them.

    Args:
        logits: ``[B, n, V]`` for n consecutive positions per row, or ``[B, V]`` for one; any float dtype.
        sampling: One for all rows, or one per row.
        prefix: The tokens before position 0, for a sampling that reads them.
        drafted: ``[B, >= n-1]``. Position i of row b follows ``prefix[b]`` and ``drafted[b, :i]``.

    Returns:
        A new tensor of the same shape, float32. Float64 remains float64.
    """
    floats("logits", logits)
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits: got shape {tuple(logits.shape)}; it must be [B, n, V] or [B, V]")
    if logits.dim() == 2:
        return adjust(logits[:, None], sampling, prefix, drafted)[:, 0]
    rows = per_row(sampling, logits.shape[0])
    scores, _ = process(logits, rows, prefix, drafted)
    return warp(scores, rows)


def process(
    logits: Tensor,
    rows: list[SamplingParams],
    prefix: Prefix | None = None,
    drafted: Tensor | None = None,
    lengths: Tensor | None = None,
    until_rejected: bool = False,
    errors: Errors | None = None,
) -> tuple[Tensor, Rewind | None]:
    """Apply bias, allowed tokens, penalties and processors: what greedy decoding needs, too.

    Args:
        logits: ``[B, n, V]``.
        rows: One ``SamplingParams`` for all rows, or one per row.
        prefix: As in ``adjust``.
        drafted: As in ``adjust``.
        lengths: Positions of each row that processors see, ``[B]``. By default all n.
        until_rejected: Show processors no position after a draft token that they forbid. Decoding without
            speculation would never show them such a position.
        errors: Gets the position and the error of each row whose processors fail. From there on, the row's
            logits are NaN. None: the first error is raised.

    Returns:
        The adjusted logits, and a function that rewinds processors, or None without processors. The function
        takes the last position of each row that counts, ``[B]``. It sets the state of the row's processors
        back to just after that position, or to that before all of them for -1.
    """
    scores = logits if logits.dtype is torch.float64 else logits.float()
    if not any(row.edits for row in rows):
        return scores, None
    scores = scores.clone() if scores is logits else scores
    _bias_and_mask(scores, rows)
    if not any(row.reads_prefix for row in rows):
        return scores, None
    B, n, _ = scores.shape
    if prefix is None:
        prefix = Prefix(torch.zeros(B, 0, dtype=torch.int64, device=scores.device))
    if drafted is None:
        drafted = torch.zeros(B, 0, dtype=torch.int64, device=scores.device)
    integers("drafted", drafted, "an int64 tensor [B, g]")
    for name, tokens in (("prefix.tokens", prefix.tokens), ("drafted", drafted)):
        if tokens.shape[0] != B:
            raise ValueError(f"{name}: got {tokens.shape[0]} rows; it must have {B}, as logits")
        if tokens.device != scores.device:
            raise ValueError(f"{name}: got a tensor on {tokens.device}; it must be on {scores.device}")
    if drafted.shape[1] < n - 1:
        raise ValueError(f"drafted: got {drafted.shape[1]} tokens a row; {n} positions need at least {n - 1}")
    _penalize(scores, rows, prefix, drafted[:, : n - 1])
    if not any(row.processors for row in rows):
        return scores, None
    return scores, _run_processors(scores, rows, prefix, drafted, lengths, until_rejected, errors)


def warp(scores: Tensor, rows: list[SamplingParams]) -> Tensor:
    """Apply the part of ``adjust`` that needs no prefix.

    That is temperature, top-k, top-p and min-p, or the argmax.
    """
    greedy = [row.greedy for row in rows]
    if all(greedy):
        return argmax_only(scores)
    adjusted = scores

    temperature = _column(rows, lambda row: row.temperature or 1.0, 1.0, scores)
    if temperature is not None:
        # CUDA divides by a number and by a tensor with different last digits. Transformers divides by a
        # number.
        adjusted = adjusted / (rows[0].temperature if len(rows) == 1 else temperature)
    if any(row.top_k for row in rows):
        adjusted = _keep_top_k(adjusted, [row.top_k for row in rows])
    # 1 − top_p is rounded once, from double, as in Transformers. A row with top_p = 1 gets a limit below any
    # sum, so it drops nothing.
    limit = _column(rows, lambda row: 1 - row.top_p if row.top_p < 1 else -1.0, -1.0, scores)
    if limit is not None:
        adjusted = drop_least_likely(adjusted, limit)
    min_p = _column(rows, lambda row: row.min_p, 0.0, scores)
    if min_p is not None:
        probs = adjusted.softmax(-1)
        adjusted = adjusted.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if any(greedy):
        is_greedy = on_device(greedy, torch.bool, scores.device).view(-1, 1, 1)
        adjusted = torch.where(is_greedy, argmax_only(scores), adjusted)
    return adjusted


def argmax_only(scores: Tensor) -> Tensor:
    """Return logits of a point mass at the argmax of each position."""
    token = scores.argmax(-1, keepdim=True)
    # 0 where the maximum is a number, NaN where it is not: an unusable row remains unusable.
    return torch.full_like(scores, -torch.inf).scatter_(-1, token, scores.gather(-1, token) * 0)


def _keep_top_k(scores: Tensor, k: list[int]) -> Tensor:
    V = scores.shape[-1]
    k = [min(value, V) or V for value in k]
    largest_k = max((value for value in k if value < V), default=V)
    if largest_k == V:
        return scores
    top = scores.topk(largest_k).values
    if len(set(k)) == 1:
        return scores.masked_fill(scores < top[..., -1:], -torch.inf)
    at = on_device([min(value, largest_k) - 1 for value in k], torch.int64, scores.device).view(-1, 1, 1)
    kth = top.gather(-1, at.expand(-1, scores.shape[1], 1))
    off = on_device([value == V for value in k], torch.bool, scores.device).view(-1, 1, 1)
    return scores.masked_fill((scores < kth) & ~off, -torch.inf)


def drop_least_likely(scores: Tensor, limit: Tensor) -> Tensor:
    """Drop the least likely tokens whose probabilities sum to at most ``limit``.

    Only values are sorted, not ids. Where the cut falls among equal logits, the tie rule decides which ids
    go.
    """
    if scores.device.type == "cpu":
        # Several times as fast as torch.sort.
        ascending = torch.from_numpy(np.sort(scores.detach().numpy(), axis=-1))
    else:
        ascending = scores.sort(dim=-1).values
    below = ascending.softmax(-1).cumsum_(-1)
    limit = limit.expand(*below.shape[:-1], 1).contiguous()
    dropped = torch.searchsorted(below, limit, right=True).clamp_(max=scores.shape[-1] - 1)
    cut = ascending.gather(-1, dropped)
    drop = scores < cut
    ties_dropped = dropped - torch.searchsorted(ascending, cut)
    if scores.device.type != "cpu" or (ties_dropped > 0).any():
        tied = scores == cut
        drop |= tied & (tied.cumsum(-1) <= ties_dropped)
    return scores.masked_fill(drop, -torch.inf)


def _bias_and_mask(scores: Tensor, rows: list[SamplingParams]) -> None:
    """Add bias, and forbid tokens that are not allowed, in place."""
    V = scores.shape[-1]
    for b, row in enumerate(rows):
        row.check_vocabulary(V)
        own = scores if len(rows) == 1 else scores[b]
        if row.logit_bias:
            ids = on_device(list(row.logit_bias), torch.int64, scores.device)
            own[..., ids] += on_device(list(row.logit_bias.values()), scores.dtype, scores.device)
        if row.allowed_token_ids is not None:
            own.masked_fill_(row.forbidden(V, scores.device), -torch.inf)


def _penalize(scores: Tensor, rows: list[SamplingParams], prefix: Prefix, drafted: Tensor) -> None:
    """Apply repetition, frequency and presence penalties in place, at all positions at once."""
    repetition = _column(rows, lambda row: row.repetition_penalty, 1.0, scores)
    frequency = _column(rows, lambda row: row.frequency_penalty, 0.0, scores)
    presence = _column(rows, lambda row: row.presence_penalty, 0.0, scores)
    if repetition is frequency is presence is None:
        return
    T, n, V = prefix.tokens.shape[1], scores.shape[1], scores.shape[-1]
    tokens = torch.cat((prefix.tokens, drafted), dim=1)[:, None]  # [B, 1, L]
    slot = torch.arange(tokens.shape[-1], device=scores.device)
    position = torch.arange(n, device=scores.device)[:, None]
    in_prefix = slot < prefix.row_lengths()[:, None, None]
    # [B, n, L]: before position i, and no padding
    seen = torch.where(slot < T, in_prefix, slot - T < position)
    seen &= (tokens >= 0) & (tokens < V)
    tokens = tokens.clamp(0, V - 1).expand_as(seen)

    if repetition is not None:
        _change(scores, tokens, seen, lambda z: torch.where(z < 0, z * repetition, z / repetition))
    if prefix.prompt_lengths is not None:
        seen = seen & ((slot >= T) | (slot >= prefix.prompt_lengths[:, None, None]))
    if frequency is not None:
        scores.scatter_add_(-1, tokens, -frequency * seen)
    if presence is not None:
        _change(scores, tokens, seen, lambda z: z - presence)


def _change(scores: Tensor, tokens: Tensor, seen: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Change, once, the score of each token seen at a position; ``tokens`` and ``seen`` are ``[B, n, L]``."""
    if not seen.shape[-1]:
        return
    # An entry that is not seen repeats one that is. Both write the same number.
    first = seen.to(torch.uint8).argmax(-1, keepdim=True)
    tokens = torch.where(seen, tokens, tokens.gather(-1, first))
    score = scores.gather(-1, tokens)
    scores.scatter_(-1, tokens, torch.where(seen.any(-1, keepdim=True), change(score), score))


def _run_processors(
    scores: Tensor,
    rows: list[SamplingParams],
    prefix: Prefix,
    drafted: Tensor,
    lengths: Tensor | None,
    until_rejected: bool,
    errors: Errors | None,
) -> Rewind:
    """Apply each row's processors in place, in order of positions; return a function that rewinds them."""
    B, n, _ = scores.shape
    prefix_lengths = prefix.row_lengths().tolist()
    counts = [n] * B if lengths is None else lengths.tolist()
    row_processors = [rows[b if len(rows) > 1 else 0].processors for b in range(B)]
    uses = Counter(
        one for processors in row_processors for one in {id(processor) for processor in processors}
    )
    exclusive = [all(uses[id(processor)] == 1 for processor in processors) for processors in row_processors]
    # [B][i] copies of the processors before position i; the last one is after all positions
    copies: list[list[Sequence[Processor]]] = []
    for b in range(B):
        processors = row_processors[b] if exclusive[b] else copy_processors(row_processors[b])
        row_states: list[Sequence[Processor]] = []
        if exclusive[b] and counts[b] > 1:
            row_states.append(copy_processors(processors))
        for i in range(counts[b] if processors else 0):
            ids = torch.cat((prefix.tokens[b, : prefix_lengths[b]], drafted[b, :i]))[None]
            one = scores[b, i][None]
            try:
                for processor in processors:
                    one = _checked(processor(ids, one), one, processor)
                if exclusive[b]:
                    row_states.append(copy_processors(processors))
                scores[b, i] = one[0]
            except Exception as error:
                if errors is None:
                    raise
                errors[b] = i, error
                scores[b, i:] = torch.nan
                break
            if until_rejected and i < drafted.shape[1] and bool(one[0, drafted[b, i]] == -torch.inf):
                break
        copies.append(row_states)

    def rewind(last: Tensor) -> None:
        for b, i in enumerate(last.tolist()):
            states = copies[b][min(i + 1, len(copies[b]) - 1)] if copies[b] else ()  # fewer after an error
            for processor, saved in zip(row_processors[b], states, strict=False):
                if hasattr(processor, "__dict__"):
                    vars(processor).clear()
                    vars(processor).update(vars(saved))

    return rewind


def _checked(result: object, scores: Tensor, processor: Processor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else kind(result)
        raise ValueError(
            f"processors: got {got} from {type(processor).__name__}; it must return scores "
            f"{tuple(scores.shape)}"
        )
    return result


def _column(
    rows: list[SamplingParams], value: Callable[[SamplingParams], float], neutral: float, like: Tensor
) -> Tensor | None:
    """Return one value per row as ``[B or 1, 1, 1]``, or None if all values are neutral."""
    values = [float(value(row)) for row in rows]
    if all(one == neutral for one in values):
        return None
    return on_device(values, like.dtype, like.device).view(-1, 1, 1)

"""Sampling: what a user asks of the next token's distribution, and how logits are adjusted to it.

The order is that of Transformers' `generate`: logit bias, repetition penalty, frequency and presence
penalties, custom processors, then, unless greedy, temperature, top-k, top-p, min-p. So are the arithmetic
(float32) and the tie rules, so that the kept set is the same, token for token:

- top-k keeps every token that ties with the k-th;
- top-p drops tokens from the least likely up while their probabilities sum to at most 1 − top_p, among equal
  logits the smaller id first, and always keeps one;
- min-p keeps tokens at least min_p times as likely as the likeliest one;
- greedy takes `torch.argmax`.

Adjusted logits are the contract of everything downstream: their softmax is p (or q), and −inf means
impossible.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.arguments import floats, integer, integers, kind, moved, number, on_device, suggests
from outpace.ranges import RANGES

Processor = Callable[[Tensor, Tensor], Tensor]
"""`(input_ids [1, T], scores [1, V]) -> scores [1, V]`: any Transformers `LogitsProcessor`."""

Rewind = Callable[[Tensor], None]

PENALTIES = "repetition_penalty", "frequency_penalty", "presence_penalty"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults leave the model's distribution as it is.

    temperature         divides the logits; 0 is greedy, and then top_k, top_p and min_p do nothing
    top_k               keep the k likeliest tokens; 0 keeps all
    top_p               keep the likeliest tokens that together reach this probability; 1 keeps all
    min_p               keep tokens at least this many times as likely as the likeliest; 0 keeps all
    repetition_penalty  divides positive (multiplies negative) logits of tokens in prompt or output; 1 is off
    frequency_penalty   is subtracted once per occurrence in the output; 0 is off
    presence_penalty    is subtracted once if the token occurs in the output; 0 is off
    logit_bias          token id -> number added to its logit; -inf forbids the token
    processors          Transformers `LogitsProcessor`s, or callables of the same form, applied in this order

    A processor that keeps state, in attributes of its own, serves a single row: give each row its own
    `sampling.fork()`. Speculation shows it drafts that are then lost; after each verdict its state is set
    back to where plain decoding would have left it. One that several rows share is run on a copy for each
    and keeps nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        integer("top_k", self.top_k, *RANGES["top_k"])
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            number(name, getattr(self, name), *RANGES[name])
        if not isinstance(self.logit_bias, Mapping | None):
            raise TypeError(f"logit_bias: got {kind(self.logit_bias)}; it must map token ids to numbers")
        for token, bias in (self.logit_bias or {}).items():
            integer("logit_bias", token, "keyed by token ids >= 0", lambda t: t >= 0)
            number(f"logit_bias[{token}]", bias, *RANGES["logit_bias"])
        if not isinstance(self.processors, Sequence):
            raise TypeError(f"processors: got {kind(self.processors)}; it must be a list of LogitsProcessors")
        flat: list[Processor] = []
        for processor in self.processors:
            flat.extend(processor if isinstance(processor, list) else [processor])  # a LogitsProcessorList
        for processor in flat:
            if not callable(processor):
                raise TypeError(f"processors: got {kind(processor)}; each must be a LogitsProcessor")
        # What was checked must not change later.
        object.__setattr__(self, "processors", tuple(flat))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias) if self.logit_bias else None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def neutral(self) -> bool:
        """Whether logits stay as they are."""
        return (self.temperature, self.top_k, self.top_p, self.min_p, self.logit_bias) == (
            (1, 0, 1, 0, None)
        ) and not self.reads_prefix

    @property
    def shape(self) -> Sampling:
        """The part of it that depends on the position alone."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def reads_prefix(self) -> bool:
        """Whether the adjustment depends on earlier tokens."""
        return bool(
            self.processors or self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        )

    def fork(self) -> Sampling:
        """The same sampling with its own copy of the processors' state; models they hold are shared."""
        if not self.processors:
            return self
        return dataclasses.replace(self, processors=_copies(self.processors))


Sampling.__init__ = suggests(Sampling.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Prefix:
    """The tokens before the first scored position, for adjustments that read them.

    tokens          `[B, T]` token ids, padded on the right
    lengths         `[B]` how many of them count; None: all T
    prompt_lengths  `[B]` how many of them were the prompt: frequency and presence penalties count what
                    follows; None: none of them, so all T count
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
                    f"prefix.{name}: is on {lengths.device}; prefix.tokens is on {self.tokens.device}"
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
        """A prefix from plain lists of different lengths."""
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
        """`of`, for lists that are known to be token ids."""
        longest = max(map(len, rows), default=0)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64, device="cpu")
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths = on_device([len(row) for row in rows], torch.int64, device)
        prompts = None if prompt_lengths is None else on_device(prompt_lengths, torch.int64, device)
        return cls(moved(tokens, device), lengths, prompts)

    def row_lengths(self) -> Tensor:
        rows, longest = self.tokens.shape
        return self.tokens.new_full((rows,), longest) if self.lengths is None else self.lengths


@torch.no_grad()
def adjust(
    logits: Tensor,
    sampling: Sampling | Sequence[Sampling],
    prefix: Prefix | None = None,
    drafted: Tensor | None = None,
) -> Tensor:
    """Logits of the distribution that `sampling` asks for.

    logits    `[B, n, V]` of n consecutive positions a row, or `[B, V]` of one; any float dtype
    sampling  one for all rows, or one per row
    prefix    the tokens before position 0, when the sampling reads them
    drafted   `[B, >= n-1]`: position i of row b follows prefix[b] and drafted[b, :i]

    Returns a new tensor of the same shape, float32 (float64 stays float64). A row that holds NaN, +inf, or
    nothing but -inf keeps having no softmax. Processors are called for one row after the other, positions in
    order, with the prefix that plain decoding would show them.
    """
    floats("logits", logits)
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits: got shape {tuple(logits.shape)}; it must be [B, n, V] or [B, V]")
    if logits.dim() == 2:
        return adjust(logits[:, None], sampling, prefix, drafted)[:, 0]
    rows = per_row(sampling, logits.shape[0])
    scores, _ = process(logits, rows, prefix, drafted)
    return warp(scores, rows)


def per_row(sampling: Sampling | Sequence[Sampling], rows: int, name: str = "sampling") -> list[Sampling]:
    """One Sampling that serves all rows, or one per row, as a list of 1 or `rows`."""
    samplings = list(sampling) if isinstance(sampling, Sequence) else [sampling]
    for one in samplings:
        if not isinstance(one, Sampling):
            raise TypeError(f"{name}: got {kind(one)}; it must be a Sampling, or one Sampling per row")
    if isinstance(sampling, Sequence) and len(samplings) != rows:
        raise ValueError(f"{name}: got {len(samplings)} for {rows} rows; give one for all, or one per row")
    return samplings


def process(
    logits: Tensor,
    rows: list[Sampling],
    prefix: Prefix | None = None,
    drafted: Tensor | None = None,
    lengths: Tensor | None = None,
    until_lost: bool = False,
) -> tuple[Tensor, Rewind | None]:
    """The part of `adjust` that greedy decoding has too: bias, penalties, processors.

    Processors see the first `lengths[b]` of a row's positions; by default all n; with `until_lost` none past
    a draft that they forbid, which plain decoding would never show them. Where there are
    processors, the second result takes the last position of each row that came to count `[B]`, and sets the
    state of the row's processors back to just after it.
    """
    scores = logits if logits.dtype is torch.float64 else logits.float()
    if not any(row.logit_bias or row.reads_prefix for row in rows):
        return scores, None
    scores = scores.clone() if scores is logits else scores
    _add_bias(scores, rows)
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
            raise ValueError(f"{name}: got {tokens.shape[0]} rows; logits have {B}")
        if tokens.device != scores.device:
            raise ValueError(f"{name}: is on {tokens.device}; logits are on {scores.device}")
    if drafted.shape[1] < n - 1:
        raise ValueError(f"drafted: got {drafted.shape[1]} tokens a row; {n} positions need at least {n - 1}")
    _penalize(scores, rows, prefix, drafted[:, : n - 1])
    if not any(row.processors for row in rows):
        return scores, None
    return scores, _run_processors(scores, rows, prefix, drafted, lengths, until_lost)


def warp(scores: Tensor, rows: list[Sampling]) -> Tensor:
    """The part of `adjust` that depends on the position alone: temperature, top-k, top-p, min-p, or
    argmax."""
    greedy = [row.greedy for row in rows]
    if all(greedy):
        return _argmax_only(scores)
    adjusted = scores

    temperature = _column(rows, lambda row: row.temperature or 1.0, 1.0, scores)
    if temperature is not None:
        # CUDA divides by a number and by a tensor with different last digits; a number is what Transformers
        # has.
        adjusted = adjusted / (rows[0].temperature if len(rows) == 1 else temperature)
    if any(row.top_k for row in rows):
        adjusted = _keep_top_k(adjusted, [row.top_k for row in rows])
    # 1 − top_p is rounded once, from double, as in Transformers; a row that keeps all gets a limit below
    # any sum.
    limit = _column(rows, lambda row: 1 - row.top_p if row.top_p < 1 else -1.0, -1.0, scores)
    if limit is not None:
        adjusted = _keep_top_p(adjusted, limit)
    min_p = _column(rows, lambda row: row.min_p, 0.0, scores)
    if min_p is not None:
        probs = adjusted.softmax(-1)
        adjusted = adjusted.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if any(greedy):
        is_greedy = on_device(greedy, torch.bool, scores.device).view(-1, 1, 1)
        adjusted = torch.where(is_greedy, _argmax_only(scores), adjusted)
    return adjusted


def _argmax_only(scores: Tensor) -> Tensor:
    token = scores.argmax(-1, keepdim=True)
    # 0 where the maximum is a number, NaN where it is not: an unusable row stays unusable.
    return torch.full_like(scores, -torch.inf).scatter_(-1, token, scores.gather(-1, token) * 0)


def _keep_top_k(scores: Tensor, k: list[int]) -> Tensor:
    V = scores.shape[-1]
    k = [min(one, V) or V for one in k]
    most = max((one for one in k if one < V), default=V)
    if most == V:
        return scores
    top = scores.topk(most).values
    if len(set(k)) == 1:
        return scores.masked_fill(scores < top[..., -1:], -torch.inf)
    at = on_device([min(one, most) - 1 for one in k], torch.int64, scores.device).view(-1, 1, 1)
    kth = top.gather(-1, at.expand(-1, scores.shape[1], 1))
    off = on_device([one == V for one in k], torch.bool, scores.device).view(-1, 1, 1)
    return scores.masked_fill((scores < kth) & ~off, -torch.inf)


def _keep_top_p(scores: Tensor, limit: Tensor) -> Tensor:
    """Drop the least likely tokens whose probabilities sum to at most `limit`.

    Only values are sorted, not ids: where the cut falls among equal logits, the tie rule says which ids go.
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


def _add_bias(scores: Tensor, rows: list[Sampling]) -> None:
    V = scores.shape[-1]
    for b, row in enumerate(rows):
        if not row.logit_bias:
            continue
        beyond = [token for token in row.logit_bias if token >= V]
        if beyond:
            raise ValueError(f"logit_bias: got token ids {beyond}; the vocabulary has {V} tokens")
        ids = on_device(list(row.logit_bias), torch.int64, scores.device)
        bias = on_device(list(row.logit_bias.values()), scores.dtype, scores.device)
        (scores if len(rows) == 1 else scores[b])[..., ids] += bias


def _penalize(scores: Tensor, rows: list[Sampling], prefix: Prefix, drafted: Tensor) -> None:
    """Repetition, frequency and presence penalties, in place, at all positions at once."""
    repetition = _column(rows, lambda row: row.repetition_penalty, 1.0, scores)
    frequency = _column(rows, lambda row: row.frequency_penalty, 0.0, scores)
    presence = _column(rows, lambda row: row.presence_penalty, 0.0, scores)
    if repetition is frequency is presence is None:
        return
    T, n, V = prefix.tokens.shape[1], scores.shape[1], scores.shape[-1]
    tokens = torch.cat((prefix.tokens, drafted), dim=1)[:, None]  # [B, 1, L]
    slot = torch.arange(tokens.shape[-1], device=scores.device)
    position = torch.arange(n, device=scores.device)[:, None]
    kept = slot < prefix.row_lengths()[:, None, None]
    seen = torch.where(slot < T, kept, slot - T < position)  # [B, n, L]: before position i, and no padding
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
    """Change, once, the score of each token seen at a position; `tokens` and `seen` are `[B, n, L]`."""
    if not seen.shape[-1]:
        return
    # Where a slot is not seen, let it repeat one that is: the same number is then written twice.
    first = seen.to(torch.uint8).argmax(-1, keepdim=True)
    tokens = torch.where(seen, tokens, tokens.gather(-1, first))
    score = scores.gather(-1, tokens)
    scores.scatter_(-1, tokens, torch.where(seen.any(-1, keepdim=True), change(score), score))


def _run_processors(
    scores: Tensor,
    rows: list[Sampling],
    prefix: Prefix,
    drafted: Tensor,
    lengths: Tensor | None,
    until_lost: bool,
) -> Rewind:
    """Apply each row's processors in place, position after position; return how to set their state back."""
    B, n, _ = scores.shape
    prefix_lengths = prefix.row_lengths().tolist()
    counts = [n] * B if lengths is None else lengths.tolist()
    own = [rows[b if len(rows) > 1 else 0].processors for b in range(B)]
    uses = Counter(one for processors in own for one in {id(processor) for processor in processors})
    alone = [all(uses[id(processor)] == 1 for processor in processors) for processors in own]
    after: list[list[Sequence[Processor]]] = []  # [B][position] processors as they then were
    for b in range(B):
        processors = own[b] if alone[b] else _copies(own[b])
        states: list[Sequence[Processor]] = []
        for i in range(counts[b] if processors else 0):
            ids = torch.cat((prefix.tokens[b, : prefix_lengths[b]], drafted[b, :i]))[None]
            one = scores[b, i][None]
            for processor in processors:
                one = processor(ids, one)
            scores[b, i] = one[0]
            if alone[b]:
                states.append(_copies(processors))
            if until_lost and i < drafted.shape[1] and bool(one[0, drafted[b, i]] == -torch.inf):
                break
        after.append(states)

    def rewind(last: Tensor) -> None:
        for b, i in enumerate(last.tolist()):
            for processor, then in zip(own[b], after[b][i] if after[b] else (), strict=False):
                if hasattr(processor, "__dict__"):
                    vars(processor).clear()
                    vars(processor).update(vars(then))

    return rewind


def _copies(processors: Sequence[Processor]) -> tuple[Processor, ...]:
    """Copies with state of their own. Models are shared: they are large, and no processor's state."""
    shared: dict[int, Any] = {}

    def share(value: object, depth: int = 0) -> None:
        if isinstance(value, torch.nn.Module):
            shared[id(value)] = value
        elif isinstance(value, list | tuple) and depth < 3:
            for one in value:
                share(one, depth + 1)
        elif isinstance(value, dict) and depth < 3:
            share(list(value.values()), depth)

    for processor in processors:
        share(getattr(processor, "__dict__", {}))
    try:
        return copy.deepcopy(tuple(processors), shared)
    except Exception as error:
        names = ", ".join(type(processor).__name__ for processor in processors)
        raise TypeError(
            f"processors: {names} cannot be copied ({error}); speculation sets a processor's state back "
            "after a lost draft, so it needs a working copy.deepcopy"
        ) from error


def _column(
    rows: list[Sampling], value: Callable[[Sampling], float], neutral: float, like: Tensor
) -> Tensor | None:
    """One value per row as `[B or 1, 1, 1]`, or None when it changes nothing anywhere."""
    values = [float(value(row)) for row in rows]
    if all(one == neutral for one in values):
        return None
    return on_device(values, like.dtype, like.device).view(-1, 1, 1)


_APPLIED = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_SHAPING = {  # and what they are where they do nothing
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    **dict.fromkeys(("top_h", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "min_new_tokens", "guidance_scale")),
}


def from_generation_config(config: Any) -> Sampling:
    """What Transformers' `generate` does by this configuration, as a Sampling; a warning names the rest."""
    if config is None:
        return Sampling(temperature=0)
    ignored = [
        name for name, off in _SHAPING.items() if getattr(config, name, None) not in (None, off, [], {})
    ]
    if ignored:
        warnings.warn(
            f"generation_config: {', '.join(ignored)} not applied; pass them as processors of a Sampling",
            stacklevel=4,
        )
    if not getattr(config, "do_sample", False):
        return Sampling(temperature=0, repetition_penalty=getattr(config, "repetition_penalty", None) or 1.0)
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    values = {name: getattr(config, name, None) for name in _APPLIED}
    values = {name: defaults.get(name) if value is None else value for name, value in values.items()}
    return Sampling(**{name: value for name, value in values.items() if value is not None})

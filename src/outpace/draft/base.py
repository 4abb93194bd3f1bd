"""Interface of a drafter: a ``State`` goes in, and a ``Draft`` comes out.

A drafter may propose any tokens, as long as it reports how it found them. It returns the logits of the very
distribution that each token was sampled from, or None where tokens were chosen. Whether position i is drafted
may depend on the tokens before it and on the distribution at i. It must never depend on the token sampled at
i. Dropping a token because it was unlikely biases the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from outpace.checks.arguments import kind, on_device
from outpace.models.scorer import Scorer
from outpace.models.source import Source
from outpace.sampling import Prefix, SamplingParams, process, random, warp
from outpace.sampling.random import Stream
from outpace.sampling.rows import Edits, RowSampling
from outpace.verification import SampledTokens, sample


@dataclass(frozen=True)
class Precomputed:
    """Results of sampling on a GPU that verification can use again.

    They are the fields of ``outpace.verification.SampledTokens``, stacked to ``[R, g]`` each.

    Attributes:
        lse: Logsumexp of the adjusted logits.
        cut: Smallest logit that the filters leave. None: not computed.
        tie: First id that the filters leave among logits equal to ``cut``. None: not computed.
        sampling: Sampling parameters that verification still has to apply to the logits. None: nothing.
    """

    lse: Tensor
    cut: Tensor | None
    tie: Tensor | None
    sampling: list[SamplingParams] | None

    def first(self, g: int) -> Precomputed:
        """Return the results of the first g tokens."""
        cut, tie = (None if one is None else one[:, :g] for one in (self.cut, self.tie))
        return replace(self, lse=self.lse[:, :g], cut=cut, tie=tie)


@dataclass(frozen=True)
class Draft:
    """Draft tokens of R sequences, up to g for each.

    Attributes:
        tokens: Token ids, int64 ``[R, g]``, on the target's device, or on the CPU if they were chosen.
        logits: Logits ``[R, g, V]`` of the distribution that each token was sampled from.
            ``precomputed.sampling`` is still to be applied to them. None: tokens were chosen.
        lengths: Number of draft tokens of each sequence, at most g. None: all g.
        precomputed: Results of sampling on a GPU that verification can use again. None: nothing.
        steps: Draft steps that were made. None: as many as requested.
    """

    tokens: Tensor
    logits: Tensor | None = None
    lengths: Sequence[int] | None = None
    precomputed: Precomputed | None = None
    steps: int | None = None

    @classmethod
    def chosen(cls, proposals: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """Return a draft of chosen tokens, from lists of any lengths.

        Args:
            proposals: Token ids proposed for each sequence.
            device: Device of the tensors.
        """
        g = max(map(len, proposals), default=0)
        padded = [[*proposal, *[0] * (g - len(proposal))] for proposal in proposals]
        tokens = torch.tensor(padded, dtype=torch.int64, device=device).view(len(proposals), g)
        return cls(tokens, None, [len(proposal) for proposal in proposals])


@dataclass(frozen=True)
class State:
    """Input of ``Drafter.propose``: the sequences, and how to draft for them.

    Row i of R is the sequence in slot ``slots[i]``. A sequence keeps its slot from start to end.

    Attributes:
        slots: Slot of each sequence.
        tokens: Token ids of each sequence, prompt and output. Do not change them.
        prompt_lengths: Number of tokens of each prompt.
        sampling: Sampling parameters of the drafter, per sequence.
        seed: Seeds, int64 ``[R]``. Do not change them.
        limits: Largest number of useful draft tokens, per sequence. More are a waste, not an error.
        vocab_size: Vocabulary size V of the target, and of the logits in a ``Draft``.
        device: Device that the ``Draft`` must be on; chosen tokens may also be on the CPU.
        own_noise: Whether to sample with the noise that the target itself will use (rule "match"), per
            sequence. Empty: for none.
        sources: Encoder input of each sequence, if the target has an encoder.
        after: Sampling parameters after each token, where processors keep state. ``DraftSampler`` fills it.
    """

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]
    prompt_lengths: Sequence[int]
    sampling: Sequence[SamplingParams]
    seed: Tensor
    limits: Sequence[int]
    vocab_size: int
    device: torch.device
    own_noise: Sequence[bool] = ()
    sources: Sequence[Source | None] = ()
    after: list[list[SamplingParams]] = field(default_factory=list)


@dataclass(frozen=True)
class DraftTensors:
    """Draft tokens of a step of the graph executor, and their distributions."""

    tokens: Tensor  # [B, g]
    logits: Tensor | None = None  # [B, g, V]; None where tokens were not sampled
    drawn: Sequence[SampledTokens] = ()  # one per position, where `sample` sampled the tokens
    lengths: Tensor | None = None  # [B], number of draft tokens; None: g each
    sampling: RowSampling | None = None  # still to be applied to the logits


@dataclass(frozen=True)
class GraphState:
    """Input of ``GraphDraft.propose``: tensors of the first B slots.

    Attributes:
        lengths: Number of tokens of each sequence ``[B]``.
        seeds: Seeds ``[B]``.
        token_ids: Prompt and output ``[B, T]``.
        positions: Positions ``[B, g + 2]`` of the last two tokens and of the draft tokens; -1 for idle slots.
        sampling: Temperature and filters of the drafter.
        edits: Bias, allowed tokens and penalties of the drafter. None: no sequence has any.
        own_noise: Whether to sample with the target's own noise, as in ``State``, ``[B]``; or one answer for
            all sequences.
        vocab_size: Vocabulary size V of the target.
    """

    lengths: Tensor
    seeds: Tensor
    token_ids: Tensor
    positions: Tensor
    sampling: RowSampling
    edits: Edits | None
    own_noise: Tensor | bool
    vocab_size: int

    @property
    def last(self) -> Tensor:
        """The last two tokens of each sequence ``[B, 2]``; a single token counts twice."""
        return self.token_ids.gather(1, self.positions[:, :2].clamp(min=0))


class GraphDraft(ABC):
    """Drafting as a function of tensors, which a CUDA graph can capture.

    Attributes:
        scorer: The draft model, or None. Its KV cache has the target's slots.
    """

    scorer: Scorer | None = None

    @abstractmethod
    def propose(self, state: GraphState, g: int) -> DraftTensors:
        """Propose g draft tokens after each sequence."""

    def launch_once(self, state: GraphState, g: int) -> DraftTensors | None:
        """Launch each kernel of ``propose`` once, so that it is compiled.

        Returns:
            Undefined draft tokens, in the form of ``propose``. None: there are no kernels to compile.
        """
        return DraftTensors(state.token_ids[:, :g])


class Drafter(ABC):
    """Interface of a drafter.

    A drafter without memory derives from this class and implements ``propose`` alone.

    ``commit`` is called only after a step with a proposal. Tokens of other steps are in ``State.tokens`` of
    the next call.

    Attributes:
        free: True for a drafter that chooses its tokens and costs next to nothing. It proposes before the
            policy chooses how many of its tokens are scored. The policy may pause such a drafter if its
            proposals take too long.
        scorer: The draft model, or None.
        reads_sources: Whether it reads ``State.sources``, which it can do on the host only.
        setup_seconds: Seconds of the last ``propose`` that later ones do not take, such as those of captures.
    """

    free: bool = False
    scorer: Scorer | None = None
    reads_sources: bool = False
    setup_seconds: float = 0.0

    @abstractmethod
    def propose(self, state: State, g: int) -> Draft:
        """Propose up to g draft tokens after each sequence.

        Args:
            state: The sequences, and how to draft for them.
            g: Largest number of draft tokens, at least 1.
        """

    def commit(self, accepted: Tensor, next_token: Tensor) -> None:
        """Process the verification outcome of the last proposal.

        Args:
            accepted: Number of accepted draft tokens ``[R]`` of the sequences last proposed for.
            next_token: Token ``[R]`` that followed them; 0 if there is none, and the sequence ends.
        """
        return

    def reset(self, slots: Sequence[int]) -> None:
        """Forget these slots, which are now free.

        Args:
            slots: Slots whose sequences have ended. Another sequence may take each of them.
        """
        return

    def check(self, target: Scorer, tokenizer: Any) -> None:
        """Raise ``ValueError`` if the drafter cannot draft for a target with this tokenizer."""
        return

    def in_graph(self) -> GraphDraft | None:
        """Return the drafter as a function of tensors, or None if it must run on the host."""
        return None

    def describe(self) -> str:
        """Return a description of the drafter for a user."""
        return type(self).__name__


class DraftSampler:
    """Sampler of draft tokens, one position at a time.

    It uses the noise and the sampling parameters of the state::

        sampler = DraftSampler(state, g)
        for i in range(g):
            tokens = sampler.sample_next(logits)   # [R, V] -> [R]
        return sampler.draft()

    Args:
        state: Input of ``Drafter.propose``.
        g: Largest number of draft tokens.

    Attributes:
        tokens: Sampled tokens ``[R]`` of each position so far.
        chosen: True if tokens need no distribution.
    """

    def __init__(self, state: State, g: int) -> None:
        self.state = state
        self._starts = [len(text) for text in state.tokens]
        self.tokens: list[Tensor] = []
        self._logits: list[Tensor] = []  # of each position, [R, V]
        self._is_finite: list[Any] = []  # of each position, [R]: whether a token could be sampled
        self._greedy = all(one.greedy for one in state.sampling)
        # Tokens from argmax or from the target's own noise need no distribution.
        self._all_own = bool(state.own_noise) and all(state.own_noise)
        self.chosen = self._all_own or self._greedy
        self._prefix = _padded_prefix(state, g) if any(one.reads_prefix for one in state.sampling) else None
        self._neutral = all(one.neutral for one in state.sampling)
        self._sampled: list[SampledTokens] = []  # of each position, on a GPU
        # On a GPU the kernel applies the parameters that need no prefix.
        self._shapes = None if self._neutral else [one.shape for one in one_for_all(state.sampling)]
        self._uses_kernel = has_kernel(state.device) and not self.chosen
        if not self.chosen and state.device.type == "cpu":
            noise = random.halves(state.seed.tolist(), self._starts, g, Stream.DRAFT)
            self._uniforms = [[row[i][0] for row in noise] for i in range(g)]

    def sample_next(self, logits: Tensor) -> Tensor:
        """Sample the next token of each sequence.

        Args:
            logits: Raw logits ``[R, V]`` of the draft. V may differ from the target's.

        Returns:
            Token ids ``[R]``.
        """
        state, i = self.state, len(self.tokens)
        adjusted = self._next_logits(logits)
        if any(one.processors for one in state.sampling):
            state.after.append([one.fork() for one in state.sampling])
        if self._greedy:
            token = adjusted.argmax(-1)
            is_finite: Any = adjusted.amax(-1).isfinite()
        elif self._all_own:
            token = self._with_own_noise(adjusted, i)
            is_finite = adjusted.amax(-1).isfinite()
        elif self._uses_kernel:
            shapes = self._shapes if self._shapes is None or len(self._shapes) > 1 else self._shapes[0]
            sampled = sample(adjusted, seed=state.seed, position=self._start, step=i, sampling=shapes)
            token, is_finite = sampled.tokens, sampled.lse.isfinite()
            self._sampled.append(sampled)
            self._logits.append(adjusted)
        else:
            logits32 = adjusted.float()
            token, is_finite = random.sample_softmax(logits32, self._uniforms[i])
            self._logits.append(logits32 if adjusted.dtype is torch.float64 else adjusted)
        if not self.chosen and any(state.own_noise):
            own = on_device(list(state.own_noise), torch.bool, state.device)
            shaped = adjusted
            if self._uses_kernel and self._shapes is not None:
                shaped = warp(adjusted[:, None], self._shapes)[:, 0]
            token = torch.where(own, self._with_own_noise(shaped, i), token)
        self.tokens.append(token)
        self._is_finite.append(is_finite)
        return token

    def _with_own_noise(self, adjusted: Tensor, i: int) -> Tensor:
        """Sample token i of each sequence with the noise of the target."""
        noise = random.gumbel(self.state.seed, self._start + i, self.state.vocab_size)
        return random.race(adjusted.float(), noise)

    def _next_logits(self, logits: Tensor) -> Tensor:
        """Return the logits that the next token is sampled from."""
        state, i = self.state, len(self.tokens)
        logits = fit(logits, state.vocab_size)
        prefix = None
        if self._prefix is not None:
            if self.tokens:
                last = (self._start + i - 1)[:, None]
                self._prefix.tokens.scatter_(1, last, self.tokens[-1][:, None])
            prefix = Prefix(self._prefix.tokens, self._start + i, self._prefix.prompt_lengths)
        return logits if self._neutral else self._adjust(logits, prefix, shaped=not self._uses_kernel)

    @cached_property
    def _start(self) -> Tensor:
        return on_device(self._starts, torch.int64, self.state.device)

    def _adjust(self, logits: Tensor, prefix: Prefix | None, shaped: bool) -> Tensor:
        rows = one_for_all(self.state.sampling)
        if any(one.edits for one in rows):
            # An error of a processor ends the draft there. The target then meets it, or rejects earlier.
            logits = process(logits[:, None], rows, prefix, errors={})[0][:, 0]
        return warp(logits[:, None], rows)[:, 0] if shaped else logits

    def draft(self, lengths: Sequence[int] | None = None) -> Draft:
        """Return the sampled tokens as a draft.

        A sequence's draft ends before the first position with NaN or without a possible token. That depends
        on q alone, never on the token.

        Args:
            lengths: Largest number of draft tokens of each sequence. None: all that were sampled.
        """
        if not self.tokens:
            self.usable = [0] * len(self.state.slots)
            return Draft.chosen([[] for _ in self.state.slots], self.state.device)
        logits = None if self.chosen else torch.stack(self._logits, dim=1)
        is_finite = self._is_finite
        if isinstance(is_finite[0], Tensor):
            is_finite = torch.stack(is_finite).tolist()
        self.usable = [sum(1 for _ in takewhile(bool, row)) for row in zip(*is_finite, strict=True)]
        if lengths is not None:
            self.usable = [min(pair) for pair in zip(lengths, self.usable, strict=True)]
        return Draft(torch.stack(self.tokens, dim=1), logits, self.usable, self._precomputed())

    def _precomputed(self) -> Precomputed | None:
        if not self._sampled:
            return None
        cuts = [one.cut for one in self._sampled if one.cut is not None]
        ties = [one.tie for one in self._sampled if one.tie is not None]
        return Precomputed(
            torch.stack([one.lse for one in self._sampled], dim=1),
            torch.stack(cuts, dim=1) if cuts else None,
            torch.stack(ties, dim=1) if ties else None,
            self._shapes,
        )


def has_kernel(device: torch.device) -> bool:
    """Return whether ``outpace.verification.sample`` samples the tokens on this device.

    It then also applies temperature, top-k, top-p and min-p.
    """
    return device.type != "cpu"


def check_draft(draft: Any, drafter: Any, rows: int, vocab_size: int, device: torch.device) -> None:
    """Check the result of a drafter's ``propose``.

    Raises:
        TypeError: The draft is not a ``Draft``, or its tokens or logits are not tensors.
        ValueError: A shape, dtype, device, length or token id is wrong.
    """
    if not isinstance(draft, Draft):
        raise TypeError(
            f"draft: got {kind(draft)[:80]} from {type(drafter).__name__}.propose; it must be an "
            "outpace.Draft, such as Draft.chosen([[1, 2]]); see docs/guides/add-a-drafter.md"
        )
    tokens, logits = draft.tokens, draft.logits
    for name, value in (("tokens", tokens), ("logits", logits)):
        if not isinstance(value, Tensor) and (name, value) != ("logits", None):
            raise TypeError(
                f"draft.{name}: got {kind(value)[:80]} from {type(drafter).__name__}.propose; it must be a "
                "tensor"
            )
    if tokens.dtype is not torch.int64 or tokens.dim() != 2 or tokens.shape[0] != rows:
        raise ValueError(
            f"draft.tokens: got {tokens.dtype} {tuple(tokens.shape)}; it must be int64 [{rows}, g]"
        )
    if draft.lengths is not None and len(draft.lengths) != rows:
        raise ValueError(f"draft.lengths: got {len(draft.lengths)}; it must be one per sequence, {rows}")
    if draft.lengths is not None and not all(0 <= n <= tokens.shape[1] for n in draft.lengths):
        raise ValueError(f"draft.lengths: got {draft.lengths}; each must be in 0..{tokens.shape[1]}")
    if logits is not None and logits.shape != (*tokens.shape, vocab_size):
        raise ValueError(
            f"draft.logits: got shape {tuple(logits.shape)}; it must be {(*tokens.shape, vocab_size)}; "
            "`outpace.draft.base.fit` fits logits to a vocabulary size"
        )
    on_host = tokens.device.type == "cpu"
    for name, value, fits in (("tokens", tokens, on_host and logits is None), ("logits", logits, False)):
        if value is not None and value.device != device and not fits:
            raise ValueError(f"draft.{name}: got a tensor on {value.device}; it must be on {device}")
    if on_host and tokens.numel():
        flat = tokens.flatten().tolist()
        if min(flat) < 0 or max(flat) >= vocab_size:
            raise ValueError(
                f"draft.tokens: got ids {min(flat)}..{max(flat)}; they must be in 0..{vocab_size - 1}"
            )


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Fit the draft's logits to the target's vocabulary size.

    Vocabularies may differ by padding. Ids that the draft does not know become impossible, and excess ids are
    cut off.
    """
    V = logits.shape[-1]
    if vocab_size > V:
        return torch.nn.functional.pad(logits, (0, vocab_size - V), value=-torch.inf)
    return logits if vocab_size == V else logits[..., :vocab_size]


def one_for_all(sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Return a single entry where all sequences share one, else all entries.

    Logits are adjusted faster with a single entry.
    """
    return list(sampling[:1] if all(one is sampling[0] for one in sampling) else sampling)


def _padded_prefix(state: State, g: int) -> Prefix:
    """Return the tokens of the sequences, padded for g more."""
    prefix = Prefix.padded(state.tokens, state.prompt_lengths, state.device)
    return Prefix(torch.nn.functional.pad(prefix.tokens, (0, g)), prefix.lengths, prefix.prompt_lengths)

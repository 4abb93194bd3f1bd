"""Data types of verification: its input ``Block``, its result ``Verdict``, and sampled draft tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Outcome of verification, row by row.

    Row b continues with ``draft_tokens[b, :accepted[b]]``, then ``next_token[b]`` unless it is bad.

    Attributes:
        accepted: Number of accepted draft tokens, int64 ``[B]``.
        next_token: Token that follows them, int64 ``[B]``. It is a correction, or a bonus token when all were
            accepted.
        bad: Rows without a next token, bool ``[B]``. Their logits after the accepted draft tokens are
            unusable (NaN, +inf or nothing but -inf), or their inputs are out of range. ``next_token`` is 0.
    """

    accepted: Tensor
    next_token: Tensor
    bad: Tensor

    def in_rows(self, rows: Tensor, other: Verdict) -> Verdict:
        """Return this verdict in the rows ``[B]`` that are True, and another one elsewhere."""
        return Verdict(
            torch.where(rows, self.accepted, other.accepted),
            torch.where(rows, self.next_token, other.next_token),
            torch.where(rows, self.bad, other.bad),
        )


@dataclass(frozen=True)
class SampledTokens:
    """Sampled draft tokens, and results that verification would otherwise compute again.

    Attributes:
        tokens: Token ids, int64 ``[B]``.
        lse: Logsumexp of the adjusted logits, float64 ``[B]``. NaN where there was nothing to sample from.
        cut: Smallest logit that the filters leave, before temperature, float32 ``[B]``. None: not computed.
        tie: First id that the filters leave among logits equal to ``cut``, int32 ``[B]``. In a greedy row,
            the argmax.
    """

    tokens: Tensor
    lse: Tensor
    cut: Tensor | None = None
    tie: Tensor | None = None


@dataclass(eq=False)
class Block:
    """Draft tokens and logits of one step, all on one device.

    A block is never changed. The dataclass is not frozen, because a frozen one takes two microseconds longer
    to create.
    """

    tokens: Tensor  # [B, g] int64, 0 where nothing was drafted
    draft_logits: Tensor | None  # [B, g, V]; None: point masses
    target_logits: Tensor  # [B, g+1, V]
    draft_lse: Tensor | None  # [B, g] logsumexp of draft_logits
    seeds: Tensor | int  # [B], or one for all
    starts: Tensor | int  # [B] absolute position of tokens[:, 0], or one for all
    counts: Tensor | None = None  # [B] number of draft tokens per row; None: g
    invalid: Tensor | None = None  # [B] bool, rows with a token or length out of range
    greedy_accept: Tensor | None = None  # [B, g] bool, draft tokens that greedy lenience accepts
    draft_cut: Tensor | None = None  # [B, g] smallest draft logit that the filters leave, if known
    draft_tie: Tensor | None = None  # [B, g] int32, first id that they leave there
    level: int = 0  # depth in a cascade of drafters; 0: the target verifies

    @cached_property
    def seed(self) -> Tensor:
        """Seed of each row, ``[B]``."""
        return self._each(self.seeds)

    @cached_property
    def start(self) -> Tensor:
        """Absolute position of each row's first draft token, ``[B]``."""
        return self._each(self.starts)

    def _each(self, value: Tensor | int) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return torch.full((len(self.tokens),), value, dtype=torch.int64, device=self.tokens.device)

    @property
    def ragged(self) -> bool:
        """True if some row may have fewer than g draft tokens."""
        return self.counts is not None

    @cached_property
    def lengths(self) -> Tensor:
        """Number of draft tokens of each row, ``[B]``."""
        B, g = self.tokens.shape
        return self.tokens.new_full((B,), g) if self.counts is None else self.counts

    @cached_property
    def drafted(self) -> Tensor:
        """Mask of the tokens that were drafted, bool ``[B, g]``."""
        if self.counts is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.counts[:, None]

    @property
    def positions(self) -> Tensor:
        """Absolute positions of the g+1 scored tokens, ``[B, g+1]``."""
        return self.start[:, None] + torch.arange(self.target_logits.shape[1], device=self.start.device)

    def rows(self, rows: slice) -> Block:
        """Return a block of some of the rows."""
        each = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        tensors: dict[str, Any] = {name: value[rows] for name, value in each if isinstance(value, Tensor)}
        return dataclasses.replace(self, **tensors)

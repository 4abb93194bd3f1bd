"""What goes into a rule and what comes out of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What becomes of a block of drafts, row by row: draft_tokens[b, :accepted[b]], then next_token[b].

    accepted    `[B]` int64, drafted tokens kept
    next_token  `[B]` int64, the token that follows them: a correction, or a bonus when all were kept
    bad         `[B]` bool, rows whose logits are unusable (NaN, +inf or nothing but -inf); their accepted and
                next_token are 0 and mean nothing
    """

    accepted: Tensor
    next_token: Tensor
    bad: Tensor


@dataclass(frozen=True)
class Drawn:
    """A drafter's draw from each row, and what verification would otherwise have to find out again.

    tokens  `[B]` int64
    lse     `[B]` float64, logsumexp of the adjusted logits; NaN where there was nothing to draw from
    cut     `[B]` float32, the least logit that stayed, before temperature; None where it was not looked for
    tie     `[B]` int32, the first id that stayed just there; of a greedy row, the one that did
    """

    tokens: Tensor
    lse: Tensor
    cut: Tensor | None = None
    tie: Tensor | None = None


@dataclass(eq=False)
class Block:
    """One iteration's drafts and scores, checked and adjusted, all on one device.

    Nobody changes one; that it is not frozen saves two microseconds of a GPU's time each.
    """

    tokens: Tensor  # [B, g] int64, 0 where nothing was drafted
    draft_logits: Tensor | None  # [B, g, V]; None: point masses
    target_logits: Tensor  # [B, g+1, V]
    draft_lse: Tensor | None  # [B, g] logsumexp of draft_logits
    seeds: Tensor | int  # [B], or one for all
    starts: Tensor | int  # [B] absolute position of tokens[:, 0], or one for all
    counts: Tensor | None = None  # [B] how many each row drafted; None: g
    given_up: Tensor | None = None  # [B] bool, rows that are bad already
    greedy_keep: Tensor | None = None  # [B, g] bool, drafts that greedy lenience keeps
    draft_cut: Tensor | None = None  # [B, g] the least draft logit that stayed, if the drafter kept it
    draft_tie: Tensor | None = None  # [B, g] int32, the first id that stayed just there
    in_turn: bool = False  # whether logits past a lost draft may be left alone, unusable or not

    @cached_property
    def seed(self) -> Tensor:
        """One per row: `[B]`."""
        return self._each(self.seeds)

    @cached_property
    def start(self) -> Tensor:
        """One per row: `[B]`."""
        return self._each(self.starts)

    def _each(self, value: Tensor | int) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return torch.full((len(self.tokens),), value, dtype=torch.int64, device=self.tokens.device)

    @property
    def ragged(self) -> bool:
        """Whether some row may have drafted fewer than g."""
        return self.counts is not None

    @cached_property
    def lengths(self) -> Tensor:
        """How many tokens each row drafted: `[B]`."""
        B, g = self.tokens.shape
        return self.tokens.new_full((B,), g) if self.counts is None else self.counts

    @cached_property
    def drafted(self) -> Tensor:
        """Which tokens were drafted: `[B, g]` bool."""
        if self.counts is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.counts[:, None]

    @property
    def positions(self) -> Tensor:
        """Absolute positions of the g+1 scored tokens: `[B, g+1]`."""
        return self.start[:, None] + torch.arange(self.target_logits.shape[1], device=self.start.device)

    def rows(self, rows: slice) -> Block:
        """Some rows of it."""
        each = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        tensors: dict[str, Any] = {name: value[rows] for name, value in each if isinstance(value, Tensor)}
        return dataclasses.replace(self, **tensors)

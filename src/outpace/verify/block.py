"""What goes into a rule and what comes out of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
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
class Block:
    """One iteration's drafts and scores, checked and adjusted, all on one device."""

    tokens: Tensor  # [B, g] int64, 0 where nothing was drafted
    drafted: Tensor  # [B, g] bool, i < lengths[b]
    lengths: Tensor  # [B]
    draft_logits: Tensor | None  # [B, g, V]; None: point masses
    target_logits: Tensor  # [B, g+1, V]
    draft_lse: Tensor | None  # [B, g] logsumexp of draft_logits
    seed: Tensor  # [B]
    start: Tensor  # [B] absolute position of tokens[:, 0]
    bad: Tensor  # [B] bool, rows given up already
    ragged: bool  # whether some row may have drafted fewer than g
    greedy_keep: Tensor | None = None  # [B, g] bool, drafts that greedy lenience keeps
    in_turn: bool = False  # whether logits past a lost draft may be left alone, unusable or not

    @property
    def positions(self) -> Tensor:
        """Absolute positions of the g+1 scored tokens: `[B, g+1]`."""
        return self.start[:, None] + torch.arange(self.target_logits.shape[1], device=self.start.device)

    def rows(self, rows: slice) -> Block:
        """Some rows of it."""
        tensors: dict[str, Any] = {
            name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)

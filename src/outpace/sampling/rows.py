"""Sampling parameters of rows as tensors, which a CUDA graph reads anew at every replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outpace.sampling.adjustment import argmax_only, drop_least_likely
from outpace.sampling.params import SamplingParams

IN_PROMPT = -(2**15)  # the highest bit of an entry of ``Edits.seen``; the others count
MAX_COUNT = 2**15 - 1
WORD = 32  # bits of an entry of ``Edits.allowed``
NO_SHAPE = (1.0, 0.0, -1.0, 0.0)
NO_PENALTIES = (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class RowSampling:
    """Temperature and filters of B rows.

    Attributes:
        shape: Temperature (0: greedy), top_k (0: all), 1 - top_p (-1: all) and min_p, float32 ``[B, 4]``.
        filters: Whether a row may have top-k, top-p or min-p. Otherwise only temperatures are read.
    """

    shape: Tensor
    filters: bool

    @property
    def before_argmax(self) -> RowSampling:
        """The same with the model's own distribution in greedy rows."""
        greedy = self.shape[:, 0] == 0
        columns = zip(self.shape.unbind(1), NO_SHAPE, strict=True)
        shape = torch.stack([torch.where(greedy, off, column) for column, off in columns], dim=1)
        return RowSampling(shape, self.filters)


@dataclass(frozen=True)
class Edits:
    """Changes of single logits of B rows: bias, allowed tokens and penalties.

    Attributes:
        penalties: Repetition, frequency and presence penalty, float32 ``[B, 3]``.
        bias: Added to the logits, float32 ``[B, V]``.
        allowed: Bits of the tokens that may be generated, int32 ``[B, ceil(V / 32)]``. The lowest bit of the
            first word belongs to token 0.
        seen: The tokens of each row, int16 ``[B, V]``: how often each token is in the output, plus
            ``IN_PROMPT`` if it is in the prompt.
    """

    penalties: Tensor
    bias: Tensor
    allowed: Tensor
    seen: Tensor

    @classmethod
    def none(cls, rows: int, vocab_size: int, device: torch.device, seen: Tensor | None = None) -> Edits:
        """Return edits that change nothing.

        Args:
            rows: Number of rows.
            vocab_size: Size of the vocabulary.
            device: Device of the tensors.
            seen: The tokens of each row, if other edits have them already.
        """
        return cls(
            torch.tensor(NO_PENALTIES, device=device).repeat(rows, 1),
            torch.zeros(rows, vocab_size, device=device),
            torch.full((rows, -(-vocab_size // WORD)), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, vocab_size, dtype=torch.int16, device=device) if seen is None else seen,
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [self.penalties, self.bias, self.allowed, self.seen]

    def first(self, rows: int) -> Edits:
        """Return the changes of the first rows."""
        return Edits(*(one[:rows] for one in self.tensors()))

    def count(self, tokens: Tensor, counted: Tensor) -> None:
        """Count new tokens of the output.

        Args:
            tokens: Token ids ``[B, n]``.
            counted: Whether each of them counts ``[B, n]``.
        """
        room = (self.seen.gather(1, tokens) & MAX_COUNT) < MAX_COUNT - tokens.shape[1]
        self.seen.scatter_add_(1, tokens, (counted & room).to(torch.int16))


def shape_of(one: SamplingParams, vocab_size: int) -> tuple[float, float, float, float]:
    """Return temperature and filters as ``RowSampling.shape`` and the kernels hold them."""
    k = one.top_k if one.top_k < vocab_size else 0
    temperature = max(one.temperature, 1e-30) if one.temperature else 0.0  # less is 0 in float32
    # All floats: Triton would specialize a kernel for an int of 1.
    return (float(temperature), float(k), float(1 - one.top_p) if one.top_p < 1 else -1.0, float(one.min_p))


def penalties_of(one: SamplingParams) -> tuple[float, float, float]:
    """Return penalties as ``Edits.penalties`` holds them."""
    return one.repetition_penalty, one.frequency_penalty, one.presence_penalty


def allowed_of(one: SamplingParams, vocab_size: int) -> Tensor:
    """Return a row of ``Edits.allowed``, on the CPU."""
    allowed = np.full(-(-vocab_size // WORD) * WORD, one.allowed_token_ids is None)
    allowed[list(one.allowed_token_ids or ())] = True
    return torch.from_numpy(np.packbits(allowed, bitorder="little").view("<i4"))


def seen_of(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> Tensor:
    """Return a row of ``Edits.seen``, on the CPU."""
    seen = torch.bincount(torch.tensor(output, dtype=torch.int64, device="cpu"), minlength=vocab_size)
    seen = seen.clamp(max=MAX_COUNT).to(torch.int16)
    ids = torch.tensor(prompt, dtype=torch.int64, device="cpu")
    seen[ids] |= IN_PROMPT
    return seen


def warp_rows(scores: Tensor, sampling: RowSampling) -> Tensor:
    """Apply temperature and filters as ``warp`` does, from tensors.

    Args:
        scores: Logits ``[B, n, V]``.
        sampling: Parameters of the rows.

    Returns:
        Adjusted logits, float32. Float64 remains float64. A greedy row has its argmax alone.
    """
    scores = scores if scores.dtype is torch.float64 else scores.float()
    shape = sampling.shape.to(scores.dtype)
    temperature, top_k, limit, min_p = (column[:, None, None] for column in shape.unbind(1))
    greedy = temperature == 0
    adjusted = scores / torch.where(greedy, 1.0, temperature)
    if sampling.filters:
        V = scores.shape[-1]
        kth = adjusted.sort(dim=-1, descending=True).values.gather(
            -1, (top_k.long() - 1).clamp(0, V - 1).expand(-1, scores.shape[1], 1)
        )
        adjusted = adjusted.masked_fill((adjusted < kth) & (top_k > 0), -torch.inf)
        adjusted = drop_least_likely(adjusted, limit)
        probs = adjusted.softmax(-1)
        adjusted = adjusted.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return torch.where(greedy, argmax_only(scores), adjusted)


def edit(logits: Tensor, edits: Edits, drafted: Tensor) -> Tensor:
    """Apply bias, allowed tokens and penalties as ``process`` does, from tensors.

    Args:
        logits: Logits ``[B, n, V]`` of consecutive positions.
        edits: The changes.
        drafted: Draft tokens ``[B, m]``, m >= n - 1. The last position follows all of them.

    Returns:
        Logits, float32. Float64 remains float64.
    """
    z = logits if logits.dtype is torch.float64 else logits.float()
    V = z.shape[-1]
    ids = torch.arange(V, device=z.device)
    allowed = (edits.allowed[:, ids // WORD] >> (ids % WORD)) & 1 == 1
    z = (z + edits.bias[:, None]).masked_fill(~allowed[:, None], -torch.inf)
    n, m = logits.shape[1], drafted.shape[1]
    precedes = torch.arange(m, device=drafted.device) < m - n + 1 + torch.arange(n, device=z.device)[:, None]
    counts = (edits.seen & MAX_COUNT).float()[:, None].repeat(1, n, 1)
    counts.scatter_add_(2, drafted[:, None].expand(-1, n, -1), precedes.expand(len(z), -1, -1).float())
    repetition, frequency, presence = (column[:, None, None] for column in edits.penalties.unbind(1))
    known = (counts > 0) | (edits.seen < 0)[:, None]
    z = torch.where(known, torch.where(z < 0, z * repetition, z / repetition), z)
    z = z - frequency * counts
    return torch.where(counts > 0, z - presence, z)

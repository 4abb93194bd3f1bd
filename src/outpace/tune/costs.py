"""Costs of the parts of a step with each draft, as far as there was time to measure them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from outpace.bench import cost
from outpace.bench.prediction import judging, some_row
from outpace.decoder import Decoder, WithModel
from outpace.sampling import SamplingParams

SIZES = (
    (1, 2, 3, 5, 9, 17),
    (1, 3, 9),
    (1, 5),
)  # tokens of the forward passes to time: the first list that there is time for
CHECKED = (0, 1, 4)  # draft tokens that verification is timed with, besides the maximum
ROOM = max(cost.STEP_ROOM, *cost.LENGTHS)  # tokens of a context that timing needs


@dataclass
class PrecisionCosts:
    """A target in one precision: without speculation, and with each draft.

    Attributes:
        dtype: Precision of the models.
        plain: Decoder without speculation.
        drafts: Decoder of each draft, by its name.
    """

    dtype: str
    plain: Decoder
    drafts: dict[str, Decoder] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Tokens of context before a forward pass that is timed."""
        scorers = [self.plain.scorer]
        scorers += [one.drafter.scorer for one in self.drafts.values() if isinstance(one.drafter, WithModel)]
        return min(cost.CONTEXT, min(one.context for one in scorers) - ROOM)

    def reserve(self, tokens: int) -> None:
        """Reserve the KV cache of a whole text at once; engines do so by themselves.

        A cache that grows drops the prompt, and the next decoder would have to prefill it again.

        Args:
            tokens: Tokens of the text, the prompt included.
        """
        if self.plain.engines is None:
            for decoder in self.drafts.values():
                room = min(tokens, self.plain.scorer.context) + decoder.policy.max_draft_tokens + 1
                self.plain.scorer.reserve(1, room)
                if isinstance(decoder.drafter, WithModel):
                    decoder.drafter.reserve(1, room)


class Costs:
    """Measured costs, by precision and batch size.

    Args:
        sampling: Sampling parameters that verification is timed with.

    Attributes:
        passes: Timed forward passes of the target, by precision and batch size.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self.passes: dict[tuple[str, int], list[cost.Pass]] = {}
        self._verify: dict[tuple[str, int], list[cost.Verification]] = {}
        self._drafting: dict[tuple[str, str, int], cost.Drafting] = {}

    def time(self, side: PrecisionCosts, B: int, left: float, sizes: tuple[int, ...] | None = None) -> None:
        """Time forward passes of the target, and verification.

        Args:
            side: Target and drafts in one precision.
            B: Number of sequences of a forward pass.
            left: Seconds that this may take, about; with little time, few sizes are measured.
            sizes: Tokens of each sequence to time forward passes with. By default they follow from ``left``.
        """
        if sizes is None:
            (one,) = cost.curve(side.plain, (1,), (B,), side.context)
            # A pass takes no longer than its tokens one after the other; each is timed several times.
            longest = [sum(some) * (cost.ROUNDS + 1) * one.ms / 1e3 for some in SIZES]
            fit = (some for some, taken in zip(SIZES, longest, strict=True) if taken < left)
            sizes = next(fit, SIZES[-1])
        self.passes[side.dtype, B] = cost.curve(side.plain, sizes, (B,), side.context)
        cost.let_go(side.plain)
        self.time_verification(side, B)

    def time_verification(self, side: PrecisionCosts, B: int) -> None:
        """Time verification of several numbers of draft tokens, as each draft needs it."""
        most = max(one.n for one in self.passes[side.dtype, B])
        drafts = sorted({g for g in (*CHECKED, most - 1) if g < most})
        self._verify[side.dtype, B] = [
            one
            for drawn in sorted({cost.draws(decoder, self._sampling) for decoder in side.drafts.values()})
            for one in cost.verification(side.plain, drafts, (B,), self._sampling, drawn)
        ]

    def time_step(self, side: PrecisionCosts, name: str, B: int = 1) -> None:
        """Time the draft steps of one draft."""
        decoder = side.drafts[name]
        self._drafting[side.dtype, name, B] = cost.drafting(decoder, B, side.context)
        cost.let_go(decoder)

    def steps(self, dtype: str) -> float:
        """Return the time of one step of every draft together, relative to a target pass over one token."""
        taken = sum(one.step for (kind, _, B), one in self._drafting.items() if (kind, B) == (dtype, 1))
        return taken / 1e3 / self.plain(dtype)

    def knows(self, dtype: str, name: str, B: int = 1) -> bool:
        """Return whether both the target and a draft were timed with this batch size."""
        return (dtype, B) in self.passes and (dtype, name, B) in self._drafting

    def plain(self, dtype: str, B: int = 1) -> float:
        """Return the seconds of the target's forward pass over one token."""
        return min(one.ms for one in self.passes[dtype, B] if one.n == 1) / 1e3

    def longest(self, dtype: str, sizes: Sequence[int]) -> float:
        """Return an upper bound of the seconds of forward passes over these numbers of tokens, together.

        A forward pass takes no longer than one over more tokens, or than shorter ones one after the other.
        """
        known = self.passes[dtype, 1]
        return sum(min(one.ms * max(1, math.ceil(n / one.n)) for one in known) for n in sizes) / 1e3

    def iterations(self, side: PrecisionCosts, name: str, alpha: float, B: int = 1) -> list[float]:
        """Return the seconds of a step with g = 0, 1, ... draft tokens.

        Args:
            side: Target and drafts in one precision.
            name: Name of the draft.
            alpha: Acceptance rate, which says how often all draft tokens of the step before were accepted.
            B: Number of sequences of a step.
        """
        drawn = cost.draws(side.drafts[name], self._sampling)
        verify = [one for one in self._verify[side.dtype, B] if one.drawn == drawn]
        taken = judging(B, self.passes[side.dtype, B], verify)
        g = np.arange(len(taken))
        taken = taken + self._drafting[side.dtype, name, B].taken(g, some_row(alpha**g, B))
        return [float(ms) / 1e3 for ms in taken]

    def found(self) -> Mapping[str, Any]:
        """Return all costs, for the results file."""
        steps = [
            {
                "dtype": d,
                "draft": name,
                "B": B,
                "ms": one.step,
                "start_ms": one.start,
                "behind_ms": one.behind,
            }
            for (d, name, B), one in self._drafting.items()
        ]
        passes = [{"dtype": d, **asdict(one)} for (d, _), some in self.passes.items() for one in some]
        return {"passes": passes, "steps": steps}

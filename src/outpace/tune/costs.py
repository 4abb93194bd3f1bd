"""What iterations take with each draft, as far as there was time to find out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from outpace.bench import cost
from outpace.bench.prediction import judging, some_row
from outpace.decode import Decoder, WithModel
from outpace.sampling import Sampling

SIZES = (
    (1, 2, 3, 5, 9, 17),
    (1, 3, 9),
    (1, 5),
)  # tokens of passes that are timed: as many as there is time for
CHECKED = (0, 1, 4)  # guesses that verification is timed with, beside the most
ROOM = max(cost.STEP_ROOM, *cost.LENGTHS)  # tokens that a context must leave for what is timed


@dataclass
class Side:
    """A target in one precision: alone, and with each draft."""

    dtype: str
    plain: Decoder
    drafts: dict[str, Decoder] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Tokens before a pass that is timed."""
        scorers = [self.plain.scorer]
        scorers += [one.drafter.scorer for one in self.drafts.values() if isinstance(one.drafter, WithModel)]
        return min(cost.CONTEXT, min(one.context for one in scorers) - ROOM)

    def reserve(self, tokens: int) -> None:
        """Room for a text of so many at once: a cache that grows forgets the prompt, which the next way of
        writing would have to read again. Engines see to it themselves."""
        if self.plain._engines is None:
            for decoder in self.drafts.values():
                room = min(tokens, self.plain.scorer.context) + decoder.length.most + 1
                self.plain.scorer.reserve(1, room)
                if isinstance(decoder.drafter, WithModel):
                    decoder.drafter.reserve(1, room)


class Costs:
    """Of sides, by precision, and of rows at a time."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self.passes: dict[tuple[str, int], list[cost.Pass]] = {}
        self._verify: dict[tuple[str, int], list[cost.Verification]] = {}
        self._drafting: dict[tuple[str, str, int], cost.Drafting] = {}

    def time(self, side: Side, B: int, left: float, sizes: tuple[int, ...] | None = None) -> None:
        """The target's passes and verification, in about so many seconds: few sizes if there are few."""
        if sizes is None:
            (one,) = cost.curve(side.plain, (1,), (B,), side.context)
            # None takes longer than its tokens one after the other; each is timed several times.
            longest = [sum(some) * (cost.ROUNDS + 1) * one.ms / 1e3 for some in SIZES]
            fit = (some for some, taken in zip(SIZES, longest, strict=True) if taken < left)
            sizes = next(fit, SIZES[-1])
        self.passes[side.dtype, B] = cost.curve(side.plain, sizes, (B,), side.context)
        cost.let_go(side.plain)
        self.time_verification(side, B)

    def time_verification(self, side: Side, B: int) -> None:
        most = max(one.n for one in self.passes[side.dtype, B])
        drafts = sorted({g for g in (*CHECKED, most - 1) if g < most})
        self._verify[side.dtype, B] = [
            one
            for drawn in sorted({cost.draws(decoder, self._sampling) for decoder in side.drafts.values()})
            for one in cost.verification(side.plain, drafts, (B,), self._sampling, drawn)
        ]

    def time_step(self, side: Side, name: str, B: int = 1) -> None:
        decoder = side.drafts[name]
        self._drafting[side.dtype, name, B] = cost.drafting(decoder, B, side.context)
        cost.let_go(decoder)

    def steps(self, dtype: str) -> float:
        """One of each draft, of a target's pass."""
        taken = sum(one.step for (kind, _, B), one in self._drafting.items() if (kind, B) == (dtype, 1))
        return taken / 1e3 / self.plain(dtype)

    def knows(self, dtype: str, name: str, B: int = 1) -> bool:
        return (dtype, B) in self.passes and (dtype, name, B) in self._drafting

    def plain(self, dtype: str, B: int = 1) -> float:
        """Seconds of the target's pass over a token."""
        return min(one.ms for one in self.passes[dtype, B] if one.n == 1) / 1e3

    def longest(self, dtype: str, sizes: Sequence[int]) -> float:
        """Seconds that passes over so many tokens of a row take together, at most: none takes longer than one
        over more tokens, or than shorter ones after each other."""
        known = self.passes[dtype, 1]
        return sum(min(one.ms * max(1, math.ceil(n / one.n)) for one in known) for n in sizes) / 1e3

    def iterations(self, side: Side, name: str, alpha: float, B: int = 1) -> list[float]:
        """Seconds of those with g = 0, 1, ... guesses, of which such a share is kept."""
        drawn = cost.draws(side.drafts[name], self._sampling)
        verify = [one for one in self._verify[side.dtype, B] if one.drawn == drawn]
        taken = judging(B, self.passes[side.dtype, B], verify)
        g = np.arange(len(taken))
        taken = taken + self._drafting[side.dtype, name, B].taken(g, some_row(alpha**g, B))
        return [float(ms) / 1e3 for ms in taken]

    def found(self) -> Mapping[str, Any]:
        """To be written down."""
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

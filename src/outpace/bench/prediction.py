"""How far to guess, and how much faster that is, by what was measured: α, how often there is a guess at all,
and what each part of an iteration takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outpace import theory
from outpace.bench.cost import Drafting, Pass, Verification


@dataclass(frozen=True)
class Best:
    """The fastest g and its speed over plain decoding; 0, and 1, where no draft pays.

    interval  the speed at the ends of α's interval, if it has one; where no draft pays, that of the g which
              would be fastest at the upper end
    """

    B: int
    drafting: Drafting
    g: int
    speedup: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Parts:
    """What an iteration of B rows consists of, in milliseconds: drafts, passes, verification."""

    B: int
    drafting: Drafting
    passes: Sequence[Pass]
    verify: Sequence[Verification]

    def best(self, alpha: float, coverage: float = 1.0, interval: tuple[float, float] | None = None) -> Best:
        """The best of all lengths that passes of B rows were timed for; interval is that of α."""
        speeds = self.speedups(alpha, coverage).round(4)
        g = int(np.argmax(speeds))
        between = None
        if interval is not None:
            ends = [self.speedups(end, coverage).round(4) for end in interval]
            shown = g or int(np.argmax(ends[1]))
            low, high = sorted(float(one[shown]) for one in ends)
            between = low, high
        return Best(self.B, self.drafting, g, float(speeds[g]), between)

    def speedups(self, alpha: float, coverage: float = 1.0) -> theory.Found:
        """Over plain decoding, for g = 0, 1, ... as far as passes were timed; between sizes they are
        interpolated.

        coverage is how often the drafter has a guess for a row. Where it has none for any of them, an
        iteration is a plain one.
        """
        taken = judging(self.B, self.passes, self.verify)
        g = np.arange(len(taken))
        tokens = coverage * theory.expected_tokens(alpha, g) + 1 - coverage
        guessing = some_row(coverage, self.B)  # a pass is as wide for all rows
        mean = guessing * taken + (1 - guessing) * taken[0]
        drafting = self.drafting.taken(g, some_row(coverage * np.power(alpha, g), self.B))
        return theory.measured_speedup(tokens, g, 0.0, mean + drafting, taken[0])

    def speedup(self, alpha: float, drafted: Counter[int]) -> float:
        """Over plain decoding, if rows have so many guesses so often. A pass is as wide as the longest."""
        taken = judging(self.B, self.passes, self.verify)
        rows = drafted.total()
        kept = sum(n * alpha**g for g, n in drafted.items() if g) / rows
        taken = taken + self.drafting.taken(np.arange(len(taken)), some_row(kept, self.B))
        tokens = sum(n * theory.expected_tokens(alpha, g) for g, n in drafted.items()) / rows
        below = np.cumsum([drafted[g] for g in range(len(taken))]) / rows
        return float(tokens * taken[0] / (np.diff(below**self.B, prepend=0.0) @ taken))


def some_row(chance: npt.ArrayLike, B: int) -> npt.NDArray[np.float64]:
    """How likely one of B rows is to have what each has with this chance: all of them wait for it."""
    return 1 - (1 - np.asarray(chance, dtype=np.float64)) ** B


def judging(B: int, passes: Sequence[Pass], verify: Sequence[Verification]) -> theory.Found:
    """Milliseconds of a pass and of verification, for g = 0, 1, ... as far as passes of B rows were timed."""
    timed = dict(sorted((one.n, one.ms) for one in passes if one.B == B))
    checks = dict(sorted((one.g, one.ms) for one in verify if one.B == B))
    if 1 not in timed:
        raise ValueError(f"passes: there must be one over a single token of B = {B} rows to compare with")
    g = np.arange(max(timed))
    taken = np.interp(g + 1, list(timed), list(timed.values()))
    if checks:
        taken = taken + np.interp(g, list(checks), list(checks.values()))
    return taken

"""Best draft length and its speedup, predicted from measurements.

They are α, how often there is a draft token at all, and the time of each part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outpace.bench import theory
from outpace.bench.cost import Drafting, Pass, Verification


@dataclass(frozen=True)
class Best:
    """The fastest g and its speedup over the baseline; 0 and 1 where no draft pays.

    Attributes:
        B: Number of sequences.
        drafting: Times of the drafter.
        g: Number of draft tokens.
        speedup: Speedup over decoding without speculation.
        interval: Speedup at the ends of α's interval, if it has one. Where no draft pays, it is that of the g
            which would be fastest at the upper end.
    """

    B: int
    drafting: Drafting
    g: int
    speedup: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Parts:
    """Milliseconds of the parts of a step of B sequences: drafting, forward passes, verification."""

    B: int
    drafting: Drafting
    passes: Sequence[Pass]
    verify: Sequence[Verification]

    def best(self, alpha: float, coverage: float = 1.0, interval: tuple[float, float] | None = None) -> Best:
        """Return the best of all draft lengths that forward passes of B sequences were timed for.

        Args:
            alpha: Acceptance rate.
            coverage: How often the drafter has a draft token for a sequence.
            interval: Confidence interval of α.
        """
        speeds = self.speedups(alpha, coverage).round(4)
        g = int(np.argmax(speeds))
        between = None
        if interval is not None:
            ends = [self.speedups(end, coverage).round(4) for end in interval]
            reported = g or int(np.argmax(ends[1]))
            low, high = sorted(float(one[reported]) for one in ends)
            between = low, high
        return Best(self.B, self.drafting, g, float(speeds[g]), between)

    def speedups(self, alpha: float, coverage: float = 1.0) -> theory.Found:
        """Return speedups over the baseline for g = 0, 1, ... as far as forward passes were timed.

        Between the sizes, times are interpolated. A step in which the drafter has no draft token for any
        sequence is a step without speculation.

        Args:
            alpha: Acceptance rate.
            coverage: How often the drafter has a draft token for a sequence.
        """
        ms = target_ms(self.B, self.passes, self.verify)
        g = np.arange(len(ms))
        tokens = coverage * theory.expected_tokens(alpha, g) + 1 - coverage
        any_draft = any_sequence(coverage, self.B)  # a forward pass has the same tokens for all sequences
        mean = any_draft * ms + (1 - any_draft) * ms[0]
        drafting = self.drafting.milliseconds(g, any_sequence(coverage * np.power(alpha, g), self.B))
        return theory.measured_speedup(tokens, g, 0.0, mean + drafting, ms[0])

    def speedup(self, alpha: float, drafted: Counter[int]) -> float:
        """Return the speedup over the baseline for counted numbers of draft tokens.

        A forward pass is as wide as the longest draft.

        Args:
            alpha: Acceptance rate.
            drafted: How often a sequence had each number of draft tokens.
        """
        ms = target_ms(self.B, self.passes, self.verify)
        steps = drafted.total()
        all_accepted = sum(n * alpha**g for g, n in drafted.items() if g) / steps
        ms = ms + self.drafting.milliseconds(np.arange(len(ms)), any_sequence(all_accepted, self.B))
        tokens = sum(n * theory.expected_tokens(alpha, g) for g, n in drafted.items()) / steps
        at_most = np.cumsum([drafted[g] for g in range(len(ms))]) / steps
        return float(tokens * ms[0] / (np.diff(at_most**self.B, prepend=0.0) @ ms))


def any_sequence(chance: npt.ArrayLike, B: int) -> npt.NDArray[np.float64]:
    """Return the probability that at least one of B independent sequences has an event.

    Each of them has it with probability ``chance``. All sequences of a step wait for the slowest.
    """
    return 1 - (1 - np.asarray(chance, dtype=np.float64)) ** B


def target_ms(B: int, passes: Sequence[Pass], verify: Sequence[Verification]) -> theory.Found:
    """Return milliseconds of the target's forward pass with its verification, for g = 0, 1, ...

    The largest g is that of the longest timed forward pass of B sequences.

    Raises:
        ValueError: No forward pass over a single token was timed.
    """
    timed = dict(sorted((one.n, one.ms) for one in passes if one.B == B))
    checks = dict(sorted((one.g, one.ms) for one in verify if one.B == B))
    if 1 not in timed:
        raise ValueError(f"passes: there must be one over a single token of B = {B} sequences")
    g = np.arange(max(timed))
    ms = np.interp(g + 1, list(timed), list(timed.values()))
    if checks:
        ms = ms + np.interp(g, list(checks), list(checks.values()))
    return ms

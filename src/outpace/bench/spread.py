"""How far measurements lie apart, and how sure a ratio of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000  # of a bootstrap
SURE = 95  # per cent that an interval is to hold


@dataclass(frozen=True)
class Spread:
    """Of some values; percentiles lie on straight lines between them."""

    mean: float
    p50: float
    p90: float
    p99: float
    deviation: float  # of what they are a sample of; 0 for a single one

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not len(values):
            raise ValueError("values: there are none")
        found = np.asarray(values, float)
        p50, p90, p99 = np.percentile(found, (50, 90, 99))
        deviation = found.std(ddof=1) if len(found) > 1 else 0.0
        return cls(float(found.mean()), float(p50), float(p90), float(p99), float(deviation))


Rate = tuple[float, float]
"""Tokens, and seconds that they took."""


def faster(
    ours: Sequence[Rate], theirs: Sequence[Rate], draws: int = DRAWS, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """How many times as many tokens a second, of things measured in pairs; and an interval for it.

    Sums are divided, so that long texts count for more. What belongs together stays together: pairs are drawn
    anew, with replacement and a fixed seed. A single pair has no interval.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"ours: got {len(ours)} rates, and theirs {len(theirs)}; they must be pairs")
    pairs = np.concatenate((np.asarray(ours, float), np.asarray(theirs, float)), axis=1)  # [n, 4]
    value = float(_quotient(pairs.sum(0)))
    if len(pairs) == 1:
        return value, None
    drawn = np.random.default_rng(seed).integers(len(pairs), size=(draws, len(pairs)))
    ratios = _quotient(pairs[drawn].sum(1).T)
    low, high = np.percentile(ratios, ((100 - SURE) / 2, (100 + SURE) / 2))
    return value, (float(low), float(high))


def _quotient(sums: np.ndarray) -> np.ndarray:
    """`[4, ...]`: our tokens and seconds, their tokens and seconds."""
    found: np.ndarray = (sums[0] / sums[1]) / (sums[2] / sums[3])
    return found

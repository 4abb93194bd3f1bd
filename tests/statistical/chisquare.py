"""Pearson's χ² with a stated false-alarm rate.

Every statistical assertion of the suite goes through `agrees`, which counts itself. One assertion raises a
false alarm with probability ALARM, by the χ² approximation. Bins are merged until each expects at least m
draws, which bounds the error of that approximation: a count that expects m has skewness 1/√m, and the first
Edgeworth term changes a tail at z standard deviations by exp(±z³/(6√m)). At ALARM, z = 6.1, so by a factor of
at most exp(1.2) < 4 with m = 1000 = MANY, and exp(3.9) < 50 with m = 100 = SOME, for draws that cost a whole
decoder. Over the suite the bound is `false_alarm_rate()`; conftest.py prints it and fails the run if it
exceeds MOST.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from outpace.auditing.pearson import p_value

ALARM = 1e-9
MANY, SOME = 1000, 100
MARGIN = {MANY: 4.0, SOME: 50.0}
MOST = 1e-4


@dataclass
class _Tally:
    assertions: int = 0
    rate: float = 0.0


_tally = _Tally()


def assertions() -> int:
    return _tally.assertions


def false_alarm_rate() -> float:
    """Bound on the probability that a correct program fails the suite's statistical assertions so far."""
    return _tally.rate


def count(assertions: int = 0, rate: float = 0.0) -> None:
    """Add assertions, of this process or of another that runs a part of the suite."""
    _tally.assertions += assertions
    _tally.rate += rate


def agrees(counts: npt.ArrayLike, probabilities: npt.ArrayLike, what: str, expected: int = MANY) -> None:
    """Assert that the counts are draws from the probabilities."""
    count(1, ALARM * MARGIN[expected])
    p = p_value(counts, probabilities, expected)
    assert p >= ALARM, f"{what}: χ² p-value {p:.3g} is below {ALARM:g}"

"""Pearson's χ² with a stated false-alarm rate.

Every statistical assertion of the suite goes through `agrees`, which counts itself. One assertion raises a
false alarm with probability ALARM, by the χ² approximation. Bins are merged until each expects at least
EXPECTED draws, which bounds the error of that approximation: a count that expects m has skewness 1/√m, and
the first Edgeworth term changes a tail at z standard deviations by exp(±z³/(6√m)). At ALARM, z = 6.1, so with
m = 1000 by a factor of at most exp(1.2) < 4 = MARGIN. Over the suite the bound is `false_alarm_rate()`;
conftest.py prints it and fails the run if it exceeds MOST.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

ALARM = 1e-9
EXPECTED = 1000.0
MARGIN = 4.0
MOST = 1e-4

Floats = npt.NDArray[np.float64]


@dataclass
class _Tally:
    assertions: int = 0


_tally = _Tally()


def assertions() -> int:
    return _tally.assertions


def false_alarm_rate() -> float:
    """Bound on the probability that a correct program fails the suite's statistical assertions so far."""
    return _tally.assertions * ALARM * MARGIN


def p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """P(a χ² at least this large) for `counts` of independent draws from `probabilities`.

    Counts and probabilities may have several rows, one per group of draws, each row a distribution of its
    own. A draw of probability 0 gives p = 0.
    """
    observed = np.atleast_2d(np.asarray(counts, dtype=np.float64))
    expected = np.atleast_2d(np.asarray(probabilities, dtype=np.float64)) * observed.sum(1, keepdims=True)
    if not np.allclose(expected.sum(1), observed.sum(1), rtol=1e-6):
        raise ValueError("probabilities do not sum to 1")
    if (observed[expected == 0] > 0).any():
        return 0.0
    statistic, freedom = 0.0, 0
    for seen, hoped in zip(observed, expected, strict=True):
        seen, hoped = _merge(seen, hoped)
        statistic += float(((seen - hoped) ** 2 / hoped).sum())
        freedom += len(hoped) - 1
    if freedom == 0:
        if (np.count_nonzero(expected, axis=1) > 1).any():
            raise ValueError("too few draws: every bin was merged into one, so nothing was tested")
        return 1.0  # a single outcome is possible, and nothing else was seen
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _merge(seen: Floats, hoped: Floats) -> tuple[Floats, Floats]:
    """Join the rarest bins until every one of them expects at least EXPECTED draws."""
    order = np.argsort(hoped)
    seen, hoped = seen[order], hoped[order]
    rare = int(np.searchsorted(hoped, EXPECTED))
    while 0 < rare < len(hoped) and hoped[:rare].sum() < EXPECTED:
        rare += 1
    if rare < 2:
        return seen[hoped > 0], hoped[hoped > 0]
    return np.append(seen[rare:], seen[:rare].sum()), np.append(hoped[rare:], hoped[:rare].sum())


def agrees(counts: npt.ArrayLike, probabilities: npt.ArrayLike, what: str) -> None:
    """Assert that the counts are draws from the probabilities."""
    _tally.assertions += 1
    p = p_value(counts, probabilities)
    assert p >= ALARM, f"{what}: χ² p-value {p:.3g} is below {ALARM:g}"

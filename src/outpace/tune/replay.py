"""How long texts would have taken to write with guesses, by how likely each of them was to be kept.

One α for all tokens would say too little of drafts that are right for long stretches and wrong for others,
as copies are. So a text is written once more, in expectation: an iteration that begins at a token keeps r
guesses with probability β·β···(1 − β), and the next one begins behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.bench.estimate import Floats
from outpace.bench.spread import faster
from outpace.tune.way import Interval

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
Speed = tuple[float, Interval | None]


class Replay:
    """Of texts by β at their tokens, which is NaN where the draft had no guess.

    iterations  seconds with g = 0, 1, ... guesses
    yardstick   seconds of an iteration without any, that speeds are told over
    """

    def __init__(self, texts: Sequence[Floats], iterations: Sequence[float], yardstick: float) -> None:
        self.lengths = [0, *(g for g in LENGTHS if g < len(iterations))]
        self._tokens = [len(beta) for beta in texts]
        self._plain = [(n, n * yardstick) for n in self._tokens]
        self.times = np.array(  # [texts, lengths]
            [[seconds(beta, g, iterations[g], iterations[0]) for g in self.lengths] for beta in texts]
        )

    def fixed(self, g: int) -> Speed:
        return self._speed(self.times[:, self.lengths.index(g)])

    def best(self) -> int:
        """The fixed length, but for 0, that is fastest."""
        return self.lengths[1 + int(self.times[:, 1:].sum(0).argmin())]

    def chosen(self) -> Speed:
        """If the best length was known for each text, 0 too: what a policy may come close to."""
        return self._speed(self.times.min(1))

    def _speed(self, times: Floats) -> Speed:
        return faster(list(zip(self._tokens, times.tolist(), strict=True)), self._plain)


def seconds(beta: Floats, g: int, iteration: float, plain: float) -> float:
    """Expected, of one text. Where there is no guess an iteration is a plain one."""
    n, kept, silent = len(beta), np.nan_to_num(beta).tolist(), np.isnan(beta).tolist()
    after = [0.0] * (n + g + 2)  # what the rest of the text takes, from each token on
    for i in reversed(range(n)):
        if silent[i] or g == 0:
            after[i] = plain + after[i + 1]
            continue
        chance, total = 1.0, iteration
        for r in range(min(g, n - i)):
            total += chance * (1 - kept[i + r]) * after[i + r + 1]
            chance *= kept[i + r]
        after[i] = total + chance * after[i + g + 1]
    return after[0]

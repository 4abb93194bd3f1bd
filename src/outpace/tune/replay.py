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
    B           rows at a time: an iteration is a plain one where none of them has a guess
    """

    def __init__(
        self, texts: Sequence[Floats], iterations: Sequence[float], yardstick: float, B: int = 1
    ) -> None:
        self.lengths = [0, *(g for g in LENGTHS if g < len(iterations))]
        self._tokens = [len(beta) for beta in texts]
        self._plain = [(n, n * yardstick) for n in self._tokens]
        every = np.concatenate([np.zeros(0), *texts])
        others = 1 - np.isnan(every).mean() ** (B - 1) if every.size else 0.0  # that one of them has a guess
        silent = [iterations[0] + others * (one - iterations[0]) for one in iterations]
        self.times = np.array(  # [texts, lengths]
            [[seconds(beta, g, iterations[g], silent[g]) for g in self.lengths] for beta in texts]
        )

    def fixed(self, g: int) -> Speed:
        return self._speed(self.times[:, self.lengths.index(g)])

    def best(self) -> int:
        """The fixed length, but for 0, that is fastest."""
        return self.lengths[1 + int(self.times[:, 1:].sum(0).argmin())]

    def chosen(self) -> Speed:
        """If the best length was known for each text, 0 too: no policy of one length a text does better."""
        return self._speed(self.times.min(1))

    def _speed(self, times: Floats) -> Speed:
        return faster(list(zip(self._tokens, times.tolist(), strict=True)), self._plain)


def seconds(beta: Floats, g: int, iteration: float, silent: float) -> float:
    """Expected, of one text. Where there is no guess an iteration takes as long as a silent one."""
    n, kept, nothing = len(beta), np.nan_to_num(beta).tolist(), np.isnan(beta).tolist()
    after = [0.0] * (n + g + 2)  # what the rest of the text takes, from each token on
    for i in reversed(range(n)):
        if nothing[i] or g == 0:
            after[i] = silent + after[i + 1]
            continue
        chance, total = 1.0, iteration
        for r in range(min(g, n - i)):
            total += chance * (1 - kept[i + r]) * after[i + r + 1]
            chance *= kept[i + r]
        after[i] = total + chance * after[i + g + 1]
    return after[0]

"""Expected time of texts with speculation, by the acceptance probability β at each token.

A draft such as prompt lookup is right for long stretches and wrong for others. One α for all tokens would say
too little about it. So a text is decoded once more, in expectation. A step that starts at a token accepts r
draft tokens with probability β·β···(1 − β). The next step starts behind them.
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
    """Texts decoded once more, in expectation.

    Args:
        texts: β at each token of each text; NaN where the draft proposed nothing.
        iterations: Seconds of a step with g = 0, 1, ... draft tokens.
        yardstick: Seconds of a step without speculation, which speeds are relative to.
        B: Number of sequences of a step. A step has no speculation if none of them has a draft token.

    Attributes:
        lengths: Numbers of draft tokens, 0 among them.
        times: Expected seconds, ``[texts, lengths]``.
    """

    def __init__(
        self, texts: Sequence[Floats], iterations: Sequence[float], yardstick: float, B: int = 1
    ) -> None:
        self.lengths = [0, *(g for g in LENGTHS if g < len(iterations))]
        self._tokens = [len(beta) for beta in texts]
        self._plain = [(n, n * yardstick) for n in self._tokens]
        every = np.concatenate([np.zeros(0), *texts])
        others = 1 - np.isnan(every).mean() ** (B - 1) if every.size else 0.0  # P(another sequence drafts)
        silent = [iterations[0] + others * (one - iterations[0]) for one in iterations]
        self.times = np.array(  # [texts, lengths]
            [[seconds(beta, g, iterations[g], silent[g]) for g in self.lengths] for beta in texts]
        )

    def fixed(self, g: int) -> Speed:
        """Return the speed with g draft tokens per step."""
        return self._speed(self.times[:, self.lengths.index(g)])

    def best(self) -> int:
        """Return the fastest fixed number of draft tokens above 0."""
        return self.lengths[1 + int(self.times[:, 1:].sum(0).argmin())]

    def chosen(self) -> Speed:
        """Return the speed if the best number of draft tokens, 0 included, was known for each text.

        No policy with a single number per text does better.
        """
        return self._speed(self.times.min(1))

    def _speed(self, times: Floats) -> Speed:
        return faster(list(zip(self._tokens, times.tolist(), strict=True)), self._plain)


def seconds(beta: Floats, g: int, iteration: float, silent: float) -> float:
    """Return the expected seconds of one text.

    Args:
        beta: Acceptance probability at each token; NaN where the draft proposed nothing.
        g: Number of draft tokens per step.
        iteration: Seconds of a step with draft tokens.
        silent: Seconds of a step where the draft proposed nothing.
    """
    n, kept, nothing = len(beta), np.nan_to_num(beta).tolist(), np.isnan(beta).tolist()
    after = [0.0] * (n + g + 2)  # seconds of the rest of the text, from each token on
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

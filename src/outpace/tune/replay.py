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
from outpace.tune.candidate import Interval

NUM_DRAFT_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
ExpectedSpeedup = tuple[float, Interval | None]


class Replay:
    """Texts decoded once more, in expectation.

    Args:
        texts: β at each token of each text; NaN where the draft proposed nothing.
        step_seconds: Seconds of a step with g = 0, 1, ... draft tokens.
        baseline_seconds: Seconds of a step without speculation, which speedups are relative to.
        B: Number of sequences of a step. A step has no speculation if none of them has a draft token.

    Attributes:
        num_draft_tokens: Numbers of draft tokens, 0 among them.
        times: Expected seconds, ``[texts, num_draft_tokens]``.
    """

    def __init__(
        self, texts: Sequence[Floats], step_seconds: Sequence[float], baseline_seconds: float, B: int = 1
    ) -> None:
        self.num_draft_tokens = [0, *(g for g in NUM_DRAFT_TOKENS if g < len(step_seconds))]
        self._tokens = [len(beta) for beta in texts]
        self._baseline = [(n, n * baseline_seconds) for n in self._tokens]
        every = np.concatenate([np.zeros(0), *texts])
        # The probability that another sequence of the batch has draft tokens.
        others_draft = 1 - np.isnan(every).mean() ** (B - 1) if every.size else 0.0
        undrafted = [step_seconds[0] + others_draft * (one - step_seconds[0]) for one in step_seconds]
        self.times = np.array(  # [texts, num_draft_tokens]
            [
                [expected_seconds(beta, g, step_seconds[g], undrafted[g]) for g in self.num_draft_tokens]
                for beta in texts
            ]
        )

    def fixed(self, g: int) -> ExpectedSpeedup:
        """Return the speedup with g draft tokens per step."""
        return self._speedup(self.times[:, self.num_draft_tokens.index(g)])

    def best(self) -> int:
        """Return the fastest fixed number of draft tokens above 0."""
        return self.num_draft_tokens[1 + int(self.times[:, 1:].sum(0).argmin())]

    def best_per_text(self) -> ExpectedSpeedup:
        """Return the speedup if each text had its best number of draft tokens, which may be 0.

        No policy with a single number per text does better.
        """
        return self._speedup(self.times.min(1))

    def _speedup(self, times: Floats) -> ExpectedSpeedup:
        return faster(list(zip(self._tokens, times.tolist(), strict=True)), self._baseline)


def expected_seconds(beta: Floats, g: int, step_seconds: float, undrafted_seconds: float) -> float:
    """Return the expected seconds of one text.

    Args:
        beta: Acceptance probability at each token; NaN where the draft proposed nothing.
        g: Number of draft tokens per step.
        step_seconds: Seconds of a step with draft tokens.
        undrafted_seconds: Seconds of a step in which the draft proposed nothing.
    """
    n, accepted, undrafted = len(beta), np.nan_to_num(beta).tolist(), np.isnan(beta).tolist()
    after = [0.0] * (n + g + 2)  # seconds of the rest of the text, from each token on
    for i in reversed(range(n)):
        if undrafted[i] or g == 0:
            after[i] = undrafted_seconds + after[i + 1]
            continue
        probability, total = 1.0, step_seconds
        for r in range(min(g, n - i)):
            total += probability * (1 - accepted[i + r]) * after[i + r + 1]
            probability *= accepted[i + r]
        after[i] = total + probability * after[i + g + 1]
    return after[0]

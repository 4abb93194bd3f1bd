"""A world without models: rows whose guesses are kept with a known probability, and passes of known cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.policy import DraftLengthPolicy, Load, StepOutcome

Cost = Callable[[int, int], float]  # seconds of a pass over a batch, and g


def flat(batch: int, g: int) -> float:
    """As on a GPU: more tokens cost next to nothing."""
    return 1.0 + 0.01 * g * math.sqrt(batch)


def steep(batch: int, g: int) -> float:
    """As on a small CPU: a second token doubles the cost, some more are nearly free."""
    tokens = batch * (g + 1)
    return 1.0 if tokens == 1 else 2.0 + 0.06 * tokens + 0.12 * max(0, tokens - 8)


@dataclass
class World:
    """Goes by its own clock.

    alpha   probability that a guess is kept, by iteration and row
    step    seconds of a drafter's step
    miss    seconds of reading a token that it has not read
    free    of those tokens, as many as are read in a step as one is
    prompt  tokens of texts before they begin
    stalls  times as long that some iterations take, by their number
    slope   share by which passes take longer for each token of a text
    making  seconds in which a length is made ready when it is first wanted; they are not counted
    made    lengths that are ready, and when that was
    ahead   choices that are made before an outcome is known, as where a device works while the host thinks
    """

    alpha: Callable[[int, int], float]
    cost: Cost
    rows: int = 1
    step: float = 0.0
    miss: float = 0.0
    free: int = 0
    noise: float = 0.05
    seed: int = 0
    prompt: int = 0
    stalls: Mapping[int, float] = field(default_factory=dict)
    slope: float = 0.0
    making: float = 0.0
    made: dict[int, int] = field(default_factory=dict)
    ahead: int = 0
    seconds: float = 0.0
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)

    def run(self, policy: DraftLengthPolicy, iterations: int) -> World:
        """A text in each row; the policy may know of earlier ones."""
        draw, other = (np.random.default_rng([self.seed, len(self.lengths), *also]) for also in ([], [1]))
        slots: Sequence[int] = range(self.rows)
        policy.reset(slots)
        unread, context = self.prompt * self.rows, self.prompt + 1
        outcomes: list[StepOutcome] = []
        for _ in range(iterations):
            ready = frozenset(self.made) if self.making else None
            t, load = len(self.lengths), Load(self.rows, context, unread, ready)
            chosen = policy.choose(slots, load=load)
            g = max(chosen)
            kept = []
            for row, length in zip(slots, chosen, strict=True):
                lost = np.flatnonzero(draw.random(length) >= self.alpha(t, row))
                kept.append(int(lost[0]) if len(lost) else length)
            draft = (g * self.step + max(0, unread - self.free) * self.miss) if g else 0.0
            usual = self.cost(self.rows, g) * (1 + self.slope * context)
            stall = self.stalls.get(t, 1.0)
            drafting = draft * stall * (1 + self.noise * other.standard_normal())
            whole = drafting + usual * stall * (1 + self.noise * draw.standard_normal())
            if self.making and g not in self.made:
                self.made[g] = t
                outcomes.append(StepOutcome(slots, chosen, kept, g, load, None, making=self.making))
            else:
                outcomes.append(StepOutcome(slots, chosen, kept, g, load, whole, drafting, g))
            if len(outcomes) > self.ahead:
                policy.observe(outcomes.pop(0))
            unread = 0 if g else unread + self.rows
            context += max(kept) + 1
            self.seconds += draft + usual
            self.tokens += sum(kept) + self.rows
            self.lengths.append(g)
        return self

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

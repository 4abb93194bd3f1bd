"""Cost model: the seconds of a step by its number of draft tokens, measured while steps run."""

from __future__ import annotations

import math

import numpy as np

from outpace.policy.config import GoodputConfig

SHORTEST = 1e-9  # seconds; shorter measurements count as this
TOKENS_OF_PRIOR = 16  # times G: weight of the assumed duration of a catch-up, in tokens


class StepCosts:
    """Seconds of steps in one executor, with batches of similar size.

    The seconds of a step with g draft tokens are ``exp(speed + relative[g])``. The speed changes with the
    context and with other work on the machine. It is the same for every g, so that each measurement updates
    all of them. The longer a g was not measured, the more of a difference is its own.

    Args:
        max_draft_tokens: Largest number of draft tokens G.
        config: Settings of the policy.

    Attributes:
        measured: Values of g that were measured more than once, in order. A single time may be an outlier.
        missed: Baseline steps that each uncaptured g would have saved since the last capture.
    """

    def __init__(self, max_draft_tokens: int, config: GoodputConfig) -> None:
        self._config, self._every_g = config, np.arange(max_draft_tokens + 1)
        self._passes = 0  # measured steps, those with surprising times counted several times
        self.measured: list[int] = []
        self.missed: dict[int, float] = {}
        self._speed, self._relative = 0.0, dict[int, float]()
        self._count: dict[int, int] = {}
        self._last_pass: dict[int, int] = {}  # number of the last measured step, by g
        self._ratios: list[float] | None = None
        self._catch_up = 0.0, 0.0  # seconds and tokens of recent catch-ups

    @property
    def known(self) -> bool:
        """True if baseline steps were measured."""
        return self._count.get(0, 0) > 1

    @property
    def baseline_seconds(self) -> float:
        """Seconds of a baseline step."""
        return math.exp(self._speed + self._relative[0])

    def ratios(self) -> list[float]:
        """Return the seconds of a step with each g in 0 … G, in baseline steps.

        They are interpolated between the measured values of g, and extrapolated beyond the largest one. While
        only one g above 0 is measured, all larger ones are assumed to take as long, so that they are tried:
        the second token of a pass may double its time, and further tokens may be nearly free.
        """
        if self._ratios is None:
            known = [math.exp(self._relative[g] - self._relative[0]) for g in self.measured]
            self._ratios = np.interp(self._every_g, self.measured, known).tolist()
            if len(known) > 2:
                before, last = self.measured[-2:]
                slope = max(0.0, (known[-1] - known[-2]) / (last - before))
                for g in range(last + 1, len(self._ratios)):
                    self._ratios[g] += slope * (g - last)
        return self._ratios

    def stale(self, g: int) -> bool:
        """Return whether the time of a g may no longer hold. With few measurements, this is sooner."""
        confidence = min(1.0, self._count.get(g, 0) / self._config.cost_measurements)
        return self._passes - self._last_pass.get(g, 0) > self._config.stale_passes * confidence

    def record(self, g: int, seconds: float) -> None:
        """Record the seconds of a step with g draft tokens."""
        value, count = math.log(max(seconds, SHORTEST)), self._count.get(g, 0) + 1
        age = self._passes - self._last_pass.get(g, self._passes)
        self._passes += 1
        last, self._last_pass[g] = self._last_pass.get(g, 0), self._passes
        self._count[g], self._ratios = count, None
        if count == 1:
            self._speed = self._speed if self._relative else value
            self._relative[g] = value - self._speed
        elif count == 2:  # the other one may contain a warm-up
            self._relative[g] = min(self._relative[g], value - self._speed)
            self.measured = sorted([*self.measured, g])
        else:
            bound, memory = math.log(self._config.outlier_factor), self._config.cost_measurements
            error = value - self._speed - self._relative[g]
            if abs(error) > bound:  # not trusted, but it casts doubt on all measurements
                error = math.copysign(bound, error)
                self._last_pass[g] = last
                self._passes += memory
            own = max(1 / count, age / (age + self._config.stale_passes / 4))
            weight = max(1 / min(count, memory), own / 2)
            self._relative[g] += weight * own * error
            self._speed += weight * (1 - own) * error

    def record_catch_up(self, tokens: int, seconds: float) -> None:
        """Record the seconds in which the draft model processed tokens that were generated without it."""
        # Many tokens, such as those of an encoder's input, outweigh the few of a probe
        keep = 1 / (1 + tokens / (self._config.cost_measurements * TOKENS_OF_PRIOR * self._every_g[-1]))
        self._catch_up = keep * self._catch_up[0] + seconds, keep * self._catch_up[1] + tokens

    def catch_up(self, tokens: int) -> float:
        """Return the baseline steps of a catch-up.

        As many tokens as G are assumed to take as long as a draft step, until many were measured.
        """
        most = len(self._every_g) - 1
        prior, weight = max(0.0, self.ratios()[1] - 1) / most, most * TOKENS_OF_PRIOR
        seconds, measured = self._catch_up
        total = seconds / self.baseline_seconds + weight * prior
        return max(0.0, tokens * total / (measured + weight))

"""Goodput: a draft-length policy that maximizes throughput, in tokens per second.

An acceptance estimate gives the tokens of a step, and a cost model its seconds. The policy chooses the number
of draft tokens g with the most tokens per second. g = 0 is decoding without speculation. An exploration
budget limits how much the policy may lose to learn. docs/design/policy.md has the derivation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from outpace.checks.arguments import integer
from outpace.policy.acceptance import AcceptanceEstimate
from outpace.policy.base import DraftLengthPolicy, Load, StepOutcome
from outpace.policy.config import GoodputConfig
from outpace.policy.costs import StepCosts

CANDIDATES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # values of g: each may need a CUDA graph
DEFAULT = GoodputConfig()


@dataclass(slots=True)
class Forecast:
    """Expected tokens and seconds of the next step, by number of draft tokens g. Times are in baseline steps.

    Attributes:
        tokens: Expected tokens per sequence.
        ratios: Expected durations.
        rates: Throughput of each candidate, relative to baseline steps.
        runnable: Candidates that need no capture.
        uncaptured: Candidates that need one.
        catch_up: Duration of the draft model's catch-up.
        remaining: Mean number of tokens until a sequence ends, at most.
        horizon: Tokens for which the forecast holds: acceptance rates may jump, and sequences end early.
    """

    tokens: list[float]
    ratios: list[float]
    rates: dict[int, float]
    runnable: list[int]
    uncaptured: list[int]
    catch_up: float
    remaining: float
    horizon: float

    def loss(self, g: int, rate: float = 1.0) -> float:
        """Return the baseline steps that a step with g is expected to lose against another rate."""
        return max(0.0, rate * self.ratios[g] - self.tokens[g])

    def pays(self, g: int, least: float) -> bool:
        """Return whether a g has at least this rate, and repays the catch-up within the horizon."""
        rate = self.rates[g]
        return rate >= least and self.catch_up <= (1 - 1 / rate) * self.horizon


class Goodput(DraftLengthPolicy):
    """Policy that chooses the number of draft tokens with the highest expected throughput.

    At each step it makes one choice for the whole batch, from the measured times of steps and the measured
    acceptance rates. 0 draft tokens, decoding without speculation, is one of the choices. A ``Goodput``
    belongs to one ``Decoder``.

    The choice depends on measured times. With rules "token" and "block", the same seed may therefore give
    another text, from the same distribution. In 16 bits, rounding can do so with rule "match", too.

    Args:
        max_draft_tokens: Largest number of draft tokens.
        config: Settings. The default is right for most uses.

    Attributes:
        balance: Baseline steps that exploration may lose now. A baseline step is a step without speculation.
    """

    is_timed = True

    def __init__(self, max_draft_tokens: int = 16, config: GoodputConfig = DEFAULT) -> None:
        integer("max_draft_tokens", max_draft_tokens, "an int >= 1", lambda g: g >= 1)
        self.max_draft_tokens, self.config = max_draft_tokens, config
        self.balance = config.balance
        self._acceptance = AcceptanceEstimate(max_draft_tokens, config)
        # By executor and size of the batch
        self._by_size = defaultdict[tuple[str, int], StepCosts](partial(StepCosts, max_draft_tokens, config))
        self._capture_seconds = 0.0  # of the shortest capture
        self._candidates = [g for g in CANDIDATES if g < max_draft_tokens] + [max_draft_tokens]
        self._steps_since_rejection = 0
        self._explores: dict[int, bool] = {}  # whether g was last chosen to learn, by g

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        load = load or Load(len(slots))
        costs, most, limits = self.costs(load), self.max_draft_tokens, [self.max_draft_tokens] * len(slots)
        for each in (load.remaining_draft_tokens, proposed):
            if each and min(each) < most:
                limits = [max(0, min(pair)) for pair in zip(limits, each, strict=True)]
        if max(limits) < 1 or not costs.known:
            return [0] * len(slots)
        tokens = self._acceptance.expected_tokens(slots, limits).tolist()
        forecast = self._forecast(tokens, max(limits), load, costs)
        best = g = self._best(forecast, costs)
        if self.balance > 0:
            g = self._explore(forecast, costs, best, probe=proposed is None)
        self._explores[g] = g != best
        if load.padded_drafts or min(limits) >= g:
            return [g] * len(slots)
        return [min(g, limit) for limit in limits]

    def _forecast(self, tokens: list[float], most: int, load: Load, costs: StepCosts) -> Forecast:
        captured, remaining = load.captured, load.remaining_draft_tokens
        if load.padded_drafts and captured:
            most = max(most, *captured)
        most = min(most, max(self.config.first_draft_tokens, 2 * costs.measured[-1]))
        candidates = [g for g in self._candidates if g <= most]
        horizon = 1 / self.config.jump_probability
        left = max(0.0, sum(remaining) / len(remaining)) if remaining else horizon
        uncaptured = [g for g in candidates if captured is not None and g not in captured]
        if captured and left < max((g for g in captured if g <= self.max_draft_tokens), default=0):
            uncaptured = []  # captured values suffice for the last tokens
        ratios = costs.ratios()
        return Forecast(
            tokens,
            ratios,
            {g: tokens[g] / ratios[g] for g in candidates},
            [g for g in candidates if captured is None or g in captured],
            uncaptured,
            costs.catch_up(load.catch_up_tokens),
            left,
            min(left, horizon),
        )

    def _best(self, forecast: Forecast, costs: StepCosts) -> int:
        """Return the measured g with the highest throughput; 0 unless it pays by a margin."""
        best = max(
            (g for g in forecast.runnable if g in costs.measured), key=forecast.rates.__getitem__, default=0
        )
        margin = self.config.margin * (1 + max(0.0, -self.balance))
        return best if best and forecast.pays(best, 1 + margin) else 0

    def _explore(self, forecast: Forecast, costs: StepCosts, best: int, probe: bool) -> int:
        """Return a g to learn about, or the best one by what is known. ``probe``: whether a probe may run."""
        rate, measured = forecast.rates[best], costs.measured
        least = (1 + self.config.margin) * rate
        new = [g for g in forecast.runnable if g not in measured and forecast.pays(g, least)]
        if new:
            return max(new, key=forecast.rates.__getitem__)
        for g in (g for g in forecast.runnable if g != best and g in measured and costs.stale(g)):
            # It may be as fast as the next smaller g that was measured lately
            fresh = max((each for each in measured if each < g and not costs.stale(each)), default=0)
            promising = forecast.tokens[g] > least * forecast.ratios[fresh]
            if g == 0 or (promising and forecast.loss(g, rate) + forecast.catch_up <= self.balance):
                return g
        return self._capture(forecast, costs, best) or best or (self._probe(forecast) if probe else 0)

    def _capture(self, forecast: Forecast, costs: StepCosts, best: int) -> int:
        """Return a g that would have saved a capture so far, or saves it in the remaining tokens; or 0."""
        rate, price = forecast.rates[best], self._capture_seconds / costs.baseline_seconds
        missed, worth = costs.missed, []
        affordable = best > 0 or self.balance >= min(price, self.config.balance)
        for g in forecast.uncaptured:
            if forecast.rates[g] > (1 + self.config.margin) * rate:
                saving = 1 - rate / forecast.rates[g]  # in a baseline step's time
                missed[g] = missed.get(g, 0.0) + saving
                if missed[g] + affordable * saving * forecast.remaining / rate > price:
                    worth.append(g)
        return max(worth, key=forecast.rates.__getitem__, default=0)

    def _probe(self, forecast: Forecast) -> int:
        """Return the g with the smallest expected loss if a probe is due, else 0."""
        g = min((g for g in forecast.runnable if g), key=forecast.loss, default=0)
        due = forecast.loss(g) <= self.config.probe_share * self._steps_since_rejection
        return g if due and forecast.loss(g) + forecast.catch_up <= self.balance else 0

    @property
    def acceptance_rate(self) -> float:
        """Mean acceptance rate of recent sequences."""
        return self._acceptance.mean()

    @property
    def idle(self) -> bool:
        return self.balance < 0

    def observe(self, done: StepOutcome) -> None:
        costs = self.costs(done.load)
        if costs.known and not done.forced:
            self._book(done, costs)
        tested, correct = done.tested or done.drafted, done.correct or done.accepted
        self._acceptance.learn(done.slots, tested, correct)
        self._steps_since_rejection = 0 if 2 * sum(correct) < sum(tested) else self._steps_since_rejection + 1
        if done.g <= self.max_draft_tokens:  # requests may set more
            self._record(done, costs)

    def _book(self, done: StepOutcome, costs: StepCosts) -> None:
        """Book the gain or loss of a step against baseline steps, at the costs known before it."""
        baseline, most = costs.baseline_seconds, self.config.balance
        gain = -min(done.proposal_seconds / baseline, most / 2)
        if done.g:
            before = done.proposal_seconds + done.catch_up_seconds + done.capture_seconds
            steps = (before + (done.seconds or 0.0)) / baseline
            tokens = 1 + sum(done.accepted) / len(done.slots)
            if self._explores.get(done.g):
                self.exploration_seconds += max(0.0, steps - tokens) * baseline
            # A step that takes much longer than expected does so for another reason
            expected = costs.ratios()[done.g] + costs.catch_up(done.load.catch_up_tokens)
            gain = tokens - min(steps, expected + most / 2)
            if done.capture_seconds:  # captures happen once, and cause no debt
                gain = -min(steps, max(0.0, self.balance))
        else:
            self.exploration_seconds -= gain * baseline
        self.balance = max(-most, min(most, self.balance + self.config.income + gain))

    def _record(self, done: StepOutcome, costs: StepCosts) -> None:
        """Record the seconds of a step, of a catch-up and of captures."""
        tokens = done.load.catch_up_tokens if done.g else 0
        if done.catch_up_seconds:
            costs.record_catch_up(tokens, done.catch_up_seconds)
            tokens = 0
        if done.capture_seconds and done.g not in (done.load.captured or ()):  # of a step
            self._capture_seconds = min(done.capture_seconds, self._capture_seconds or math.inf)
            costs.missed.clear()
        if done.seconds is None:
            return
        long = tokens > self.max_draft_tokens * len(done.slots)
        if costs.known and tokens and (long or done.g in costs.measured):
            expected = costs.baseline_seconds * costs.ratios()[done.g]
            costs.record_catch_up(tokens, done.seconds - expected)
        elif not long:  # a short catch-up adds little to the first seconds of a g
            costs.record(done.g, done.seconds)

    def reset(self, slots: Sequence[int]) -> None:
        self._acceptance.forget(slots)

    def costs(self, load: Load) -> StepCosts:
        """Return the cost model of such batches."""
        return self._by_size[load.executor, (load.batch - 1).bit_length()]

    def describe(self) -> str:
        """Return the acceptance rate, and the time of steps by executor and size of the batch."""
        parts = []
        for (executor, size), costs in self._by_size.items():
            if costs.known and len(costs.measured) > 1:
                ratios = ", ".join(f"{costs.ratios()[g]:.2f} at g={g}" for g in costs.measured if g)
                baseline = f"{1e3 * costs.baseline_seconds:.2f} ms per step without draft tokens (g=0)"
                name = f"{executor or 'step'}, batch size up to {1 << size}"
                parts.append(f"{name}: {baseline}; relative to it: {ratios}")
        known = f": acceptance rate {self.acceptance_rate:.2f}" if parts else ""
        return "; ".join([f"{self!r}{known}", *parts])

    def __repr__(self) -> str:
        return f"Goodput({self.max_draft_tokens})"

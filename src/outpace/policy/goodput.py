"""Goodput: a draft-length policy that maximizes throughput, in tokens per second.

An acceptance estimate gives the tokens of a step, and a cost model its seconds. The policy chooses the number
of draft tokens g with the most tokens per second. g = 0 is decoding without speculation. An exploration
budget limits how much the policy may lose to learn. docs/design/policy.md has the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.checks.arguments import integer
from outpace.policy.acceptance import LEVELS, AcceptanceEstimate, confidence_level
from outpace.policy.base import DraftLengthPolicy, Hint, Load, StepOutcome
from outpace.policy.config import GoodputConfig
from outpace.policy.costs import StepCosts

CANDIDATES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # values of g: each may need a CUDA graph
DEFAULT = GoodputConfig()


@dataclass(slots=True)
class Forecast:
    """Expected tokens and seconds of the next step.

    Attributes:
        tokens: Expected tokens per sequence, by g.
        ratios: Expected seconds in baseline steps, by g.
        runnable: Candidates for g that need no capture.
        uncaptured: Candidates for g that are worth a capture if they are fast enough.
        capture: Baseline steps of a capture.
        catch_up: Baseline steps of the draft model's catch-up.
        remaining: Mean number of tokens until a sequence ends.
        horizon: Tokens for which the forecast holds: until the end, or until acceptance rates jump.
    """

    tokens: list[float]
    ratios: list[float]
    runnable: list[int]
    uncaptured: list[int]
    capture: float
    catch_up: float
    remaining: float
    horizon: float

    def rate(self, g: int) -> float:
        """Return the throughput of a g, relative to baseline steps."""
        return self.tokens[g] / self.ratios[g]

    def loss(self, g: int, rate: float = 1.0) -> float:
        """Return the baseline steps that a step with g is expected to lose against another rate."""
        return max(0.0, rate * self.ratios[g] - self.tokens[g])

    def pays(self, g: int, least: float) -> bool:
        """Return whether a g has at least this rate, and repays the catch-up within the horizon."""
        rate = self.rate(g)
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
        self._by_size: dict[tuple[str, int], StepCosts] = {}  # by executor and size of the batch
        self._capture_seconds = 0.0  # of the shortest capture
        self._candidates = [g for g in CANDIDATES if g < max_draft_tokens] + [max_draft_tokens]
        self._levels: dict[int, int] = {}  # confidence level of the last hint, by slot
        self._steps_since_rejection = 0
        self._proposal_cost = 0.0  # of a free drafter, in baseline steps
        self._pause = 0  # steps until a free drafter proposes again
        self._explores: dict[int, bool] = {}  # whether g was last chosen to learn, by g

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, hint: Hint | None = None
    ) -> list[int]:
        load = load or Load(len(slots))
        costs, limits = self.costs(load), self._limits(slots, load, hint)
        if max(limits) < 1 or not costs.known:
            return [0] * len(slots)
        if hint is not None:
            self._levels |= zip(slots, map(confidence_level, hint.confidence), strict=True)
        tokens = self._acceptance.expected_tokens(slots, self._levels_of(slots), limits)
        forecast = self._forecast(load, costs, max(limits), tokens.tolist())
        best = g = self._best(forecast, costs)
        if self.balance > 0:
            g = self._explore(forecast, costs, best, probe=hint is None)
        self._explores[g] = g != best
        if hint is not None:
            # Proposals that are not scored may take the same share of the time as probes.
            self._pause = 0 if g else math.ceil(self._proposal_cost / self.config.probe_share)
        return [g if load.padded_drafts else min(g, limit) for limit in limits]

    def _limits(self, slots: Sequence[int], load: Load, hint: Hint | None) -> list[int]:
        """Return the largest useful number of draft tokens of each sequence."""
        most = [self.max_draft_tokens] * len(slots)
        proposed, remaining = hint.lengths if hint else most, load.remaining_draft_tokens or most
        return [max(0, min(each)) for each in zip(most, proposed, remaining, strict=True)]

    def _forecast(self, load: Load, costs: StepCosts, most: int, tokens: list[float]) -> Forecast:
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
        return Forecast(
            tokens,
            costs.ratios(),
            candidates if captured is None else [g for g in candidates if g in captured],
            uncaptured,
            self._capture_seconds / costs.baseline_seconds,
            costs.catch_up(load.catch_up_tokens),
            left,
            min(left, horizon),
        )

    def _best(self, forecast: Forecast, costs: StepCosts) -> int:
        """Return the measured g with the highest throughput; 0 unless it pays by a margin."""
        best = max((g for g in forecast.runnable if g in costs.measured), key=forecast.rate, default=0)
        margin = self.config.margin * (1 + max(0.0, -self.balance))
        return best if best and forecast.pays(best, 1 + margin) else 0

    def _explore(self, forecast: Forecast, costs: StepCosts, best: int, probe: bool) -> int:
        """Return a g to learn about, or the best one.

        Args:
            forecast: Forecast of the next step.
            costs: Cost model.
            best: The best g by what is known.
            probe: Whether a probe may run.
        """
        rate, measured = forecast.rate(best), costs.measured
        least = (1 + self.config.margin) * rate
        new = [g for g in forecast.runnable if g not in measured and forecast.pays(g, least)]
        if new:
            return max(new, key=forecast.rate)
        for g in forecast.runnable:
            if g == best or g not in measured or not costs.stale(g):
                continue
            if g == 0:
                return 0
            # It may be as fast as the next smaller g that was measured lately
            fresh = max((each for each in measured if each < g and not costs.stale(each)), default=0)
            promising = forecast.tokens[g] > least * forecast.ratios[fresh]
            if promising and forecast.loss(g, rate) + forecast.catch_up <= self.balance:
                return g
        return self._capture(forecast, costs, best) or best or (self._probe(forecast, costs) if probe else 0)

    def _capture(self, forecast: Forecast, costs: StepCosts, best: int) -> int:
        """Return a g that is worth its capture, or 0.

        The baseline steps that it would have saved so far, and those that it is expected to save in the
        remaining tokens, must exceed the capture.
        """
        rate, missed, price = forecast.rate(best), costs.missed, forecast.capture
        affordable = best > 0 or self.balance >= min(price, self.config.balance)
        worth: dict[int, float] = {}
        for g in forecast.uncaptured:
            if forecast.rate(g) > (1 + self.config.margin) * rate:
                saving = 1 / rate - 1 / forecast.rate(g)  # baseline steps per token
                missed[g] = missed.get(g, 0.0) + saving * rate
                if missed[g] + affordable * saving * forecast.remaining > price:
                    worth[g] = saving
        return max(worth, key=worth.__getitem__, default=0)

    def _probe(self, forecast: Forecast, costs: StepCosts) -> int:
        """Return the g with the smallest expected loss if a probe is due, else 0.

        After an accepted probe the next one is due at once, so that a good drafter is noticed soon.
        """
        options, price = [g for g in forecast.runnable if g], forecast.catch_up
        if not options and len(costs.measured) > 1:  # they were captured for other needs of sequences
            options, price = forecast.uncaptured, price + min(forecast.capture, self.config.balance)
        g = min(options, key=forecast.loss, default=0)
        due = forecast.loss(g) <= self.config.probe_share * self._steps_since_rejection
        return g if due and forecast.loss(g) + price <= self.balance else 0

    @property
    def acceptance_rate(self) -> float:
        """Mean acceptance rate of recent sequences."""
        return self._acceptance.mean()

    @property
    def idle(self) -> bool:
        return self._pause > 0 or self.balance < 0

    def observe(self, done: StepOutcome) -> None:
        costs = self.costs(done.load)
        if costs.known and not done.forced:
            self._book(done, costs)
        self._learn(done)
        if done.g <= self.max_draft_tokens:  # requests may set more
            self._record(done, costs)

    def _learn(self, done: StepOutcome) -> None:
        """Learn the acceptance: from scored draft tokens, and from the first proposed one not scored."""
        self._acceptance.next_step()
        self._steps_since_rejection += 1
        self._pause = 0 if any(done.unscored_correct) else max(0, self._pause - 1)
        tested, accepted = list(done.requested or done.drafted), list(done.accepted)
        for i, correct in enumerate(done.unscored_correct):
            if correct is not None and accepted[i] == tested[i]:
                tested[i], accepted[i] = tested[i] + 1, accepted[i] + correct
        rows, most = [i for i, g in enumerate(tested) if g], self.max_draft_tokens
        if rows:
            slots = [done.slots[i] for i in rows]
            tested, accepted = ([min(each[i], most) for i in rows] for each in (tested, accepted))
            self._acceptance.learn(slots, self._levels_of(slots), tested, accepted)
            if 2 * sum(accepted) < sum(tested):
                self._steps_since_rejection = 0

    def _levels_of(self, slots: Sequence[int]) -> list[int]:
        """Return the confidence level of each slot. Drafters without a confidence have the highest one."""
        if not self._levels:
            return [LEVELS - 1] * len(slots)
        return [self._levels.get(slot, LEVELS - 1) for slot in slots]

    def _record(self, done: StepOutcome, costs: StepCosts) -> None:
        """Record the seconds of a step. Those of a free drafter are no part of it: it has proposed before."""
        if done.catch_up_seconds:
            costs.record_catch_up(done.load.catch_up_tokens, done.catch_up_seconds)
        if done.capture_seconds:  # the first capture may include compilation
            self._capture_seconds = min(done.capture_seconds, self._capture_seconds or math.inf)
            costs.missed.clear()
        if done.seconds is None:
            return
        seconds = done.seconds + (done.idle_seconds if done.draft_steps else -done.draft_seconds)
        catch_up = done.load.catch_up_tokens if done.draft_steps and not done.catch_up_seconds else 0
        long = catch_up > self.max_draft_tokens * len(done.slots)
        if long or (costs.known and catch_up and done.g in costs.measured):
            if costs.known:
                expected = costs.baseline_seconds * costs.ratios()[done.g]
                costs.record_catch_up(catch_up, seconds - expected)
        elif done.g or not done.draft_steps:  # a short catch-up adds little to the first seconds of a g
            costs.record(done.g, seconds)

    def _book(self, done: StepOutcome, costs: StepCosts) -> None:
        """Book the gain or loss of a step against baseline steps, at the costs known before it."""
        config, baseline = self.config, costs.baseline_seconds
        # A step that takes much longer than expected does so for another reason.
        gain, unexpected = 0.0, config.balance / 2
        if done.draft_seconds and not done.draft_steps:  # a free drafter proposed
            self._proposal_cost = min((done.draft_seconds + done.idle_seconds) / baseline, unexpected)
            gain = -self._proposal_cost
        if done.g or done.draft_steps:
            once = done.capture_seconds + done.catch_up_capture_seconds
            seconds = done.idle_seconds + done.catch_up_seconds + once + (done.seconds or 0.0)
            steps, tokens = seconds / baseline, 1 + sum(done.accepted) / len(done.slots)
            expected = costs.ratios()[done.g] + costs.catch_up(done.load.catch_up_tokens)
            gain = tokens - min(steps, expected + unexpected)
            if once:  # captures happen once, and cause no debt
                gain = -min(steps, max(0.0, self.balance))
            if self._explores.get(done.g):
                self.exploration_seconds += max(0.0, steps - tokens) * baseline
        else:
            self.exploration_seconds -= gain * baseline
        self.balance = max(-config.balance, min(config.balance, self.balance + config.income + gain))

    def reset(self, slots: Sequence[int]) -> None:
        self._acceptance.forget(slots)
        for slot in slots:
            self._levels.pop(slot, None)

    def costs(self, load: Load) -> StepCosts:
        """Return the cost model of such batches."""
        key = load.executor, (load.batch - 1).bit_length()
        if key not in self._by_size:
            self._by_size[key] = StepCosts(self.max_draft_tokens, self.config)
        return self._by_size[key]

    def describe(self) -> str:
        """Return the acceptance rate, and the time of steps by executor and size of the batch."""
        parts = [f"{self!r}"]
        for (executor, size), costs in self._by_size.items():
            if len(costs.measured) > 1:
                ratios = ", ".join(f"{costs.ratios()[g]:.2f} at g={g}" for g in costs.measured if g)
                sequences = f"up to {1 << size} sequences" if size else "1 sequence"
                parts.append(
                    f"{executor or 'step'}, {sequences}: {1e3 * costs.baseline_seconds:.2f} ms per step "
                    f"without draft tokens (g=0); relative to it: {ratios}"
                )
        if len(parts) > 1:
            parts[0] += f": acceptance rate {self.acceptance_rate:.2f}"
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"Goodput({self.max_draft_tokens})"

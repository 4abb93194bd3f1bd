"""Goodput: a draft-length policy that maximizes throughput, in tokens per second.

``acceptance`` estimates the tokens of a step, and ``costs`` its seconds. ``forecast`` combines them for each
number of draft tokens g. The policy chooses the g with the most tokens per second. g = 0 is decoding without
speculation, so the policy is designed never to be slower. docs/design/policy.md explains why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from outpace.checks.arguments import integer
from outpace.policy.base import DraftLengthPolicy, Hint, Load, StepOutcome
from outpace.policy.budget import ExplorationBudget, Price
from outpace.policy.costs import STALE_AFTER, size_class
from outpace.policy.forecast import MIN_SPEEDUP, Choice, Forecast
from outpace.policy.probes import Probes, capture_price
from outpace.policy.proposal_budget import ProposalBudget

MIN_CAPTURE_GAIN = 0.03  # fraction by which a g must be faster than the best captured one to be captured
# Early captures need only an expected gain. Later, a g must first have missed savings as long as a capture.
EARLY_CAPTURES = 4  # number of g above 0 that may be captured early
EARLY_STEPS = 128  # steps with such a batch in which captures are early, once some captured g pays
CAPTURE_STAKE = 0.3  # fraction of a capture's cost that the budget must hold, while no captured g pays
NEAR_BEST = 0.85  # fraction of the best throughput; a g above it is measured again now and then
REMEASURE_INTERVAL = 96  # steps between such measurements of a g
MARGIN = 0.02  # fraction by which speculation must be faster
DEBT_MARGIN = 0.05  # fraction added to MARGIN for each baseline step of debt
HORIZON = 64  # steps in which the gain of speculation must repay a catch-up
MIN_STOPPABLE_SECONDS = 1e-2  # seconds of a draft step; for shorter ones, `enough` costs more than it saves
MAX_OVERHEAD = 0.005  # fraction of the time that decisions may take while there are no draft tokens
SMALL_SPEEDUP = 1.12  # times the baseline; below it, the baseline is measured more often
BASELINE_INTERVAL = 256  # steps until a baseline pass is measured again; a quarter of it below SMALL_SPEEDUP


class Goodput(DraftLengthPolicy):
    """Policy that chooses the number of draft tokens with the highest expected throughput.

    At each step it makes one choice for the whole batch, from the measured times of steps and the measured
    acceptance rates. 0 draft tokens, decoding without speculation, is one of the choices. A ``Goodput``
    belongs to one ``Decoder``.

    The choice depends on measured times. With rules "token" and "block", the same seed may therefore give
    another text, from the same distribution. In 16 bits, rounding can do so with rule "match", too.

    Args:
        max_draft_tokens: Largest number of draft tokens.
        clock: Function that returns the time in seconds.
    """

    is_timed = True

    def __init__(self, max_draft_tokens: int = 16, *, clock: Callable[[], float] = time.perf_counter) -> None:
        integer("max_draft_tokens", max_draft_tokens, "an int >= 1", lambda g: g >= 1)
        self.max_draft_tokens, self._clock = max_draft_tokens, clock
        self.forecast = Forecast(max_draft_tokens)
        self.budget = ExplorationBudget()
        self.probes = Probes(self.budget)
        self._active_slots: set[int] = set()  # slots that a choice was for, since their last reset
        self._plan: Choice | None = None
        self._hinted = False  # whether the draft is known before the choice
        self._steps_since_baseline = 0
        self._choice_started_at = 0.0  # seconds on the clock
        self._proposal_budget = ProposalBudget()
        # Seconds that a g would have saved if it had been captured, by executor, batch size and g
        self._missed_savings: dict[tuple[str, int, int], float] = {}

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, hint: Hint | None = None
    ) -> list[int]:
        self._choice_started_at = self._clock()
        load = load or Load(len(slots))
        costs = self.forecast.costs(load)
        self._active_slots.update(slots)
        self._plan, self._hinted = None, hint is not None
        no_draft = [0] * len(slots)
        if self.probes.skip_decision() if hint is None else not any(hint.lengths):
            return no_draft
        remaining = load.remaining_draft_tokens
        if costs.baseline_seconds(load) is None or (remaining is not None and max(remaining) < 1):
            return no_draft
        # With a positive budget, times measured only once are ignored: they may be outliers.
        self._plan = plan = self.forecast.plan(slots, load, hint, confirmed_only=self.budget.balance > 0)
        plan.rate, plan.g = self._best(plan)
        plan.g = self._affordable(plan) if hint is None else self._explore(plan)
        small_speedup = plan.rate * plan.baseline_seconds < SMALL_SPEEDUP * len(slots)
        interval = BASELINE_INTERVAL // 4 if small_speedup else BASELINE_INTERVAL
        interval = min(interval, 4 << min(costs.baseline_count(load), 8))
        if plan.g and (self._steps_since_baseline >= interval or costs.context_unmeasured(load)):
            plan.g = 0
        return [plan.g if load.padded_drafts else min(plan.g, limit) for limit in plan.limits.tolist()]

    def _best(self, plan: Choice) -> tuple[float, int]:
        """Return the highest throughput, and its g; g = 0 unless speculation is faster by a margin."""
        rates = plan.tokens / plan.optimistic_seconds
        best = int(plan.runnable[rates[plan.runnable].argmax()])
        if rates[best] < (1 + MARGIN + DEBT_MARGIN * self.budget.debt) * rates[0]:
            best = 0
        return float(rates[best]), best

    def _affordable(self, plan: Choice) -> int:
        """Return the g to run with a drafter that is not free.

        It is the best estimate if that can repay the catch-up, another g to explore, a probe, or 0.
        """
        if plan.g == 0 or self.probes.stale:
            new = 0 if self.probes.stale else self._consider_capture(plan)
            if new:
                self.probes.start(Price(0.0))
            return new or self._probe(plan)
        gain = -plan.losses()[plan.g]
        if plan.costs.catch_up_seconds(plan.load) / plan.baseline_seconds > HORIZON * gain:
            return 0
        return self._explore(plan)

    def _explore(self, plan: Choice) -> int:
        """Return the g of the best estimate, or another g that should be measured now.

        A g that was not run for long comes first, if it is nearly as good or may be better. Otherwise it may
        be a g whose expected gain justifies a capture.
        """
        if plan.g and self.budget.balance > 0:
            since = {g: plan.costs.passes_since(plan.load, g) for g in plan.measured_runnable}
            overdue = [
                g
                for g, passes in since.items()
                if (passes > REMEASURE_INTERVAL and plan.tokens[g] >= NEAR_BEST * plan.rate * plan.seconds[g])
                or (passes > STALE_AFTER and self._may_be_better(plan, g))
            ]
            if overdue:
                return max(overdue, key=since.__getitem__)
        return self._consider_capture(plan)

    def _may_be_better(self, plan: Choice, g: int) -> bool:
        """Return whether a g would be best if its pass took no longer than that of a smaller g.

        The smaller g is the largest one that was run lately. The expected loss must be within the budget.
        """
        recent = (
            each
            for each in plan.measured
            if each < g and plan.costs.passes_since(plan.load, each) <= STALE_AFTER
        )
        shorter = max(recent, default=0)
        draft_seconds = plan.costs.draft_seconds(plan.load)
        least_seconds = plan.seconds[shorter] + draft_seconds[g] - draft_seconds[shorter]
        affordable = plan.losses()[g] < self.budget.balance
        return bool(affordable and plan.tokens[g] > (1 + MARGIN) * plan.rate * least_seconds)

    def _consider_capture(self, plan: Choice) -> int:
        """Return a g to capture, or the best captured one.

        The seconds that a g would have saved are summed up until they equal the seconds of a capture. So
        waiting and capture together cost at most twice as much as the better of the two would have cost.
        """
        load, costs = plan.load, plan.costs
        if load.captured is None:
            return plan.g
        seconds = plan.optimistic_seconds
        gains = plan.tokens / seconds / plan.rate - 1
        early = len(load.captured - {0}) < EARLY_CAPTURES and (
            plan.g == 0 or costs.pass_count(load) < EARLY_STEPS
        )
        if plan.g == 0:  # no captured g pays, so the capture is risky
            price = capture_price(costs.capture_seconds, float(seconds[0]))
            early &= self.budget.balance > CAPTURE_STAKE * price
        best, best_gain = plan.g, MIN_CAPTURE_GAIN if plan.g else MIN_SPEEDUP - 1
        for g in plan.candidates.tolist():
            gain = float(gains[g])
            if g == 0 or g in load.captured or gain <= MIN_CAPTURE_GAIN:
                continue
            key = load.executor, size_class(load), g
            saving = gain / (1 + gain) * float(seconds[plan.g])
            self._missed_savings[key] = self._missed_savings.get(key, 0.0) + saving
            if gain > best_gain and (early or self._missed_savings[key] > costs.capture_seconds):
                best, best_gain = g, gain
        return best

    def _probe(self, plan: Choice) -> int:
        """Return the g of a probe, or 0.

        It is called if no g is expected to pay, or if nothing is known. The probe is the g with the smallest
        expected loss. It runs if it is due.
        """
        costs, load = plan.costs, plan.load
        candidates = (plan.runnable if len(plan.runnable) > 1 else plan.candidates)[1:]
        if not len(candidates):
            return 0
        losses = plan.losses(MARGIN)[candidates]
        g, loss = int(candidates[losses.argmin()]), float(losses.min())
        loss += costs.idle_seconds(load) / plan.baseline_seconds  # the device is idle again after the probe
        catch_up = costs.catch_up_seconds(load) / plan.baseline_seconds
        if loss < 0:  # the expected gain repays a part of the catch-up, or all of it
            loss, catch_up = 0.0, max(0.0, catch_up + HORIZON * loss)
        captured = load.captured is None or g in load.captured
        free_capture = captured or self.probes.no_outcome_yet
        capture = 0.0 if free_capture else capture_price(costs.capture_seconds, plan.baseline_seconds)
        overhead = (self._clock() - self._choice_started_at) / plan.baseline_seconds
        due = self.probes.start_if_due(Price(loss, catch_up, capture), plan.hopeless, overhead / MAX_OVERHEAD)
        return g if due else 0

    @property
    def idle(self) -> bool:
        return self._proposal_budget.pause > 0

    @property
    def asks(self) -> bool:
        plan = self._plan
        return plan is not None and plan.costs.draft_step_seconds(plan.load) >= MIN_STOPPABLE_SECONDS

    def enough(self, confidence: Sequence[float]) -> bool:
        plan = self._plan
        if plan is None:
            return False
        costs = plan.costs
        sampled = len(plan.levels)
        level, accepted, tokens = self.forecast.next_draft_tokens(plan, confidence)
        pass_seconds = costs.pass_seconds(plan.load)
        lengths = np.arange(sampled + 1, sampled + 1 + len(tokens))
        # The distribution of the next token is known already. So n more tokens need n - 1 draft steps, and
        # one more for the next call of `enough`, unless the draft then has g tokens.
        steps = lengths - sampled - (lengths >= plan.g)
        draft_seconds = costs.draft_step_seconds(plan.load) * steps
        seconds = pass_seconds[lengths] - pass_seconds[sampled] + draft_seconds
        if (tokens <= plan.rate * seconds).all() and plan.load.catch_up_tokens == 0:
            return True
        plan.levels.append(level)
        plan.all_accepted = plan.all_accepted * accepted
        return False

    def observe(self, done: StepOutcome) -> None:
        forecast, costs = self.forecast, self.forecast.costs(done.load)
        if done.seconds is None:
            costs.record_capture(done.capture_seconds)
            # Other g must now be better than the captured one, so their missed savings start at 0 again.
            captured = done.load.executor, size_class(done.load)
            self._missed_savings = {
                key: seconds for key, seconds in self._missed_savings.items() if key[:2] != captured
            }
        else:
            costs.record_pass(done.load, done.g, done.seconds - done.draft_seconds)
        if done.draft_steps or done.catch_up_seconds:
            costs.record_draft(done.load, done.draft_steps, done.draft_seconds, done.catch_up_seconds)
        if done.draft_steps and done.idle_seconds:
            costs.record_idle(done.load, done.idle_seconds)
        drafted = done.g > 0 or done.draft_steps > 0
        probe = self.probes.end_step(drafted)
        if forecast.learn(done, self._plan):
            probing = probe is not None or self.probes.succeeded
            self.probes.record_outcome(probing and forecast.would_pay(done, MARGIN))
        self._book(done, drafted, probe)
        self._steps_since_baseline = self._steps_since_baseline + 1 if done.g else 0

    def _book(self, done: StepOutcome, drafted: bool, probe: Price | None) -> None:
        """Book the gain or loss of a step against decoding without speculation.

        Args:
            done: Outcome of the step.
            drafted: True if the step had draft tokens.
            probe: Price of the probe that ended with the step, or None.
        """
        self._proposal_budget.end_step()
        proposed = done.draft_seconds > 0 and not done.draft_steps  # by a free drafter
        baseline = (
            self.forecast.costs(done.load).baseline_seconds(done.load)
            if drafted or proposed or done.idle_seconds
            else None
        )
        gain = capture = 0.0
        if baseline is not None and (drafted or not proposed):
            gain = -done.idle_seconds / baseline
        if baseline is not None and drafted:
            if done.seconds is not None:
                # The estimate does not use the drafter's confidence. With a hint, the outcome is better.
                accepted = (
                    sum(done.accepted) / len(done.slots)
                    if self._hinted
                    else self.forecast.expected_accepted(done)
                )
                gain += 1 + accepted - (done.seconds + done.catch_up_seconds) / baseline
            if probe is not None:
                capture = capture_price(done.capture_seconds + done.catch_up_capture_seconds, baseline)
        if baseline is not None and proposed:
            cost = (done.draft_seconds + done.idle_seconds) / baseline
            self._proposal_budget.book(cost, gain + cost if drafted else 0.0, any(done.unscored_correct))
        self.budget.book(gain, probe.recurring if probe is not None else 0.0, capture)

    def withdraw(self) -> None:
        self.probes.withdraw()

    def reset(self, slots: Sequence[int]) -> None:
        self.forecast.acceptance.forget(slots)
        self._active_slots.difference_update(slots)
        if not self._active_slots:
            self.probes.new_sequence()
            self._proposal_budget.pause = 0

    def __repr__(self) -> str:
        return f"Goodput({self.max_draft_tokens})"

"""Policy for the highest throughput, and never less than decoding without speculation has.

``acceptance`` estimates the expected tokens of a step, and ``costs`` its seconds. ``forecast`` combines them.
The quotient decides, with g = 0 among the choices. docs/design/policy.md derives this, and bounds the loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from outpace.checks.arguments import integer
from outpace.policy.asking import QueryBudget
from outpace.policy.base import DraftLengthPolicy, Hint, Load, StepOutcome
from outpace.policy.budget import ExplorationBudget, Price
from outpace.policy.costs import STALE, size_of
from outpace.policy.forecast import NOVEL, WORTH, Choice, Forecast
from outpace.policy.probes import Probes, booked

EAGER = 4  # values of g that are captured as soon as they promise enough
YOUNG = 128  # steps with such a batch in which they are; later, when they would have saved as much
STAKE = 0.3  # of the cost of a capture, that the budget must hold where no captured g pays
NEARLY = 0.85  # of the best rate: such g are run now and then, so that their times stay known
REVISIT = 96  # steps between such runs
MARGIN = 0.02  # gain that speculation must promise
WARY = 0.05  # additional gain for each baseline step of debt
HORIZON = 64  # steps in which speculation must repay the catching up
ASKING = 1e-2  # seconds of a draft step; between shorter ones, `enough` would cost more than it saves
THINKING = 0.005  # of the time, that the policy takes while it drafts none
CLOSE = 1.12  # times the baseline: below that, speculation pays little
REFRESH = 256  # steps until a baseline pass is measured again; a quarter of that below CLOSE


class Goodput(DraftLengthPolicy):
    """Policy that chooses the g with the highest expected throughput, 0 included.

    At each step it chooses one g for the whole batch, from the measured times of steps and the measured
    acceptance of draft tokens. A ``Goodput`` belongs to one ``Decoder``.

    The choice depends on measured times. With rules "token" and "block" the same seed may therefore give
    another text. Its distribution is the same.

    Args:
        max_draft_tokens: Largest number of draft tokens.
    """

    def __init__(self, max_draft_tokens: int = 16) -> None:
        integer("max_draft_tokens", max_draft_tokens, "an int >= 1", lambda g: g >= 1)
        self.max_draft_tokens = max_draft_tokens
        self.forecast = Forecast(max_draft_tokens)
        self.budget = ExplorationBudget()
        self.probes = Probes(self.budget)
        self._texts: set[int] = set()  # slots that a choice was for, since their last reset
        self._plan: Choice | None = None
        self._hinted = False  # whether the draft is known before the choice
        self._since_plain = 0
        self._begun = 0.0  # when the last choice began
        self._queries = QueryBudget()
        # Seconds that uncaptured g would have saved, by executor, batch size and g
        self._hopes: dict[tuple[str, int, int], float] = {}

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        """See ``DraftLengthPolicy.choose``."""
        self._begun = time.perf_counter()
        load = load or Load(len(rows))
        costs = self.forecast.at(load)
        self._texts.update(rows)
        self._plan, self._hinted = None, hint is not None
        nothing = [0] * len(rows)
        if self.probes.rest() if hint is None else not any(hint.lengths):
            return nothing
        if costs.plain(load) is None or (load.room is not None and max(load.room) < 1):
            return nothing
        # With a positive budget, times measured only once are ignored: they may be outliers.
        self._plan = plan = self.forecast.plan(rows, load, hint, sure=self.budget.balance > 0)
        plan.rate, plan.g = self._best(plan)
        plan.g = self._affordable(plan) if hint is None else self._other(plan)
        close = plan.rate * plan.plain < CLOSE * len(rows)
        limit = min(REFRESH // 4 if close else REFRESH, 4 << min(costs.plainly(load), 8))
        if plan.g and (self._since_plain >= limit or costs.beyond(load)):
            plan.g = 0
        return [plan.g if load.padded else min(plan.g, most) for most in plan.room.tolist()]

    def _best(self, plan: Choice) -> tuple[float, int]:
        """Return the best rate, and the g that has it."""
        rates = plan.tokens / plan.hoped
        best = int(plan.lengths[rates[plan.lengths].argmax()])
        if rates[best] < (1 + MARGIN + WARY * self.budget.overdrawn) * rates[0]:
            best = 0
        return float(rates[best]), best

    def _affordable(self, plan: Choice) -> int:
        """Return the g to run with a drafter that is not free, starting from the best estimate."""
        if plan.g == 0 or self.probes.blind:
            made = 0 if self.probes.blind else self._made(plan)
            if made:
                self.probes.make(Price(0.0))
            return made or self._try(plan)
        gain = -plan.losses()[plan.g]
        if plan.costs.missed(plan.load) / plan.plain > HORIZON * gain:
            return 0
        return self._other(plan)

    def _other(self, plan: Choice) -> int:
        """Return a g that may be better than the best estimate, or that one.

        Candidates that were not run for long come first. They are nearly as good, or would be better if they
        took no more than shorter ones. Then comes a g that promises enough for a capture.
        """
        if plan.g and self.budget.balance > 0:
            since = {g: plan.costs.since(plan.load, g) for g in plan.tried}
            late = [
                g
                for g, passed in since.items()
                if (passed > REVISIT and plan.tokens[g] >= NEARLY * plan.rate * plan.seconds[g])
                or (passed > STALE and self._may_be_better(plan, g))
            ]
            if late:
                return max(late, key=since.__getitem__)
        return self._made(plan)

    def _may_be_better(self, plan: Choice, g: int) -> bool:
        """Return whether a g would be best if its pass took no more than that of a shorter one.

        The shorter one was run lately. The expected loss must be within the budget.
        """
        lately = (one for one in plan.known if one < g and plan.costs.since(plan.load, one) <= STALE)
        shorter = max(lately, default=0)
        drafts = plan.costs.drafts(plan.load)
        least = plan.seconds[shorter] + drafts[g] - drafts[shorter]
        affordable = plan.losses()[g] < self.budget.balance
        return bool(affordable and plan.tokens[g] > (1 + MARGIN) * plan.rate * least)

    def _made(self, plan: Choice) -> int:
        """Return a g to capture, or the best captured one.

        The time that a g would have saved is summed up until it equals the time of a capture. So waiting and
        capturing together cost at most twice the better of the two.
        """
        load, costs = plan.load, plan.costs
        if load.ready is None:
            return plan.g
        gains = plan.tokens / plan.hoped / plan.rate - 1
        eager = len(load.ready - {0}) < EAGER and (plan.g == 0 or costs.count(load) < YOUNG)
        if plan.g == 0:  # a bet: no captured g pays
            eager &= self.budget.balance > STAKE * booked(costs.making, float(plan.hoped[0]))
        best, most = plan.g, NOVEL if plan.g else WORTH - 1
        for g in plan.grown.tolist():
            gain = float(gains[g])
            if g == 0 or g in load.ready or gain <= NOVEL:
                continue
            key = load.way, size_of(load), g
            self._hopes[key] = self._hopes.get(key, 0.0) + gain / (1 + gain) * float(plan.hoped[plan.g])
            if gain > most and (eager or self._hopes[key] > costs.making):
                best, most = g, gain
        return best

    def _try(self, plan: Choice) -> int:
        """Return the g of a probe, or 0.

        It is called where no g is expected to pay, or nothing is known. The probe has the smallest expected
        loss. It runs if it may pay and is due.
        """
        costs, load = plan.costs, plan.load
        lengths = (plan.lengths if len(plan.lengths) > 1 else plan.grown)[1:]
        if not len(lengths):
            return 0
        losses = plan.losses(MARGIN)[lengths]
        g, loss = int(lengths[losses.argmin()]), float(losses.min())
        loss += costs.wait(load) / plan.plain  # the device waits once more, after the probe
        reading = costs.missed(load) / plan.plain
        if loss < 0:  # the expected gain pays for catching up
            loss, reading = 0.0, max(0.0, reading + HORIZON * loss)
        made = load.ready is None or g in load.ready
        once = 0.0 if made or self.probes.untried else booked(costs.making, plan.plain)
        thinking = (time.perf_counter() - self._begun) / plan.plain / THINKING
        return g if self.probes.make_if_due(Price(loss, reading, once), plan.hopeless, thinking) else 0

    @property
    def idle(self) -> bool:
        """See ``DraftLengthPolicy.idle``."""
        return self._queries.rest > 0

    @property
    def asks(self) -> bool:
        """See ``DraftLengthPolicy.asks``."""
        plan = self._plan
        return plan is not None and plan.costs.step(plan.load) >= ASKING

    def enough(self, confidence: Sequence[float]) -> bool:
        """See ``DraftLengthPolicy.enough``."""
        plan = self._plan
        if plan is None:
            return False
        costs = plan.costs
        drawn = len(plan.levels)
        level, kept, tokens = self.forecast.further(plan, confidence)
        passes = costs.passes(plan.load)
        ends = np.arange(drawn + 1, drawn + 1 + len(tokens))
        # To sample a token takes the draft step to the next one, too, unless it is the last.
        steps = ends - drawn - (ends >= plan.g)
        seconds = passes[ends] - passes[drawn] + costs.step(plan.load) * steps
        if (tokens <= plan.rate * seconds).all() and plan.load.unread == 0:
            return True
        plan.levels.append(level)
        plan.alive = plan.alive * kept
        return False

    def observe(self, done: StepOutcome) -> None:
        """See ``DraftLengthPolicy.observe``."""
        outlook, costs = self.forecast, self.forecast.at(done.load)
        if done.seconds is None:
            costs.note_making(done.making)
            such = done.load.way, size_of(done.load)  # the others must now be better than this one
            self._hopes = {key: hope for key, hope in self._hopes.items() if key[:2] != such}
        else:
            costs.note(done.load, done.g, done.seconds - done.draft_seconds)
        if done.steps or done.catching_up:
            costs.note_draft(done.load, done.steps, done.draft_seconds, done.catching_up)
        if done.steps and done.waited:
            costs.note_wait(done.load, done.waited)
        proposed = done.g > 0 or done.steps > 0
        tried = self.probes.over(proposed)
        if outlook.learn(done, self._plan):
            goes_well = tried is not None or self.probes.went_well
            self.probes.heard(goes_well and outlook.would_pay(done, MARGIN))
        self._book(done, proposed, tried)
        self._since_plain = self._since_plain + 1 if done.g else 0

    def _book(self, done: StepOutcome, proposed: bool, tried: Price | None) -> None:
        """Book the gain or loss of a step against decoding without speculation."""
        self._queries.over()
        asked = done.draft_seconds > 0 and not done.steps
        plain = self.forecast.at(done.load).plain(done.load) if proposed or asked or done.waited else None
        gain = once = 0.0
        if plain is not None and (proposed or not asked):
            gain = -done.waited / plain
        if plain is not None and proposed:
            if done.seconds is not None:
                # Drafts with a known confidence differ too much for the estimate over all of them.
                kept = sum(done.accepted) / len(done.rows) if self._hinted else self.forecast.keeps(done)
                gain += 1 + kept - (done.seconds + done.catching_up) / plain
            if tried is not None:
                once = booked(done.making + done.reading_made, plain)
        if plain is not None and asked:
            taken = (done.draft_seconds + done.waited) / plain
            self._queries.book(taken, gain + taken if proposed else 0.0, any(done.unused))
        self.budget.book(gain, tried.each_time if tried is not None else 0.0, once)

    def withdraw(self) -> None:
        """See ``DraftLengthPolicy.withdraw``."""
        self.probes.withdraw()

    def reset(self, rows: Sequence[int]) -> None:
        """See ``DraftLengthPolicy.reset``."""
        self.forecast.belief.forget(rows)
        self._texts.difference_update(rows)
        if not self._texts:
            self.probes.another_text()
            self._queries.rest = 0

    def __repr__(self) -> str:
        return f"Goodput({self.max_draft_tokens})"

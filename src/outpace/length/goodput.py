"""As many tokens a second as there can be, and never fewer than plain decoding has.

The expected tokens of an iteration come from `belief`, its seconds from `costs`, both by way of `outlook`;
their quotient decides, with g = 0 among the choices: docs/length.md derives it, and says what it may lose.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from outpace.arguments import integer
from outpace.length.account import Account, Price
from outpace.length.asking import Asking
from outpace.length.base import Done, Hint, Length, Load
from outpace.length.costs import STALE, size_of
from outpace.length.outlook import NOVEL, WORTH, Outlook, Plan
from outpace.length.tries import Tries, booked

EAGER = 4  # lengths that are made ready as soon as they promise enough
YOUNG = 128  # iterations with such a batch in which they are; later, when they would have saved as much
STAKE = 0.3  # of what making one takes, that there must be to spend where none that is ready pays
NEARLY = 0.85  # of the best rate: lengths that are run now and then, so that what they take is known
REVISIT = 96  # iterations until then
MARGIN = 0.02  # what speculation must promise to be taken up
WARY = 0.05  # and for each plain pass that was lost more than may be
HORIZON = 64  # iterations in which speculation has to make up for what it takes to begin with it
ASKING = 1e-2  # seconds of a draft's step: between shorter ones, asking would take longer than it saves
THINKING = 0.005  # of the time, that it takes while nothing is guessed
CLOSE = 1.12  # times as fast as plain decoding, and no more
REFRESH = 256  # iterations until a plain pass is measured anew; a quarter of that where it is close


class Goodput(Length):
    """Chooses the g that promises the most tokens a second, 0 included, at each iteration for the batch as a
    whole, from what passes take and how many guesses are kept, both as measured so far.

    max_g  never more guesses than this

    It goes by the clock: rules "token" and "block" do not give the same text again for the same seed with it,
    though texts of the same distribution. A Goodput belongs to one Decoder.
    """

    def __init__(self, max_g: int = 16) -> None:
        integer("max_g", max_g, "an int >= 1", lambda g: g >= 1)
        self.most = max_g
        self.outlook = Outlook(max_g)
        self.account = Account()
        self.tries = Tries(self.account)
        self._texts: set[int] = set()  # slots that a choice was for, since there was another text in them
        self._plan: Plan | None = None
        self._hinted = False  # whether the drafter's guesses are known before a choice
        self._since_plain = 0
        self._begun = 0.0  # when a choice was
        self._asking = Asking()
        # Seconds that lengths would have saved, if they had been ready, by way, size of the batch and g
        self._hopes: dict[tuple[str, int, int], float] = {}

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        self._begun = time.perf_counter()
        load = load or Load(len(rows))
        costs = self.outlook.at(load)
        self._texts.update(rows)
        self._plan, self._hinted = None, hint is not None
        nothing = [0] * len(rows)
        if self.tries.rest() if hint is None else not any(hint.lengths):
            return nothing
        if costs.plain(load) is None or (load.room is not None and max(load.room) < 1):
            return nothing
        # While there is something to spend, what was seen once may have been an accident.
        self._plan = plan = self.outlook.plan(rows, load, hint, sure=self.account.balance > 0)
        plan.rate, plan.g = self._best(plan)
        plan.g = self._affordable(plan) if hint is None else self._other(plan)
        close = plan.rate * plan.plain < CLOSE * len(rows)
        limit = min(REFRESH // 4 if close else REFRESH, 4 << min(costs.plainly(load), 8))
        if plan.g and (self._since_plain >= limit or costs.beyond(load)):
            plan.g = 0
        return [plan.g if load.padded else min(plan.g, most) for most in plan.room.tolist()]

    def _best(self, plan: Plan) -> tuple[float, int]:
        """The best rate, and the length that has it."""
        rates = plan.tokens / plan.hoped
        best = int(plan.lengths[rates[plan.lengths].argmax()])
        if rates[best] < (1 + MARGIN + WARY * self.account.overdrawn) * rates[0]:
            best = 0
        return float(rates[best]), best

    def _affordable(self, plan: Plan) -> int:
        """What to do about the length that is best by what is believed, of a drafter that costs something."""
        if plan.g == 0 or self.tries.blind:
            made = 0 if self.tries.blind else self._made(plan)
            if made:
                self.tries.make(Price(0.0))
            return made or self._try(plan)
        gain = -plan.losses()[plan.g]
        if plan.costs.missed(plan.load) / plan.plain > HORIZON * gain:
            return 0
        return self._other(plan)

    def _other(self, plan: Plan) -> int:
        """Instead of the best length one that may be better: one that was not run for long, of those that are
        nearly as good, or would be better if they took no more than shorter ones; of those that would have to
        be made ready, one that promises enough for that."""
        if plan.g and self.account.balance > 0:
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

    def _may_be_better(self, plan: Plan, g: int) -> bool:
        """Whether a length would be the best if its pass took no more than that of a shorter one does, which
        was run lately; and what it is thought to lose can be spent."""
        lately = (one for one in plan.known if one < g and plan.costs.since(plan.load, one) <= STALE)
        shorter = max(lately, default=0)
        drafts = plan.costs.drafts(plan.load)
        least = plan.seconds[shorter] + drafts[g] - drafts[shorter]
        affordable = plan.losses()[g] < self.account.balance
        return bool(affordable and plan.tokens[g] > (1 + MARGIN) * plan.rate * least)

    def _made(self, plan: Plan) -> int:
        """A length to make ready, or the best one of those that are. What it would have saved is added up
        until it is as much as making it takes: so both together are at most twice what had to be lost."""
        load, costs = plan.load, plan.costs
        if load.ready is None:
            return plan.g
        gains = plan.tokens / plan.hoped / plan.rate - 1
        eager = len(load.ready - {0}) < EAGER and (plan.g == 0 or costs.count(load) < YOUNG)
        if plan.g == 0:  # a bet
            eager &= self.account.balance > STAKE * booked(costs.making, float(plan.hoped[0]))
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

    def _try(self, plan: Plan) -> int:
        """Where nothing pays by what is believed, or nothing is: the length that is expected to lose least,
        if it may pay and there is time for it; or 0."""
        costs, load = plan.costs, plan.load
        lengths = (plan.lengths if len(plan.lengths) > 1 else plan.grown)[1:]
        if not len(lengths):
            return 0
        losses = plan.losses(MARGIN)[lengths]
        g, loss = int(lengths[losses.argmin()]), float(losses.min())
        loss += costs.wait(load) / plan.plain  # once more, after it
        reading = costs.missed(load) / plan.plain
        if loss < 0:  # what is believed to be won speaks for reading what was missed
            loss, reading = 0.0, max(0.0, reading + HORIZON * loss)
        made = load.ready is None or g in load.ready
        once = 0.0 if made or self.tries.untried else booked(costs.making, plan.plain)
        thinking = (time.perf_counter() - self._begun) / plan.plain / THINKING
        return g if self.tries.make_if_due(Price(loss, reading, once), plan.hopeless, thinking) else 0

    @property
    def idle(self) -> bool:
        return self._asking.rest > 0

    @property
    def asks(self) -> bool:
        plan = self._plan
        return plan is not None and plan.costs.step(plan.load) >= ASKING

    def enough(self, confidence: Sequence[float]) -> bool:
        plan = self._plan
        if plan is None:
            return False
        costs = plan.costs
        drawn = len(plan.levels)
        level, kept, tokens = self.outlook.further(plan, confidence)
        passes = costs.passes(plan.load)
        ends = np.arange(drawn + 1, drawn + 1 + len(tokens))
        # To draw a token takes the step to the next one, too, unless it is the last.
        steps = ends - drawn - (ends >= plan.g)
        seconds = passes[ends] - passes[drawn] + costs.step(plan.load) * steps
        if (tokens <= plan.rate * seconds).all() and plan.load.unread == 0:
            return True
        plan.levels.append(level)
        plan.alive = plan.alive * kept
        return False

    def observe(self, done: Done) -> None:
        outlook, costs = self.outlook, self.outlook.at(done.load)
        if done.seconds is None:
            costs.note_making(done.making)
            such = done.load.way, size_of(done.load)  # the others are to be better than this one
            self._hopes = {key: hope for key, hope in self._hopes.items() if key[:2] != such}
        else:
            costs.note(done.load, done.g, done.seconds - done.draft_seconds)
        if done.steps or done.catching_up:
            costs.note_draft(done.load, done.steps, done.draft_seconds, done.catching_up)
        if done.steps and done.waited:
            costs.note_wait(done.load, done.waited)
        guessed = done.g > 0 or done.steps > 0
        tried = self.tries.over(guessed)
        if outlook.learn(done, self._plan):
            goes_well = tried is not None or self.tries.went_well
            self.tries.heard(goes_well and outlook.would_pay(done, MARGIN))
        self._book(done, guessed, tried)
        self._since_plain = self._since_plain + 1 if done.g else 0

    def _book(self, done: Done, guessed: bool, tried: Price | None) -> None:
        """What was won and lost against plain decoding."""
        self._asking.over()
        asked = done.draft_seconds > 0 and not done.steps
        plain = self.outlook.at(done.load).plain(done.load) if guessed or asked or done.waited else None
        gain = once = 0.0
        if plain is not None and (guessed or not asked):
            gain = -done.waited / plain
        if plain is not None and guessed:
            if done.seconds is not None:
                # Of guesses whose confidence is known before, what is believed of all says little.
                kept = sum(done.accepted) / len(done.rows) if self._hinted else self.outlook.keeps(done)
                gain += 1 + kept - (done.seconds + done.catching_up) / plain
            if tried is not None:
                once = booked(done.making + done.reading_made, plain)
        if plain is not None and asked:
            taken = (done.draft_seconds + done.waited) / plain
            self._asking.book(taken, gain + taken if guessed else 0.0, any(done.unused))
        self.account.book(gain, tried.each_time if tried is not None else 0.0, once)

    def withdraw(self) -> None:
        self.tries.withdraw()

    def reset(self, rows: Sequence[int]) -> None:
        self.outlook.belief.forget(rows)
        self._texts.difference_update(rows)
        if not self._texts:
            self.tries.another_text()
            self._asking.rest = 0

    def __repr__(self) -> str:
        return f"Goodput({self.most})"

"""As many tokens a second as there can be, and never fewer than plain decoding has.

The expected tokens of an iteration come from `belief`, its seconds from `costs`; their quotient decides, with
g = 0 among the choices: docs/length.md derives it, and says what it may lose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.arguments import integer
from outpace.length.account import Account
from outpace.length.asking import Asking
from outpace.length.base import Done, Hint, Length, Load
from outpace.length.belief import Array, Belief, Levels, Signal
from outpace.length.costs import Costs, size_of

LADDER = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # lengths that are tried: on a GPU each takes a graph
START = 2  # the first length that is tried, while nothing is known of costs
GROWTH = 2  # times the longest pass that was measured: so far costs are guessed
NOVEL = 0.03  # in favour of a length that was never run; what it must promise, if it has to be made ready
EAGER = 4  # lengths that are made ready as soon as they do
YOUNG = 128  # iterations with such a batch in which they are; later, when they would have saved as much
NEARLY = 0.85  # of the best rate: lengths that are run now and then, so that what they take is known
REVISIT = 96  # iterations until then
MARGIN = 0.02  # what speculation must promise to be taken up
WARY = 0.05  # and for each plain pass that was lost more than may be
HOPE = 0.9  # acceptance that tries hope for
WORTH = 1.1  # what it would have to bring
MADE = 12.0  # plain passes, no more than which a try is booked for making a length ready, which is done once
STAKE = 0.3  # of that, that there must be to make one that promises to pay where none that is ready does
HORIZON = 64  # iterations in which speculation has to make up for what it takes to begin with it
ASKING = 1e-2  # seconds of a draft's step: between shorter ones, asking would take longer than it saves
AGAIN = 8  # iterations without news after which guesses are tries, whatever is believed of them
PATIENCE = 40  # iterations at most until it is worth thinking again
LATE = 4  # iterations, after which a try that nothing was heard of has come to nothing
THINKING = 0.005  # of the time, that it takes while nothing is guessed
RETHINK = 512  # where costs speak against any: they may have changed
CLOSE = 1.12  # times as fast as plain decoding, and no more
REFRESH = 256  # iterations until a plain pass is measured anew; a quarter of that where it is close


@dataclass
class Plan:
    """What was thought when an iteration began."""

    places: dict[int, int]  # of slots, among the rows
    load: Load
    rate: float  # tokens a second that are within reach
    g: int
    belief: Array  # [R, len(ALPHAS)]
    alive: Array  # [R], probability that all guesses so far are kept
    levels: list[Levels]  # of confidence, [R] for each guess
    hinted: bool  # whether there is one for all guesses, known before

    @classmethod
    def of(cls, rows: Sequence[int], load: Load, belief: Array) -> Plan:
        return cls(
            {row: i for i, row in enumerate(rows)}, load, 0.0, 0, belief, np.ones(len(rows)), [], False
        )


@dataclass(frozen=True)
class Bet:
    """A try whose outcome is not known.

    loss  plain passes that it is expected to lose
    made  when
    """

    loss: float
    made: int


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
        self._lengths = np.array([g for g in LADDER if g < max_g] + [max_g])
        self.belief, self.costs, self.signal = Belief(max_g), Costs(max_g), Signal()
        self._plan: Plan | None = None
        self.account = Account()
        self._blind = 0  # iterations since anything was learnt of its guesses
        self._rested = 0  # iterations since the last guess
        self._bet: Bet | None = None
        self._good = False  # whether the last guess was a try that went well
        self._wait = 0  # iterations until it is worth thinking again
        self._since_plain = 0
        self._begun = 0.0  # when a choice was
        self._asking = Asking()
        # Seconds that lengths would have saved, if they had been ready, by size of the batch and g
        self._hopes: dict[tuple[int, int], float] = {}

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        self._begun = time.perf_counter()
        load = load or Load(len(rows))
        self._plan = None
        nothing = [0] * len(rows)
        if hint is None and self._wait:
            self._wait -= 1
            return nothing
        if (hint is not None and not any(hint.lengths)) or self.costs.plain(load) is None:
            return nothing
        self._plan = plan = Plan.of(rows, load, self.belief.now(rows))
        room = np.full(len(rows), self.most)
        if hint is not None:
            room = np.minimum(hint.lengths, self.most)
            plan.levels.append(self.signal.level(hint.confidence))
            plan.hinted = True
        tokens = self._tokens(plan, room)
        # While there is something to spend, what was seen once may have been an accident.
        passes = self.costs.passes(load, sure=self.account.balance > 0)
        seconds = passes + self.costs.step(load) * np.arange(self.most + 1)
        hoped = seconds - (passes - self._hoped(passes, load))
        plan.rate, plan.g = self._best(tokens, hoped, load)
        if hint is None:
            plan.g = self._affordable(plan, tokens, seconds, hoped)
        else:
            plan.g = self._other(plan, tokens, seconds, hoped)
        close = plan.rate * seconds[0] < CLOSE * len(rows)
        limit = min(REFRESH // 4 if close else REFRESH, 4 << min(self.costs.count(load, 0), 8))
        if plan.g and self._since_plain >= limit:
            plan.g = 0
        if load.ready is not None:  # no more of them than of the ladder
            plan.g = int(self._lengths[self._lengths <= min(plan.g, room.max())][-1])
        return [min(plan.g, int(most)) for most in room]

    def _affordable(self, plan: Plan, tokens: Array, seconds: Array, hoped: Array) -> int:
        """What to do about the length that is best by what is believed, of a drafter that costs something."""
        rows, load = len(plan.belief), plan.load
        if plan.g == 0 or self._blind >= AGAIN:
            made = 0
            if load.ready is not None and self._blind < AGAIN:
                made = self._made(plan, tokens, hoped, load.ready)
            if made:
                self._bet = Bet(0.0, self.belief.time)
            return made or self._try(tokens, seconds, hoped, load, rows)
        gain = tokens[plan.g] / rows - hoped[plan.g] / seconds[0]
        if self.costs.missed(load) / seconds[0] > HORIZON * gain:
            return 0
        return self._other(plan, tokens, seconds, hoped)

    def _tokens(self, plan: Plan, room: Levels) -> Array:
        """`[most + 1]`: tokens that all rows together may expect of each g."""
        belief = plan.belief
        if plan.hinted:
            by_level = self.belief.reach(self.signal.shifts())
            kept = (belief[:, None] @ by_level[plan.levels[0]])[:, 0]
            kept *= np.arange(1, self.most + 1) <= room[:, None]
            total = kept.sum(0)
        else:
            total = belief.sum(0) @ self.belief.reach()
        return len(belief) + np.concatenate(([0.0], total.cumsum()))

    def _best(self, tokens: Array, seconds: Array, load: Load) -> tuple[float, int]:
        """The best rate, and the length that has it."""
        lengths, rates = self._within_reach(load), tokens / seconds
        best = int(lengths[rates[lengths].argmax()])
        if rates[best] < (1 + MARGIN + WARY * self.account.overdrawn) * rates[0]:
            best = 0
        return float(rates[best]), best

    def _other(self, plan: Plan, tokens: Array, seconds: Array, hoped: Array) -> int:
        """Instead of the best length one that may be better: of those that are nearly as good, one that was
        not run for long; of those that would have to be made ready, one that promises enough for that."""
        load, rates, known = plan.load, tokens / seconds, self.costs.known(plan.load)
        near = [g for g in self._within_reach(load) if g and g in known and rates[g] >= NEARLY * plan.rate]
        oldest = max(near, key=lambda g: self.costs.since(load, g), default=plan.g)
        if plan.g and self.account.balance > 0 and self.costs.since(load, oldest) > REVISIT:
            return int(oldest)
        return plan.g if load.ready is None else self._made(plan, tokens, hoped, load.ready)

    def _made(self, plan: Plan, tokens: Array, hoped: Array, ready: frozenset[int]) -> int:
        """A length to make ready, or the best one of those that are. What it would have saved is added up
        until it is as much as making it takes: so both together are at most twice what had to be lost."""
        load, gains = plan.load, tokens / hoped / plan.rate - 1
        eager = len(ready - {0}) < EAGER and (plan.g == 0 or self.costs.count(load) < YOUNG)
        if plan.g == 0:  # a bet
            eager &= self.account.balance > STAKE * self._booked(self.costs.making, float(hoped[0]))
        best, most = plan.g, NOVEL if plan.g else WORTH - 1
        for g in self._grown(load):
            gain = gains[g]
            if g == 0 or g in ready or gain <= NOVEL:
                continue
            key = size_of(load), int(g)
            self._hopes[key] = self._hopes.get(key, 0.0) + gain / (1 + gain) * float(hoped[plan.g])
            if gain > most and (eager or self._hopes[key] > self.costs.making):
                best, most = int(g), gain
        return best

    def _hoped(self, passes: Array, load: Load) -> Array:
        """A pass of a length that was never run may take less than is thought: no more than the longest that
        was, as long as there are no two besides a plain one. Otherwise, where it has to be made ready, which
        is not done for little, half of what it is thought to take more than the next shorter one."""
        known = self.costs.known(load)
        found: Array = passes / (1 + NOVEL)
        if load.ready is None:
            found[known] = passes[known]
        else:
            shorter = np.array(known)[np.searchsorted(known, np.arange(self.most + 1), side="right") - 1]
            found = (passes + passes[shorter]) / 2
        if len(known) <= 2:
            found[known[-1] :] = passes[known[-1]]
        return found

    def _try(self, tokens: Array, seconds: Array, hoped: Array, load: Load, rows: int) -> int:
        """Where nothing pays by what is believed, or nothing is: the length that is expected to lose least,
        if it may pay and there is time for it; or 0, and when to think of it again."""
        lengths = self._grown(load)
        rates = (HOPE ** np.arange(self.most + 1)).cumsum() / hoped
        hopeless = rates[lengths].max() < WORTH * rates[0]
        lengths = self._within_reach(load)[1:] if len(self._within_reach(load)) > 1 else lengths[1:]
        losses = (1 + MARGIN) * hoped[lengths] / seconds[0] - tokens[lengths] / rows
        g, loss = int(lengths[losses.argmin()]), float(losses.min())
        reading = self.costs.missed(load) / float(seconds[0])
        if loss < 0:  # what is believed to be won speaks for reading what was missed
            loss, reading = 0.0, max(0.0, reading + HORIZON * loss)
        made = load.ready is None or g in load.ready
        once = 0.0 if made else self._booked(self.costs.making, float(seconds[0]))
        wait = self.account.wait(loss, reading, once, math.inf if self._good else self._rested)
        if hopeless:
            wait = max(wait, RETHINK - self._rested)
        if self._bet is not None:  # its outcome decides
            return 0
        if wait > 0:
            thinking = (time.perf_counter() - self._begun) / float(seconds[0]) / THINKING
            # Where there is news without guesses, more may come at any time.
            self._wait = round(min(PATIENCE, max(wait if self._blind else 0, thinking)))
            return 0
        self._bet = Bet(loss + reading, self.belief.time)
        return g

    @staticmethod
    def _booked(making: float, plain: float) -> float:
        """Plain passes that making a length ready is booked as."""
        return min(making / plain, MADE)

    def _within_reach(self, load: Load) -> Levels:
        """Of lengths up to some way beyond those that were run, those that are ready; all at first."""
        grown, known = self._grown(load), self.costs.known(load)
        if load.ready is None or (known == [0] and load.ready <= {0}):
            return grown
        found: Levels = grown[[g == 0 or g in load.ready for g in grown.tolist()]]
        return found

    def _grown(self, load: Load) -> Levels:
        """Lengths up to some way beyond those that were run with such a batch."""
        found: Levels = self._lengths[self._lengths <= max(START, GROWTH * self.costs.known(load)[-1])]
        return found

    @property
    def idle(self) -> bool:
        return self._asking.rest > 0

    @property
    def asks(self) -> bool:
        plan = self._plan
        return plan is not None and plan.rate > 0 and self.costs.step(plan.load) >= ASKING

    def enough(self, confidence: Sequence[float]) -> bool:
        plan = self._plan
        if plan is None:
            return False
        drawn = len(plan.levels)
        level = self.signal.level(confidence)
        first = self.belief.reach(self.signal.shifts())[..., 0]  # [LEVELS, len(ALPHAS)]
        next_kept = (plan.belief * first[level]).sum(1)  # [R]
        later = plan.belief @ self.belief.reach()  # [R, most]
        chances = np.concatenate((np.ones((len(later), 1)), later), axis=1)[:, : max(1, plan.g - drawn)]
        tokens = ((plan.alive * next_kept) @ chances).cumsum()  # of 1, 2, ... further guesses
        passes = self.costs.passes(plan.load)
        ends = np.arange(drawn + 1, drawn + 1 + len(tokens))
        # To draw a token takes the step to the next one, too, unless it is the last.
        steps = ends - drawn - (ends >= plan.g)
        seconds = passes[ends] - passes[drawn] + self.costs.step(plan.load) * steps
        if (tokens <= plan.rate * seconds).all() and plan.load.unread == 0:
            return True
        plan.levels.append(level)
        plan.alive = plan.alive * next_kept
        return False

    def observe(self, done: Done) -> None:
        guessed = done.g > 0
        self.belief.time += 1
        if done.seconds is None:
            self.costs.note_making(done.making)
            size = size_of(done.load)  # the others are to be better than this one
            self._hopes = {key: hope for key, hope in self._hopes.items() if key[0] != size}
        else:
            self.costs.note(done.load, done.g, done.seconds - done.draft_seconds)
        if done.steps or done.catching_up:
            self.costs.note_draft(done.load, done.steps, done.draft_seconds, done.catching_up)
        bet = self._bet
        if bet is not None and (guessed or done.steps or self.belief.time > bet.made + LATE):
            self._bet = None
        tried = bet is not None and self._bet is None
        if self._learn(done):
            self._good = (tried or self._good) and self._went_well(done)
            self._blind = 0
        else:
            self._blind += 1
        self._rested += 1
        if guessed or done.steps:
            self._rested = self._wait = 0
        self._asking.over()
        asked = done.draft_seconds > 0 and not done.steps
        plain = self.costs.plain(done.load) if guessed or done.steps or asked else None
        gain = once = 0.0
        if plain is not None and (guessed or done.steps):
            if done.seconds is not None:
                gain = self._brought(done) - (done.seconds + done.catching_up) / plain
            if tried:
                once = self._booked(done.making + done.reading_made, plain)
        if asked and plain is not None:
            taken = done.draft_seconds / plain
            self._asking.book(taken, gain + taken if guessed else 0.0, any(done.unused))
        self.account.book(gain, bet.loss if tried and bet is not None else 0.0, once)
        self._since_plain = self._since_plain + 1 if guessed else 0

    def _brought(self, done: Done) -> float:
        """Tokens of a row in such an iteration: of a draft, by what is believed now, as luck would soon be
        larger than what is to be seen."""
        if not done.steps:
            return sum(done.accepted) / len(done.rows) + 1
        reach = self.belief.now(done.rows) @ self.belief.reach()  # [R, most]
        drafted = np.arange(self.most) < np.array(done.drafted)[:, None]
        return float((reach * drafted).sum()) / len(done.rows) + 1

    def _went_well(self, done: Done) -> bool:
        """Whether some length would pay if as many were kept always as of the guesses of this try, and one
        more."""
        kept = np.array(done.accepted)
        judged = int(np.minimum(done.asked or done.drafted, kept + 1).sum())
        if not kept.any() or self.costs.plain(done.load) is None:
            return False
        places = np.arange(self.most + 1)
        rates = (((kept.sum() + 1) / (judged + 1)) ** places).cumsum()
        rates /= self.costs.passes(done.load) + self.costs.step(done.load) * places
        return bool(rates[self._grown(done.load)].max() > (1 + MARGIN) * rates[0])

    def _learn(self, done: Done) -> bool:
        """From what was scored, and from the guess after it that was not; whether there was any."""
        if not (done.steps or any(done.asked or done.drafted) or any(one is not None for one in done.unused)):
            return False
        tested, kept = np.array(done.asked or done.drafted, dtype=int), np.array(done.accepted, dtype=int)
        if done.steps and not tested.any():  # a draft that was stopped before its first token was no good
            tested[:] = 1
        for i, right in enumerate(done.unused):
            if right is not None and kept[i] == tested[i]:
                tested[i] += 1
                kept[i] += right
        some = np.flatnonzero(tested).tolist()
        plan, shift = self._plan, None
        at = np.array([-1 if plan is None else plan.places.get(done.rows[i], -1) for i in some])
        if plan is not None and plan.hinted and (at >= 0).all():
            shift = self.signal.shifts()[plan.levels[0][at]]
        self.belief.learn([done.rows[i] for i in some], tested[some], kept[some], shift)
        for place, level in enumerate([] if plan is None else plan.levels):
            reached = (at >= 0) & (place < tested[some]) & (place <= kept[some])
            if reached.any():
                self.signal.learn(level[at[reached]], place < kept[some][reached])
        return True

    def reset(self, rows: Sequence[int]) -> None:
        self.belief.forget(rows)
        self._wait = self._asking.rest = 0  # another text may be another matter
        self._good = False

    def __repr__(self) -> str:
        return f"Goodput({self.most})"

"""What each length promises, by what is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.length.base import Done, Hint, Load
from outpace.length.belief import Array, Belief, Levels, Signal
from outpace.length.costs import Costs

LADDER = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # lengths that are tried: on a GPU each takes a graph
START = 2  # the first length that is tried, while nothing is known of costs
GROWTH = 2  # times the longest pass that was measured: so far costs are guessed
NOVEL = 0.03  # in favour of a length that was never run; what it must promise, if it has to be made ready
HOPE = 0.9  # acceptance that tries hope for
WORTH = 1.1  # what it would have to bring


@dataclass
class Plan:
    """What was thought when an iteration began.

    places   of slots, among the rows
    load     what the pass is over
    costs    what passes take that are made in its way
    room     guesses at most, of each row
    belief   `[R, len(ALPHAS)]`
    hinted   whether there is a level of confidence for all guesses, known before
    levels   of confidence, `[R]` for each guess
    alive    `[R]`: probability that all guesses so far are kept
    known    lengths that were run with such a batch, more than once
    grown    lengths up to some way beyond those
    lengths  of those, the ones that are ready; all at first
    tokens   `[most + 1]`: that all rows together may expect, by g
    seconds  `[most + 1]`: that it is thought to take
    hoped    `[most + 1]`: that it may take, as lengths that were never run may take less
    rate     tokens a second that are within reach
    g        what was chosen
    """

    places: dict[int, int]
    load: Load
    costs: Costs
    room: Levels
    belief: Array
    hinted: bool
    levels: list[Levels]
    known: list[int]
    grown: Levels
    lengths: Levels
    tokens: Array
    seconds: Array
    hoped: Array
    alive: Array = field(init=False)
    rate: float = 0.0
    g: int = 0

    def __post_init__(self) -> None:
        self.alive = np.ones(len(self.belief))

    @property
    def plain(self) -> float:
        """Seconds without guesses."""
        return float(self.seconds[0])

    @property
    def hopeless(self) -> bool:
        """Whether no length would be worth while even if nearly all guesses were kept."""
        rates = (HOPE ** np.arange(len(self.hoped))).cumsum() / self.hoped
        return bool(rates[self.grown].max() < WORTH * rates[0])

    @property
    def tried(self) -> list[int]:
        """Of the lengths that there are to choose from, those that were run."""
        return [g for g in self.lengths.tolist() if g and g in self.known]

    def losses(self, margin: float = 0.0) -> Array:
        """`[most + 1]`: plain passes that each g is expected to lose, if it has to bring so much more than it
        takes."""
        found: Array = (1 + margin) * self.hoped / self.plain - self.tokens / len(self.belief)
        return found


class Outlook:
    """How likely guesses are to be kept, what iterations take, and what follows from both."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.belief, self.signal = Belief(most), Signal()
        self._ways: dict[str, Costs] = {}
        self._lengths = np.array([g for g in LADDER if g < most] + [most])
        self._places = np.arange(most + 1)

    def at(self, load: Load) -> Costs:
        """What is known of passes that are made in this way."""
        if load.way not in self._ways:
            self._ways[load.way] = Costs(self.most)
        return self._ways[load.way]

    def plan(self, rows: Sequence[int], load: Load, hint: Hint | None, sure: bool) -> Plan:
        """For these slots, with a batch of which a plain pass was measured. sure: what was seen once may have
        been an accident."""
        belief, costs = self.belief.now(rows), self.at(load)
        room, levels = self._used(np.full(len(rows), self.most), load), []
        if hint is not None:
            room = np.minimum(hint.lengths, room)
            levels.append(self.signal.level(hint.confidence))
        known = costs.known(load)
        grown = self._grown(known)
        if load.ready is not None:
            grown = grown[[_fits(g, load, int(room.max())) for g in grown.tolist()]]
        passes = costs.passes(load, sure)
        drafts = costs.drafts(load)
        return Plan(
            places={row: i for i, row in enumerate(rows)},
            load=load,
            costs=costs,
            room=room,
            belief=belief,
            hinted=hint is not None,
            levels=levels,
            known=known,
            grown=grown,
            lengths=_ready(grown, known, load),
            tokens=self._tokens(belief, room, levels),
            seconds=passes + drafts,
            hoped=self._hoped(passes, known, load) + drafts,
        )

    def _grown(self, known: list[int]) -> Levels:
        """Lengths up to some way beyond those that were run."""
        most = max(START, GROWTH * known[-1])
        return self._lengths[: np.searchsorted(self._lengths, most, side="right")]

    def _tokens(self, belief: Array, room: Levels, levels: Sequence[Levels]) -> Array:
        if levels:
            by_level = self.belief.reach(self.signal.shifts())
            kept = (belief[:, None] @ by_level[levels[0]])[:, 0]
        else:
            kept = belief @ self.belief.reach()
        found = np.full(self.most + 1, float(len(belief)))
        found[1:] += (kept * self.belief.first[room]).sum(0).cumsum()
        return found

    def _hoped(self, passes: Array, known: list[int], load: Load) -> Array:
        """A pass of a length that was never run may take less than is thought: no more than the longest that
        was, as long as there are no two besides a plain one. Otherwise, where it has to be made ready, which
        is not done for little, half of what it is thought to take more than the next shorter one."""
        found: Array = passes / (1 + NOVEL)
        if load.ready is None:
            found[known] = passes[known]
        else:
            shorter = np.array(known)[np.searchsorted(known, self._places, side="right") - 1]
            found = (passes + passes[shorter]) / 2
        if len(known) <= 2:
            found[known[-1] :] = passes[known[-1]]
        return found

    def further(self, plan: Plan, confidence: Sequence[float]) -> tuple[Levels, Array, Array]:
        """Of a guess that is about to be drawn: its levels of confidence, `[R]`; the probability that it is
        kept if all before it are, `[R]`; and the tokens that 1, 2, ... further guesses promise."""
        level = self.signal.level(confidence)
        first = self.belief.reach(self.signal.shifts())[..., 0]  # [LEVELS, len(ALPHAS)]
        kept = (plan.belief * first[level]).sum(1)  # [R]
        later = plan.belief @ self.belief.reach()  # [R, most]
        chances = np.concatenate((np.ones((len(later), 1)), later), axis=1)
        chances = chances[:, : max(1, plan.g - len(plan.levels))]
        return level, kept, ((plan.alive * kept) @ chances).cumsum()

    def keeps(self, done: Done) -> float:
        """Guesses of a row that such an iteration keeps and that the row has use for, by what is believed
        now: luck would soon be larger than what is to be seen."""
        reach = self.belief.now(done.rows) @ self.belief.reach()  # [R, most]
        asked = self._used(np.minimum(done.asked or done.drafted, self.most), done.load)
        return float((reach * self.belief.first[asked]).sum()) / len(done.rows)

    def _used(self, guesses: Levels, load: Load) -> Levels:
        """Of so many of each row, those that it has use for."""
        if load.room is None:
            return guesses
        found: Levels = np.maximum(np.minimum(guesses, load.room), 0)
        return found

    def would_pay(self, done: Done, margin: float) -> bool:
        """Whether some length would pay if as many were kept always as of these guesses, and one more."""
        kept, costs = np.array(done.accepted), self.at(done.load)
        judged = int(np.minimum(done.asked or done.drafted, kept + 1).sum())
        if not kept.any() or costs.plain(done.load) is None:
            return False
        rates = (((kept.sum() + 1) / (judged + 1)) ** self._places).cumsum()
        rates /= costs.passes(done.load) + costs.drafts(done.load)
        return bool(rates[self._grown(costs.known(done.load))].max() > (1 + margin) * rates[0])

    def learn(self, done: Done, plan: Plan | None) -> bool:
        """From an iteration: what was scored, and the guess after it that was not; whether there was any."""
        self.belief.time += 1
        if not (done.steps or any(done.asked or done.drafted) or any(one is not None for one in done.unused)):
            return False
        tested, kept = np.array(done.asked or done.drafted, dtype=int), np.array(done.accepted, dtype=int)
        if done.steps and not tested.any():  # a draft that was stopped before its first token was no good
            tested[:] = 1
        for i, right in enumerate(done.unused):
            if right is not None and kept[i] == tested[i]:
                tested[i] += 1
                kept[i] += right
        rows = done.rows
        if not tested.all():
            some = np.flatnonzero(tested)
            tested, kept = tested[some], kept[some]
            rows = [rows[i] for i in some.tolist()]
        if plan is None or not plan.levels:
            self.belief.learn(rows, tested, kept)
            return True
        at = np.array([plan.places.get(row, -1) for row in rows])
        hinted = plan.hinted and bool((at >= 0).all())
        self.belief.learn(rows, tested, kept, self.signal.shifts()[plan.levels[0][at]] if hinted else None)
        for place, level in enumerate(plan.levels):
            reached = (at >= 0) & (place < tested) & (place <= kept)
            if reached.any():
                self.signal.learn(level[at[reached]], place < kept[reached])
        return True


def _fits(g: int, load: Load, most: int) -> bool:
    """Whether a length may be run where some are ready: that may be a longer one than there is use for, if it
    is padded. Others are made ready for no more than there is, and for no text's last tokens."""
    assert load.ready is not None
    if g == 0 or g in load.ready:
        return g <= most or load.padded
    ending = load.room is not None and max(load.room) < max(load.ready, default=0)
    return g <= most and not ending


def _ready(grown: Levels, known: list[int], load: Load) -> Levels:
    """Of these lengths, those that are ready; all at first."""
    if load.ready is None or (known == [0] and load.ready <= {0}):
        return grown
    found: Levels = grown[[g == 0 or g in load.ready for g in grown.tolist()]]
    return found

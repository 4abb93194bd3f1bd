"""Forecast of the tokens and seconds of a step, for each g."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.policy.acceptance import AcceptanceEstimate, Array, Levels, Signal
from outpace.policy.base import Hint, Load, StepOutcome
from outpace.policy.costs import Costs

LADDER = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # candidates for g: on a GPU each needs a CUDA graph
START = 2  # longest candidate, while no costs are known
GROWTH = 2  # times the longest measured g: the limit of the candidates
NOVEL = 0.03  # bonus of a g that was never run; gain that it must promise, if it needs a capture
HOPE = 0.9  # acceptance rate that probes hope for
WORTH = 1.1  # speedup that it would have to bring


@dataclass
class Choice:
    """Estimates at the start of a step, and the choice.

    Attributes:
        places: Index of each slot among the rows.
        load: Size and limits of the pass.
        costs: Cost model of the executor.
        room: Largest number of draft tokens of each sequence.
        belief: Posterior ``[R, len(ALPHAS)]``.
        hinted: True if one confidence level for all draft tokens is known before the choice.
        levels: Confidence levels ``[R]`` of each draft token.
        known: Values of g that were run more than once with such a batch.
        grown: Candidates for g, up to some way beyond ``known``.
        lengths: Candidates that need no capture. All at first.
        tokens: ``[most + 1]``, expected tokens of all sequences together, by g.
        seconds: ``[most + 1]``, expected seconds of the step, by g.
        hoped: ``[most + 1]``, optimistic seconds, because a g that was never run may take less.
        alive: ``[R]``, probability that all draft tokens so far are accepted.
        rate: Tokens per second within reach.
        g: The choice.
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
        """Seconds of a baseline step."""
        return float(self.seconds[0])

    @property
    def hopeless(self) -> bool:
        """True if no g would pay, even if nearly all draft tokens were accepted."""
        rates = (HOPE ** np.arange(len(self.hoped))).cumsum() / self.hoped
        return bool(rates[self.grown].max() < WORTH * rates[0])

    @property
    def tried(self) -> list[int]:
        """Candidates above 0 that were run already and need no capture."""
        return [g for g in self.lengths.tolist() if g and g in self.known]

    def losses(self, margin: float = 0.0) -> Array:
        """Return the baseline steps that each g is expected to lose, ``[most + 1]``.

        Args:
            margin: Fraction by which the tokens of a step must exceed its cost.
        """
        found: Array = (1 + margin) * self.hoped / self.plain - self.tokens / len(self.belief)
        return found


class Forecast:
    """Forecast from the acceptance estimate and the cost model.

    Args:
        most: Largest number of draft tokens.

    Attributes:
        belief: Acceptance estimate of each slot.
        signal: Correction by the drafter's confidence.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.belief, self.signal = AcceptanceEstimate(most), Signal()
        self._ways: dict[str, Costs] = {}
        self._lengths = np.array([g for g in LADDER if g < most] + [most])
        self._places = np.arange(most + 1)

    def at(self, load: Load) -> Costs:
        """Return the cost model of the executor that the load names."""
        if load.way not in self._ways:
            self._ways[load.way] = Costs(self.most)
        return self._ways[load.way]

    def plan(self, rows: Sequence[int], load: Load, hint: Hint | None, sure: bool) -> Choice:
        """Return the estimates for a step.

        Args:
            rows: Slots of the sequences.
            load: Size and limits of the pass. A baseline pass must have been measured with such a batch.
            hint: Draft of a free drafter.
            sure: True to ignore times that were measured only once, which may be outliers.
        """
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
        return Choice(
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
        """Return the candidates up to some way beyond the measured ones."""
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
        """Return optimistic seconds of passes, by g.

        A pass with a g that was never run may take less than estimated. While at most one g above 0 was
        measured, longer ones are assumed to take no more. Later, a g that needs a capture is assumed to take
        half of its estimated extra time over the next shorter measured one. A capture is not made for less.
        """
        found: Array = passes / (1 + NOVEL)
        if load.ready is None:
            found[known] = passes[known]
        else:
            shorter = np.array(known)[np.searchsorted(known, self._places, side="right") - 1]
            found = (passes + passes[shorter]) / 2
        if len(known) <= 2:
            found[known[-1] :] = passes[known[-1]]
        return found

    def further(self, plan: Choice, confidence: Sequence[float]) -> tuple[Levels, Array, Array]:
        """Forecast the draft tokens that are about to be sampled.

        Returns:
            Three arrays. The first has the confidence levels ``[R]`` of the next draft token. The second has
            the probability ``[R]`` that it is accepted if all before it are. The third has the expected
            tokens of 1, 2, ... further draft tokens.
        """
        level = self.signal.level(confidence)
        first = self.belief.reach(self.signal.shifts())[..., 0]  # [LEVELS, len(ALPHAS)]
        kept = (plan.belief * first[level]).sum(1)  # [R]
        later = plan.belief @ self.belief.reach()  # [R, most]
        chances = np.concatenate((np.ones((len(later), 1)), later), axis=1)
        chances = chances[:, : max(1, plan.g - len(plan.levels))]
        return level, kept, ((plan.alive * kept) @ chances).cumsum()

    def keeps(self, done: StepOutcome) -> float:
        """Return the expected number of accepted draft tokens per sequence, of those it can use.

        The estimate counts, not the outcome, because luck would soon exceed the differences of interest.
        """
        reach = self.belief.now(done.rows) @ self.belief.reach()  # [R, most]
        asked = self._used(np.minimum(done.asked or done.drafted, self.most), done.load)
        return float((reach * self.belief.first[asked]).sum()) / len(done.rows)

    def _used(self, proposals: Levels, load: Load) -> Levels:
        """Limit the draft tokens of each sequence to those that it can use."""
        if load.room is None:
            return proposals
        found: Levels = np.maximum(np.minimum(proposals, load.room), 0)
        return found

    def would_pay(self, done: StepOutcome, margin: float) -> bool:
        """Return whether some g would pay at the acceptance of this step plus one accepted token.

        Args:
            done: Outcome of the step.
            margin: Fraction by which speculation must be faster.
        """
        kept, costs = np.array(done.accepted), self.at(done.load)
        judged = int(np.minimum(done.asked or done.drafted, kept + 1).sum())
        if not kept.any() or costs.plain(done.load) is None:
            return False
        rates = (((kept.sum() + 1) / (judged + 1)) ** self._places).cumsum()
        rates /= costs.passes(done.load) + costs.drafts(done.load)
        return bool(rates[self._grown(costs.known(done.load))].max() > (1 + margin) * rates[0])

    def learn(self, done: StepOutcome, plan: Choice | None) -> bool:
        """Learn the acceptance from a step.

        Both the scored draft tokens and the first one that was not scored count.

        Returns:
            True if there was anything to learn.
        """
        self.belief.time += 1
        if not (done.steps or any(done.asked or done.drafted) or any(one is not None for one in done.unused)):
            return False
        tested, kept = np.array(done.asked or done.drafted, dtype=int), np.array(done.accepted, dtype=int)
        if done.steps and not tested.any():  # a draft stopped before its first token counts as rejected
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
    """Return whether a g may be run where some are captured.

    A captured g may be longer than the sequences can use, if the pass is padded. No longer g is captured than
    they can use, and none for the last tokens of sequences.
    """
    assert load.ready is not None
    if g == 0 or g in load.ready:
        return g <= most or load.padded
    ending = load.room is not None and max(load.room) < max(load.ready, default=0)
    return g <= most and not ending


def _ready(grown: Levels, known: list[int], load: Load) -> Levels:
    """Return the candidates that need no capture, or all at first."""
    if load.ready is None or (known == [0] and load.ready <= {0}):
        return grown
    found: Levels = grown[[g == 0 or g in load.ready for g in grown.tolist()]]
    return found

"""Forecast of the tokens and seconds of a step, for each number of draft tokens g."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.policy.acceptance import AcceptanceEstimate, Array, ConfidenceCorrection, Ints
from outpace.policy.base import Hint, Load, StepOutcome
from outpace.policy.costs import Costs

CANDIDATES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # values of g: on a GPU each needs a CUDA graph
INITIAL_MAX_G = 2  # draft tokens; largest candidate while only the baseline was measured
GROWTH = 2  # times the largest measured g; larger candidates are left out
UNMEASURED_BONUS = 0.03  # fraction by which a g that was never run is assumed to be faster than estimated
HOPEFUL_ALPHA = 0.9  # acceptance rate; if no g would pay even at this rate, probes are rare
MIN_SPEEDUP = 1.1  # times the baseline; least expected speedup of frequent probes, and of a first capture


@dataclass
class Choice:
    """Estimates for one step, and the chosen number of draft tokens g.

    Attributes:
        indices: Index of each slot in the arrays ``[R, ...]``.
        load: Size and limits of the forward pass.
        costs: Cost model of the executor.
        limits: Largest number of draft tokens of each sequence.
        posterior: Posterior of the acceptance rates, ``[R, len(ALPHAS)]``.
        hinted: True for a free drafter, whose confidence in the whole draft is known before the choice.
        levels: Confidence levels ``[R]``: an array per draft token, or one for all of them if ``hinted``.
        measured: Values of g that were run more than once with such a batch.
        candidates: Values of g to choose from. Some may be larger than all in ``measured``.
        runnable: Candidates that need no capture. Before the first capture, all candidates.
        tokens: ``[max_draft_tokens + 1]``, expected tokens of all sequences together, by g.
        seconds: ``[max_draft_tokens + 1]``, expected seconds of the step, by g.
        optimistic_seconds: ``[max_draft_tokens + 1]``, ``seconds`` with smaller values for g that were never
            run.
        all_accepted: ``[R]``, probability that all draft tokens so far are accepted.
        rate: Largest expected throughput, in tokens per second.
        g: The chosen number of draft tokens per sequence.
    """

    indices: dict[int, int]
    load: Load
    costs: Costs
    limits: Ints
    posterior: Array
    hinted: bool
    levels: list[Ints]
    measured: list[int]
    candidates: Ints
    runnable: Ints
    tokens: Array
    seconds: Array
    optimistic_seconds: Array
    all_accepted: Array = field(init=False)
    rate: float = 0.0
    g: int = 0

    def __post_init__(self) -> None:
        self.all_accepted = np.ones(len(self.posterior))

    @property
    def baseline_seconds(self) -> float:
        """Seconds of a baseline step."""
        return float(self.seconds[0])

    @property
    def hopeless(self) -> bool:
        """True if no g would pay, even if nearly all draft tokens were accepted."""
        seconds = self.optimistic_seconds
        rates = (HOPEFUL_ALPHA ** np.arange(len(seconds))).cumsum() / seconds
        return bool(rates[self.candidates].max() < MIN_SPEEDUP * rates[0])

    @property
    def measured_runnable(self) -> list[int]:
        """Candidates above 0 that were measured and need no capture."""
        return [g for g in self.runnable.tolist() if g and g in self.measured]

    def losses(self, margin: float = 0.0) -> Array:
        """Return the expected loss of each g in baseline steps, ``[max_draft_tokens + 1]``.

        Args:
            margin: Fraction by which the tokens of a step must exceed its cost.
        """
        cost = (1 + margin) * self.optimistic_seconds / self.baseline_seconds
        losses: Array = cost - self.tokens / len(self.posterior)
        return losses


class Forecast:
    """Forecast from the acceptance estimate and the cost model.

    Args:
        max_draft_tokens: Largest number of draft tokens.

    Attributes:
        acceptance: Acceptance estimate of each slot.
        confidence: Correction by the drafter's confidence.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.acceptance, self.confidence = AcceptanceEstimate(max_draft_tokens), ConfidenceCorrection()
        self._costs: dict[str, Costs] = {}  # by executor
        self._candidates = np.array([g for g in CANDIDATES if g < max_draft_tokens] + [max_draft_tokens])
        self._every_g = np.arange(max_draft_tokens + 1)

    def costs(self, load: Load) -> Costs:
        """Return the cost model of the executor that the load names."""
        if load.executor not in self._costs:
            self._costs[load.executor] = Costs(self.max_draft_tokens)
        return self._costs[load.executor]

    def plan(self, slots: Sequence[int], load: Load, hint: Hint | None, confirmed_only: bool) -> Choice:
        """Return the estimates for a step.

        Args:
            slots: Slots of the sequences.
            load: Size and limits of the pass. A baseline pass with such a batch must have been measured.
            hint: Draft of a free drafter.
            confirmed_only: True to ignore times that were measured only once, which may be outliers.
        """
        posterior, costs = self.acceptance.posterior(slots), self.costs(load)
        limits, levels = self._within_remaining(np.full(len(slots), self.max_draft_tokens), load), []
        if hint is not None:
            limits = np.minimum(hint.lengths, limits)
            levels.append(self.confidence.level(hint.confidence))
        measured = costs.measured(load)
        candidates = self._candidates_beyond(measured)
        if load.captured is not None:
            candidates = candidates[[_may_run(g, load, int(limits.max())) for g in candidates.tolist()]]
        pass_seconds = costs.pass_seconds(load, confirmed_only)
        draft_seconds = costs.draft_seconds(load)
        return Choice(
            indices={slot: i for i, slot in enumerate(slots)},
            load=load,
            costs=costs,
            limits=limits,
            posterior=posterior,
            hinted=hint is not None,
            levels=levels,
            measured=measured,
            candidates=candidates,
            runnable=_runnable(candidates, measured, load),
            tokens=self._tokens(posterior, limits, levels),
            seconds=pass_seconds + draft_seconds,
            optimistic_seconds=self._optimistic_pass_seconds(pass_seconds, measured, load) + draft_seconds,
        )

    def _candidates_beyond(self, measured: list[int]) -> Ints:
        """Return the candidates, up to ``GROWTH`` times the largest measured g."""
        longest = max(INITIAL_MAX_G, GROWTH * measured[-1])
        return self._candidates[: np.searchsorted(self._candidates, longest, side="right")]

    def _tokens(self, posterior: Array, limits: Ints, levels: Sequence[Ints]) -> Array:
        """Return the expected tokens of all sequences together, by g."""
        if levels:
            by_level = self.acceptance.prefix_probability(self.confidence.shifts())
            accepted = (posterior[:, None] @ by_level[levels[0]])[:, 0]
        else:
            accepted = posterior @ self.acceptance.prefix_probability()
        tokens = np.full(self.max_draft_tokens + 1, float(len(posterior)))
        tokens[1:] += (accepted * self.acceptance.prefix_mask[limits]).sum(0).cumsum()
        return tokens

    def _optimistic_pass_seconds(self, pass_seconds: Array, measured: list[int], load: Load) -> Array:
        """Return optimistic seconds of passes, by g.

        For a g that was never run, they are below the estimate, so that it is tried. While at most one g
        above 0 was measured, larger g are assumed to take as long as the largest measured one. Later, without
        captures, the estimate is divided by 1 + ``UNMEASURED_BONUS``. With captures, it is the mean of the
        estimate and the seconds of the next smaller measured g.
        """
        optimistic: Array = pass_seconds / (1 + UNMEASURED_BONUS)
        if load.captured is None:
            optimistic[measured] = pass_seconds[measured]
        else:
            shorter = np.array(measured)[np.searchsorted(measured, self._every_g, side="right") - 1]
            optimistic = (pass_seconds + pass_seconds[shorter]) / 2
        if len(measured) <= 2:
            optimistic[measured[-1] :] = pass_seconds[measured[-1]]
        return optimistic

    def next_draft_tokens(self, plan: Choice, confidence: Sequence[float]) -> tuple[Ints, Array, Array]:
        """Forecast the draft tokens that are about to be sampled.

        Returns:
            Three arrays. The first has the confidence levels ``[R]`` of the next draft token. The second has
            the probability ``[R]`` that it is accepted if all draft tokens before it are. The third has the
            expected number of accepted tokens among 1, 2, ... further draft tokens.
        """
        level = self.confidence.level(confidence)
        by_level = self.acceptance.prefix_probability(self.confidence.shifts())
        first = by_level[..., 0]  # [LEVELS, len(ALPHAS)]
        accepted = (plan.posterior * first[level]).sum(1)  # [R]
        later = plan.posterior @ self.acceptance.prefix_probability()  # [R, max_draft_tokens]
        all_before = np.concatenate((np.ones((len(later), 1)), later), axis=1)
        all_before = all_before[:, : max(1, plan.g - len(plan.levels))]
        return level, accepted, ((plan.all_accepted * accepted) @ all_before).cumsum()

    def expected_accepted(self, done: StepOutcome) -> float:
        """Return the expected number of accepted draft tokens per sequence, up to its remaining tokens.

        The budget uses this estimate instead of the accepted tokens of the step, which are too noisy.
        """
        prefix_probability = self.acceptance.posterior(done.slots) @ self.acceptance.prefix_probability()
        requested = np.minimum(done.requested or done.drafted, self.max_draft_tokens)
        usable = self.acceptance.prefix_mask[self._within_remaining(requested, done.load)]
        return float((prefix_probability * usable).sum()) / len(done.slots)

    def _within_remaining(self, proposals: Ints, load: Load) -> Ints:
        """Limit the draft tokens of each sequence to those that it can use."""
        if load.remaining_draft_tokens is None:
            return proposals
        limited: Ints = np.maximum(np.minimum(proposals, load.remaining_draft_tokens), 0)
        return limited

    def would_pay(self, done: StepOutcome, margin: float) -> bool:
        """Return whether some g would pay at the acceptance rate of this step, plus one accepted token.

        Args:
            done: Outcome of the step.
            margin: Fraction by which speculation must be faster.
        """
        accepted, costs = np.array(done.accepted), self.costs(done.load)
        tested = int(np.minimum(done.requested or done.drafted, accepted + 1).sum())
        if not accepted.any() or costs.baseline_seconds(done.load) is None:
            return False
        rates = (((accepted.sum() + 1) / (tested + 1)) ** self._every_g).cumsum()
        rates /= costs.pass_seconds(done.load) + costs.draft_seconds(done.load)
        best = rates[self._candidates_beyond(costs.measured(done.load))].max()
        return bool(best > (1 + margin) * rates[0])

    def learn(self, done: StepOutcome, plan: Choice | None) -> bool:
        """Learn the acceptance from a step.

        It uses the scored draft tokens, and the first proposed token that was not scored.

        Returns:
            True if there was anything to learn.
        """
        self.acceptance.step += 1
        requested = done.requested or done.drafted
        any_unscored = any(correct is not None for correct in done.unscored_correct)
        if not (done.draft_steps or any(requested) or any_unscored):
            return False
        tested, accepted = np.array(requested, dtype=int), np.array(done.accepted, dtype=int)
        if done.draft_steps and not tested.any():  # a draft stopped before its first token counts as rejected
            tested[:] = 1
        for i, correct in enumerate(done.unscored_correct):
            if correct is not None and accepted[i] == tested[i]:
                tested[i] += 1
                accepted[i] += correct
        slots = done.slots
        if not tested.all():
            with_draft = np.flatnonzero(tested)
            tested, accepted = tested[with_draft], accepted[with_draft]
            slots = [slots[i] for i in with_draft.tolist()]
        if plan is None or not plan.levels:
            self.acceptance.learn(slots, tested, accepted)
            return True
        index = np.array([plan.indices.get(slot, -1) for slot in slots])
        hinted = plan.hinted and bool((index >= 0).all())
        shift = self.confidence.shifts()[plan.levels[0][index]] if hinted else None
        self.acceptance.learn(slots, tested, accepted, shift)
        for position, level in enumerate(plan.levels):
            reached = (index >= 0) & (position < tested) & (position <= accepted)
            if reached.any():
                self.confidence.learn(level[index[reached]], position < accepted[reached])
        return True


def _may_run(g: int, load: Load, longest: int) -> bool:
    """Return whether a g may be run, if only some values are captured.

    If drafts are padded, a captured g may be larger than the sequences can use. A g that is not captured must
    not be larger. Shortly before all sequences end, no further g is captured.
    """
    assert load.captured is not None
    if g == 0 or g in load.captured:
        return g <= longest or load.padded_drafts
    remaining = load.remaining_draft_tokens
    ending = remaining is not None and max(remaining) < max(load.captured, default=0)
    return g <= longest and not ending


def _runnable(candidates: Ints, measured: list[int], load: Load) -> Ints:
    """Return the candidates that need no capture; before the first capture, all candidates."""
    if load.captured is None or (measured == [0] and load.captured <= {0}):
        return candidates
    runnable: Ints = candidates[[g == 0 or g in load.captured for g in candidates.tolist()]]
    return runnable

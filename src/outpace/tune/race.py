"""A race of candidates over whole texts, in which slow ones are dropped.

In a round, all remaining candidates decode one prompt, and so does the baseline. For n candidates the time is
divided into ⌈log2 n⌉ equal parts. At the end of each part the slower half is dropped, down to two (successive
halving). A candidate that is surely slower is dropped at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outpace.bench.runs import BASELINE, Cell, Run
from outpace.bench.spread import Rate
from outpace.bench.sweep import Sweep, rotated
from outpace.checks.errors import counted
from outpace.decoder import Decoder
from outpace.sampling import SamplingParams
from outpace.tune.candidate import Candidate
from outpace.tune.decision import MeasuredSpeedup, better_half, compare

SETTLED_PROMPTS = (
    6  # prompts after which a surely slower candidate is dropped, or a clear winner ends the race
)
NARROW = 0.05  # half-width of an interval, relative to the speedup, that is narrow enough
MAX_REPEATS = 3  # rounds with the same prompt at most
MIN_ROUNDS = 3  # rounds that there must be time for with all candidates that start

SecondsLeft = Callable[[], float]
Tell = Callable[[str], None]


@dataclass
class Record:
    """The measurements of a race.

    Attributes:
        rates: Tokens and seconds of each candidate, by prompt and by the number of its earlier rounds.
        baseline_rates: The same of the baseline in the same rounds, for each candidate.
        dropped: Why some candidates were not measured to the end.
        rounds: Number of rounds.
    """

    rates: dict[Candidate, dict[tuple[int, int], Rate]] = field(default_factory=dict)
    baseline_rates: dict[Candidate, dict[tuple[int, int], Rate]] = field(default_factory=dict)
    dropped: dict[Candidate, str] = field(default_factory=dict)
    rounds: int = 0

    def speedup(self, candidate: Candidate) -> MeasuredSpeedup | None:
        """Return the speedup of a candidate over the baseline; None if it was not measured."""
        return compare(self.rates.get(candidate, {}), self.baseline_rates.get(candidate, {}))


class Race:
    """A race of candidates.

    Args:
        decoders: Decoder of each candidate, the most promising first; its own policy is "auto".
        baseline: The candidate without speculation and its decoder.
        prompts: Token ids of each prompt.
        sampling: Sampling parameters.
        max_new_tokens: Maximum number of new tokens of a text.
        seed: Seed of sampling.
        text_seconds: Estimated seconds of a text, until one was timed.
        record: Receives the measurements.
    """

    def __init__(
        self,
        decoders: dict[Candidate, Decoder],
        baseline: tuple[Candidate, Decoder],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        max_new_tokens: int,
        seed: int,
        text_seconds: float,
        record: Record,
    ) -> None:
        self.candidates, self.record, self.text_seconds = list(decoders), record, text_seconds
        names = {one: f"{one.draft} {one.rule} {one.dtype}" for one in (*self.candidates, baseline[0])}
        by_name = {names[candidate]: decoder for candidate, decoder in (*decoders.items(), baseline)}
        self._decoders = by_name
        self.cells = {one: Cell(names[one], sampling, one.num_draft_tokens) for one in names}
        # With graphs, each draft has its own KV cache of the target, so drafts are measured one by one.
        self.one_draft_at_a_time = any(decoder.uses_graphs for decoder in by_name.values())
        self.baseline_cells = {
            one: Cell(names[one] if self.one_draft_at_a_time else names[baseline[0]], sampling, BASELINE)
            for one in self.candidates
        }
        num_draft_tokens = list(dict.fromkeys(one.num_draft_tokens for one in self.candidates))
        # The target's prefill is the same for all candidates and not counted; the draft's prefill is.
        self.sweep = Sweep(
            by_name,
            [sampling],
            num_draft_tokens,
            prompts,
            max_new_tokens=max_new_tokens,
            seed=seed,
            skipped_steps=1,
        )

    def rounds(
        self, seconds_left: SecondsLeft, tell: Tell = lambda line: None, first: int = 0
    ) -> Iterator[None]:
        """Measure rounds until the result is clear or no time is left, and yield after each.

        Args:
            seconds_left: Function that returns the seconds left.
            tell: Called with lines about the progress.
            first: Number of the first round.
        """
        groups: dict[Cell, list[Candidate]] = {}
        for candidate in self.candidates:
            groups.setdefault(self.baseline_cells[candidate], []).append(candidate)
        for i, (baseline, candidates) in enumerate(groups.items()):
            reserved = seconds_left() * (1 - 1 / (len(groups) - i))  # seconds for the other groups

            def group_seconds_left(reserved: float = reserved) -> float:
                return seconds_left() - reserved

            yield from self._group_rounds(baseline, candidates, group_seconds_left, tell, first)
            if self.one_draft_at_a_time:
                self.sweep.decoders[baseline.draft].release()

    def _group_rounds(
        self, baseline: Cell, candidates: list[Candidate], seconds_left: SecondsLeft, tell: Tell, first: int
    ) -> Iterator[None]:
        remaining = self._warm_up(baseline, candidates, seconds_left, tell)
        span, parts = seconds_left(), max(1, math.ceil(math.log2(max(1, len(remaining)))))
        part, num_prompts = 0, len(self.sweep.groups)
        for number in range(first, first + MAX_REPEATS * num_prompts):
            if not remaining or self._is_settled(remaining):
                return
            runs = self._round(baseline, remaining, number, seconds_left, tell)
            if runs is None:
                return
            for candidate in remaining:
                key = number % num_prompts, number // num_prompts
                run = runs[self.cells[candidate]]
                if run.tokens and runs[baseline].tokens:
                    self.record.rates.setdefault(candidate, {})[key] = _rate(run)
                    self.record.baseline_rates.setdefault(candidate, {})[key] = _rate(runs[baseline])
            self.record.rounds += 1
            yield
            remaining = self._drop_slower(remaining)
            if seconds_left() < span * (1 - (part + 1) / parts):
                part += 1
                remaining = self._drop_slower_half(remaining)

    def _warm_up(
        self, baseline: Cell, candidates: list[Candidate], seconds_left: SecondsLeft, tell: Tell
    ) -> list[Candidate]:
        """Warm up the candidates that there is time for, and return them."""
        max_candidates = len(candidates)
        if self.text_seconds:
            max_candidates = max(1, int(seconds_left() / (MIN_ROUNDS * self.text_seconds)) - 1)
        for candidate in candidates[max_candidates:]:
            self.record.dropped[candidate] = "no time to measure it: others are more promising"
        warm = list[Candidate]()
        cells: dict[Cell, Candidate | None] = {baseline: None}
        cells |= {self.cells[candidate]: candidate for candidate in candidates[:max_candidates]}
        # The longest drafts first, or the KV cache would grow several times.
        order = (
            sorted(cells, key=lambda cell: -self.sweep.cell_decoders[cell].policy.max_draft_tokens)
            if self.one_draft_at_a_time
            else cells
        )
        for cell in order:
            warming = cells[cell]
            if seconds_left() < self.text_seconds:
                if warming is not None:
                    self.record.dropped[warming] = "no time to measure it"
                continue
            tell(f"warming up: {warming or 'the baseline'}")
            self.sweep.warm_up(cell, short=not self.one_draft_at_a_time)
            if warming is not None:
                warm.append(warming)
        return [candidate for candidate in candidates if candidate in warm]

    def _round(
        self,
        baseline: Cell,
        candidates: Sequence[Candidate],
        number: int,
        seconds_left: SecondsLeft,
        tell: Tell,
    ) -> dict[Cell, Run] | None:
        """Return the measurements of all candidates with one prompt; None if there was no time for it."""
        repeat, group = divmod(number, len(self.sweep.groups))
        runs = {}
        for cell in rotated([baseline, *(self.cells[one] for one in candidates)], number):
            before = seconds_left()
            if before < self.text_seconds:
                return None
            tell(f"round {number + 1}: {cell.draft.rsplit(' ', 2)[0]}, g = {cell.num_draft_tokens}")
            drafter = self._decoders[cell.draft].drafter
            if drafter is not None and drafter.scorer is not None:
                drafter.scorer.forget()
            runs[cell] = self.sweep.run(cell, group, repeat)
            self.text_seconds = max(self.text_seconds, before - seconds_left())
        return runs

    def _drop_slower(self, candidates: list[Candidate]) -> list[Candidate]:
        """Drop candidates that are surely slower than the baseline, or than the fastest."""
        speedups = {one: found for one in candidates if (found := self.record.speedup(one)) is not None}
        if not speedups:
            return candidates
        fastest = max(speedups, key=lambda one: speedups[one].ratio)
        remaining = []
        for candidate in candidates:
            speedup = speedups.get(candidate)
            over_fastest = compare(self.record.rates.get(candidate, {}), self.record.rates[fastest])
            if _settled_slower(speedup):
                self.record.dropped[candidate] = "slower than the baseline"
            elif _settled_slower(over_fastest):
                self.record.dropped[candidate] = f"slower than {fastest}"
            else:
                remaining.append(candidate)
        return remaining

    def _drop_slower_half(self, candidates: list[Candidate]) -> list[Candidate]:
        if len(candidates) <= 2:
            return candidates
        remaining = better_half(candidates, self.record.rates, self.record.baseline_rates)
        for candidate in candidates:
            if candidate not in remaining:
                prompts = len({prompt for prompt, _ in self.record.rates.get(candidate, {})})
                self.record.dropped[candidate] = f"in the slower half after {counted(prompts, 'prompt')}"
        return remaining

    def _is_settled(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a single candidate is left, and its speedup is known well."""
        speedup = self.record.speedup(candidates[0])
        if len(candidates) > 1 or speedup is None or speedup.interval is None:
            return False
        if speedup.prompts < SETTLED_PROMPTS:
            return False
        return speedup.interval[1] - speedup.interval[0] < 2 * NARROW * speedup.ratio


def _settled_slower(speedup: MeasuredSpeedup | None) -> bool:
    return speedup is not None and speedup.prompts >= SETTLED_PROMPTS and speedup.surely_slower


def _rate(run: Run) -> Rate:
    return run.tokens, run.seconds

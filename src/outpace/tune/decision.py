"""The recommendation of a candidate from measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.bench.spread import Rate, faster
from outpace.checks.errors import too_few
from outpace.tune.candidate import Candidate, Interval

MIN_PROMPTS = 4  # prompts from which a result can be sure
TIE = 0.03  # relative difference up to which candidates tie, unless one is surely slower

Rates = Mapping[tuple[int, int], Rate]
"""Tokens and seconds, by prompt and by the number of its earlier rounds."""


@dataclass(frozen=True)
class MeasuredSpeedup:
    """The measured throughput of one candidate relative to another.

    Attributes:
        ratio: Ratio of their throughputs.
        interval: 95 % interval of ``ratio``; None for a single prompt.
        prompts: Number of prompts that both were measured with.
    """

    ratio: float
    interval: Interval | None
    prompts: int

    @property
    def surely_faster(self) -> bool:
        """True if there are enough prompts, and the whole interval lies above 1."""
        return self.prompts >= MIN_PROMPTS and self.interval is not None and self.interval[0] > 1

    @property
    def surely_slower(self) -> bool:
        """True if there are enough prompts, and the whole interval lies below 1."""
        return self.prompts >= MIN_PROMPTS and self.interval is not None and self.interval[1] < 1

    def __str__(self) -> str:
        interval = "" if self.interval is None else " ({:.2f} to {:.2f})".format(*self.interval)
        return f"{self.ratio:.2f}{interval}"


@dataclass(frozen=True)
class Recommendation:
    """The recommended candidate, with reasons.

    Attributes:
        candidate: The recommended candidate.
        reasons: Why each measured candidate is recommended, or not.
    """

    candidate: Candidate
    reasons: Mapping[Candidate, str]


def compare(rates: Rates, reference_rates: Rates) -> MeasuredSpeedup | None:
    """Compare two candidates in pairs, in the rounds of both; None if they have no round in common.

    A prompt of several rounds counts once.
    """
    rounds = sorted(set(rates) & set(reference_rates))
    if not rounds:
        return None
    prompts = list(dict.fromkeys(prompt for prompt, _ in rounds))
    totals, reference_totals = (
        [_total([some[one] for one in rounds if one[0] == prompt]) for prompt in prompts]
        for some in (rates, reference_rates)
    )
    ratio, interval = faster(totals, reference_totals)
    return MeasuredSpeedup(ratio, interval, len(prompts))


def recommend(
    rates: Mapping[Candidate, Rates], baseline_rates: Mapping[Candidate, Rates], reference: Candidate
) -> Recommendation:
    """Recommend the fastest candidate that is surely faster than the baseline.

    Of candidates that tie with the fastest, the simplest is recommended.

    Args:
        rates: Measured rates of each candidate.
        baseline_rates: Rates of the baseline in the same rounds, for each candidate.
        reference: The baseline, which is recommended if no candidate is surely faster.
    """
    speedups = {
        candidate: speedup
        for candidate in rates
        if (speedup := compare(rates[candidate], baseline_rates[candidate])) is not None
    }
    sure = [candidate for candidate, speedup in speedups.items() if speedup.surely_faster]
    reasons = {
        candidate: _why_not(speedup) for candidate, speedup in speedups.items() if candidate not in sure
    }
    if not sure:
        return Recommendation(reference, reasons)
    fastest = _fastest(sure, rates)
    tied = [fastest, *(one for one in sure if one != fastest and _ties(rates[one], rates[fastest]))]
    chosen = min(tied, key=lambda one: (one.complexity, -speedups[one].ratio))
    chosen_name = chosen.describe(reference)
    for candidate in sure:
        speedup_over_chosen = compare(rates[candidate], rates[chosen])
        if candidate == chosen:
            simpler = ", and simpler" if candidate.complexity < fastest.complexity else ""
            tie = f"as fast as {fastest.describe(reference)}{simpler}"
            reason = "the fastest" if candidate == fastest else tie
        elif candidate in tied:
            simpler = ", which is simpler" if chosen.complexity < candidate.complexity else ""
            reason = f"about as fast as {chosen_name}{simpler}"
        elif speedup_over_chosen is not None and speedup_over_chosen.surely_slower:
            reason = f"slower than {chosen_name}"
        else:
            reason = f"not shown to be as fast as {chosen_name}"
        reasons[candidate] = reason
    return Recommendation(chosen, reasons)


def verdict(
    recommendation: Recommendation, speedups: Mapping[Candidate, MeasuredSpeedup], reference: Candidate
) -> str:
    """Return the result in a sentence.

    Args:
        recommendation: The recommended candidate.
        speedups: Measured speedups of all candidates.
        reference: The baseline that the candidates were compared with.
    """
    chosen = recommendation.candidate
    if chosen in speedups:
        speedup = f"{speedups[chosen]} times as fast as the baseline"
        prompts = f"measured with {speedups[chosen].prompts} prompts"
        if chosen.is_baseline:
            return f"Do not speculate, but compute in {chosen.dtype}: {speedup}, {prompts}."
        return f"Draft with {chosen.describe(reference)}: {speedup}, {prompts}."
    fastest = max(speedups, key=lambda one: speedups[one].ratio)
    speedup = (
        f"the fastest candidate, {fastest.describe(reference)}, is {speedups[fastest]} times as fast as the "
        "baseline"
    )
    if speedups[fastest].prompts < MIN_PROMPTS:
        few = too_few(speedups[fastest].prompts, "prompt")
        return f"Do not speculate yet: {speedup}, and {few} to be sure."
    return f"Do not speculate: {speedup}, which is not surely faster."


def better_half(
    candidates: Sequence[Candidate],
    rates: Mapping[Candidate, Rates],
    baseline_rates: Mapping[Candidate, Rates],
) -> list[Candidate]:
    """Return the faster half of the candidates so far, in their order; unmeasured ones are not in it."""
    pairs = {one: compare(rates.get(one, {}), baseline_rates.get(one, {})) for one in candidates}
    ratios = {candidate: speedup.ratio for candidate, speedup in pairs.items() if speedup is not None}
    better = sorted(ratios, key=lambda one: -ratios[one])[: (len(candidates) + 1) // 2]
    return [candidate for candidate in candidates if candidate in better]


def _fastest(candidates: Sequence[Candidate], rates: Mapping[Candidate, Rates]) -> Candidate:
    """Return the fastest candidate, by comparison in pairs.

    Dropped candidates had fewer prompts, perhaps easier ones.
    """
    fastest = candidates[0]
    for candidate in candidates[1:]:
        speedup = compare(rates[candidate], rates[fastest])
        if speedup is not None and speedup.ratio > 1:
            fastest = candidate
    return fastest


def _ties(rates: Rates, fastest_rates: Rates) -> bool:
    speedup = compare(rates, fastest_rates)
    return speedup is not None and not speedup.surely_slower and speedup.ratio >= 1 - TIE


def _why_not(speedup: MeasuredSpeedup) -> str:
    if speedup.surely_slower:
        return "slower than the baseline"
    if speedup.prompts < MIN_PROMPTS:
        return f"{too_few(speedup.prompts, 'prompt')} to be sure"
    return "not surely faster than the baseline"


def _total(rates: Sequence[Rate]) -> Rate:
    return sum(tokens for tokens, _ in rates), sum(seconds for _, seconds in rates)

"""All measurements of the candidates at any moment of a tuning, and the recommendation that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outpace.bench.estimate import Floats, estimate
from outpace.tune.candidate import Candidate, CandidateResult, baseline
from outpace.tune.decision import MeasuredSpeedup, Recommendation, recommend, verdict
from outpace.tune.race import Record
from outpace.tune.replay import ExpectedSpeedup

MIN_SPEEDUP = 1.02  # expected speedup from which a draft pays
UNMEASURED = "no whole text was measured yet"


class Findings:
    """All measurements so far, and the recommendation.

    Args:
        reference: The baseline that the candidates are compared with.

    Attributes:
        reference: The baseline that the candidates are compared with.
        candidates: All candidates, the reference included.
        beta: Acceptance probability at the tokens of texts, by draft.
        expected: Speedups computed from acceptance and costs.
        dropped: Why some candidates cannot pay. They are not measured with whole texts.
        skipped: Why some candidates could not be measured.
        unmeasured_reason: Why no whole text was measured, if none was.
        record: Measurements with whole texts.
        larger_batches: Results of the chosen candidate with larger batches.
        recommendation: The recommendation so far.
    """

    def __init__(self, reference: Candidate) -> None:
        self.reference = reference
        self.candidates = [reference]
        self.beta: dict[str, list[Floats]] = {}
        self.expected: dict[Candidate, ExpectedSpeedup] = {}
        self.dropped: dict[Candidate, str] = {}
        self.skipped: dict[Candidate, str] = {}
        self.unmeasured_reason = UNMEASURED
        self.record = Record()
        self.larger_batches: list[CandidateResult] = []
        self.recommendation = Recommendation(reference, {})

    def add(self, *candidates: Candidate) -> None:
        """Add candidates, except those that were added before."""
        self.candidates += [candidate for candidate in candidates if candidate not in self.candidates]

    def expect(
        self,
        candidate: Candidate,
        speedup: ExpectedSpeedup,
        min_speedup: float,
        best_case: ExpectedSpeedup,
    ) -> None:
        """Record the expected speedup of a candidate, and drop the candidate if it cannot pay.

        Args:
            candidate: The candidate.
            speedup: Its expected speedup, with an interval.
            min_speedup: Speedup that makes the candidate worth measuring.
            best_case: Speedup at best. If its interval ends below ``min_speedup``, the candidate is dropped.
        """
        self.add(candidate)
        self.expected[candidate] = speedup
        if best_case[1] is not None and best_case[1][1] < min_speedup:
            self.dropped[candidate] = "cannot pay, by its acceptance rate and its cost"

    def promising(self) -> list[Candidate]:
        """Return the candidates left to measure, the most promising first."""
        out = {self.reference, *self.dropped, *self.skipped}
        remaining = [candidate for candidate in self.candidates if candidate not in out]
        return sorted(remaining, key=lambda one: -self.expected.get(one, (1.0, None))[0])

    def decide(self) -> None:
        """Recommend a candidate from the measurements so far."""
        self.recommendation = recommend(self.record.rates, self.record.baseline_rates, self.reference)

    def measured(self) -> dict[Candidate, MeasuredSpeedup]:
        """Return the measured speedup of each candidate that has one."""
        return {
            candidate: speedup
            for candidate in self.candidates
            if (speedup := self.record.speedup(candidate)) is not None
        }

    def results(self) -> list[CandidateResult]:
        """Return the results of all candidates, larger batches last."""
        return [self._result(candidate) for candidate in self.candidates] + self.larger_batches

    def chosen(self) -> CandidateResult:
        """Return the result of the chosen candidate."""
        return self._result(self.recommendation.candidate)

    def nearest_fixed(self) -> int | None:
        """Return the chosen num_draft_tokens as a number, for libraries without a draft-length policy.

        Returns:
            The number, or that of the fastest fixed candidate with the same draft; None if none is known to
            pay.
        """
        chosen = self.recommendation.candidate
        if chosen.num_draft_tokens.isdecimal():
            return int(chosen.num_draft_tokens)
        ratios = {candidate: ratio for candidate, (ratio, _) in self.expected.items()}
        ratios |= {candidate: speedup.ratio for candidate, speedup in self.measured().items()}
        baseline_ratio = ratios.get(baseline(chosen.dtype), 1.0)
        paying = {
            int(one.num_draft_tokens): ratio
            for one, ratio in ratios.items()
            if (one.draft, one.dtype) == (chosen.draft, chosen.dtype)
            and one.num_draft_tokens.isdecimal()
            and ratio > baseline_ratio
        }
        return max(paying, key=paying.__getitem__, default=None)

    def max_batch(self) -> int | None:
        """Return the largest batch size up to which the chosen candidate is expected to pay.

        Returns:
            The batch size; None if the choice is no speculation, or if no larger batch was measured.
        """
        if self.recommendation.candidate.is_baseline or not self.larger_batches:
            return None
        largest = 1
        for result in self.larger_batches:
            if result.expected is None or result.expected <= MIN_SPEEDUP:
                break
            largest = result.batch
        return largest

    def verdict(self) -> str:
        """Return the result in a sentence."""
        measured, undecided = self.measured(), self.undecided_reason()
        if undecided is not None:
            return f"Whether it pays is not known: {undecided}."
        if measured:
            return verdict(self.recommendation, measured, self.reference)
        if not self.dropped:
            return "Do not speculate: no draft was named."
        which = "no draft that could be measured" if self.skipped else "no draft"
        return f"Do not speculate: {which} can pay, by acceptance rates and costs."

    def undecided_reason(self) -> str | None:
        """Return why no choice is possible, not even that of no speculation; None if one is."""
        promising = self.promising()
        if self.measured() or not (promising or (self.skipped and not self.dropped)):
            return None
        if self.record.rounds:
            return "all texts ended before anything could be timed"
        if not promising:
            return next(f"{candidate.draft}: {reason}" for candidate, reason in self.skipped.items())
        best = next((candidate for candidate in promising if candidate in self.expected), None)
        if best is None:
            return self.unmeasured_reason
        name, ratio = best.describe(self.reference), self.expected[best][0]
        return f"{self.unmeasured_reason}; {name} is expected to be {ratio:.2f} times as fast"

    def content(self) -> Mapping[str, Any]:
        """Return all results, for the results file."""
        return {
            "rounds": self.record.rounds,
            "drafts": [self._alpha(name) for name in self.beta],
            "candidates": [asdict(one) for one in self.results()],
            "chosen": asdict(self.chosen()) if self.undecided_reason() is None else None,
            "max_batch": self.max_batch(),
            "verdict": self.verdict(),
        }

    def _result(self, candidate: Candidate) -> CandidateResult:
        expected, interval = self.expected.get(candidate, (None, None))
        speedup = self.record.speedup(candidate)
        reasons = (self.recommendation.reasons, self.record.dropped, self.dropped, self.skipped)
        why = next((some[candidate] for some in reasons if candidate in some), "")
        if candidate == self.reference:
            expected, why = 1.0, "this is the baseline"
        verified = None
        if speedup is not None:
            verified, interval = speedup.ratio, speedup.interval
        return CandidateResult(
            candidate.draft, candidate.num_draft_tokens, candidate.dtype, candidate.rule,
            1, expected, interval, verified, why,
        )  # fmt: skip

    def _alpha(self, name: str) -> Mapping[str, Any]:
        found, tokens = estimate(self.beta[name]), sum(map(len, self.beta[name]))
        if found is None:
            return {"draft": name, "alpha": None, "interval": None, "coverage": 0.0}
        return {
            "draft": name,
            "alpha": found.mean,
            "interval": found.interval,
            "coverage": found.count / tokens,
        }

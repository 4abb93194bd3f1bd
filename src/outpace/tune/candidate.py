"""The candidates that are compared, and the result of each."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.bench.runs import AUTO, BASELINE

NONE, LOOKUP, NGRAM = "none", "lookup", "ngram"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Candidate:
    """A configuration of draft, draft-length policy, rule and precision.

    Attributes:
        draft: Name of the draft; "none" is the baseline, which does not speculate.
        num_draft_tokens: Number of draft tokens per step, or "auto".
        rule: Name of the verification rule.
        dtype: Precision of the models.
    """

    draft: str
    num_draft_tokens: str
    rule: str
    dtype: str

    @property
    def is_baseline(self) -> bool:
        """True if the candidate does not speculate."""
        return self.draft == NONE

    @property
    def complexity(self) -> tuple[int, bool, bool]:
        """A key that sorts candidates from simple to complex.

        First comes the kind of draft: none, prompt lookup, n-gram table, model. Then "auto" comes before a
        fixed number, which somebody has to choose. Then the default rule comes before another one.
        """
        kinds = (NONE, LOOKUP, NGRAM)
        kind = self.draft.partition(":")[0]
        position = kinds.index(kind) if kind in kinds else len(kinds)
        return position, self.num_draft_tokens != AUTO, self.rule != "token"

    def __str__(self) -> str:
        if self.is_baseline:
            return "the baseline"
        rule = "" if self.rule == "token" else f", rule {self.rule}"
        return f"{self.draft}, g = {self.num_draft_tokens}{rule}"

    def describe(self, reference: Candidate) -> str:
        """Return the candidate in words, with its precision if the reference has another."""
        if self.dtype == reference.dtype:
            return f"{self}"
        return f"{self} in {self.dtype}" if self.is_baseline else f"{self}, in {self.dtype}"


def baseline(dtype: str) -> Candidate:
    """Return the candidate without speculation in a precision."""
    return Candidate(NONE, BASELINE, "token", dtype)


@dataclass(frozen=True)
class CandidateResult:
    """A candidate and its speedup over the baseline.

    Attributes:
        draft: Name of the draft.
        num_draft_tokens: Number of draft tokens per step, or "auto".
        dtype: Precision of the models.
        rule: Name of the verification rule.
        batch: Number of sequences at a time.
        expected: Speedup computed from acceptance and costs; None if unknown.
        interval: 95 % interval of ``verified`` if that is measured, else of ``expected``.
        verified: Speedup measured with whole texts; None if not measured.
        why: Why the candidate was chosen, or not.
    """

    draft: str
    num_draft_tokens: str
    dtype: str
    rule: str
    batch: int = 1
    expected: float | None = None
    interval: Interval | None = None
    verified: float | None = None
    why: str = ""

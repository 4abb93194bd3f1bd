"""Results and verdicts follow from what is known about all candidates."""

from __future__ import annotations

import pytest

from outpace.tune.candidate import Candidate, CandidateResult, baseline
from outpace.tune.decision import Recommendation
from outpace.tune.findings import Findings
from tests.tune.test_decision import rounds

AUTO = Candidate("lookup", "auto", "token", "float32")
NGRAM = Candidate("ngram", "auto", "token", "float32")


@pytest.mark.parametrize(
    ("expected", "verified", "fixed"),
    [
        ({2: 1.3, 5: 1.2}, {}, 2),
        ({2: 1.3, 5: 1.2}, {2: 0.9}, 5),  # a measured speedup replaces the expected one
        ({2: 1.3, 5: 1.2}, {2: 1.1, 5: 1.4}, 5),
        ({2: 1.3}, {2: 0.87}, None),
        ({2: 0.8}, {}, None),
        ({}, {}, None),
    ],
)
def test_other_libraries_get_a_fixed_number_of_draft_tokens_that_pays_or_none(
    expected: dict[int, float], verified: dict[int, float], fixed: int | None
) -> None:
    findings = Findings(baseline("float32"))
    findings.add(AUTO)
    findings.recommendation = Recommendation(AUTO, {})
    for g, speed in expected.items():
        candidate = Candidate("lookup", str(g), "token", "float32")
        findings.expect(candidate, (speed, None), 1.0, (speed, None))
        if g in verified:
            findings.record.rates[candidate] = rounds(verified[g])
            findings.record.baseline_rates[candidate] = rounds(1.0, seed=1)
    findings.expected[Candidate("org/small", "7", "token", "float32")] = 2.0, None  # of another draft
    assert findings.nearest_fixed() == fixed
    findings.recommendation = Recommendation(Candidate("lookup", "3", "block", "float32"), {})
    assert findings.nearest_fixed() == 3


def test_a_fixed_number_must_pay_against_the_baseline_in_the_same_dtype() -> None:
    chosen = Candidate("lookup", "auto", "token", "bfloat16")
    findings = Findings(baseline("float32"))
    findings.recommendation = Recommendation(chosen, {})
    findings.expected[Candidate("lookup", "3", "token", "bfloat16")] = 1.5, None
    assert findings.nearest_fixed() == 3
    findings.expected[baseline("bfloat16")] = 1.8, None
    assert findings.nearest_fixed() is None


def test_no_speculation_is_recommended_only_with_evidence() -> None:
    findings = Findings(baseline("float32"))
    assert findings.undecided_reason() is None
    assert findings.verdict() == "Do not speculate: no draft was named."
    findings.add(AUTO)
    assert findings.undecided_reason() == "no whole text was measured yet"
    assert findings.content()["chosen"] is None
    findings.unmeasured_reason = "there was no time"
    findings.expect(AUTO, (1.3, (1.1, 1.5)), 1.0, (1.4, (1.2, 1.6)))
    reason = "there was no time; lookup, g = auto is expected to be 1.30 times as fast"
    assert findings.verdict() == f"Whether it pays is not known: {reason}."
    findings.dropped[AUTO] = "cannot pay"
    assert findings.undecided_reason() is None
    assert findings.verdict().startswith("Do not speculate: no draft can pay, by acceptance rates")
    findings.add(NGRAM)
    findings.skipped[NGRAM] = "2 prompts are too few"
    assert findings.undecided_reason() is None
    assert findings.verdict().startswith("Do not speculate: no draft that could be measured can pay")


def test_a_draft_that_could_not_be_measured_leaves_the_result_unknown() -> None:
    findings = Findings(baseline("float32"))
    findings.add(NGRAM)
    findings.skipped[NGRAM] = "2 prompts are too few"
    assert findings.verdict() == "Whether it pays is not known: ngram: 2 prompts are too few."
    findings.add(AUTO)
    findings.record.rounds = 1
    assert findings.undecided_reason() == "all texts ended before anything could be timed"


def test_a_precision_that_was_not_measured_leaves_the_result_unknown() -> None:
    findings = Findings(baseline("float32"))
    findings.add(baseline("bfloat16"))
    assert findings.undecided_reason() is not None


def test_max_batch_is_known_only_if_larger_batches_were_examined() -> None:
    findings = Findings(baseline("float32"))
    findings.recommendation = Recommendation(AUTO, {})
    assert findings.max_batch() is None
    for B, speed, max_batch in ((4, 1.3, 4), (8, 1.01, 4), (16, 1.5, 4)):
        findings.larger_batches.append(CandidateResult("lookup", "auto", "float32", "token", B, speed))
        assert findings.max_batch() == max_batch
    findings.larger_batches[0] = CandidateResult("lookup", "auto", "float32", "token", 4, 0.9)
    assert findings.max_batch() == 1
    findings.recommendation = Recommendation(baseline("float32"), {})
    assert findings.max_batch() is None

"""What is known of all ways is put together as it should be."""

from __future__ import annotations

import pytest

from outpace.tune.decision import Choice
from outpace.tune.findings import Findings
from outpace.tune.way import Candidate, Setting, plainly
from tests.tune.test_decision import turns

AUTO = Setting("lookup", "auto", "token", "float32")
NGRAM = Setting("ngram", "auto", "token", "float32")


@pytest.mark.parametrize(
    ("expected", "verified", "near"),
    [
        ({2: 1.3, 5: 1.2}, {}, 2),
        ({2: 1.3, 5: 1.2}, {2: 0.9}, 5),  # what was seen counts for more than what was expected
        ({2: 1.3, 5: 1.2}, {2: 1.1, 5: 1.4}, 5),
        ({2: 1.3}, {2: 0.87}, None),
        ({2: 0.8}, {}, None),
        ({}, {}, None),
    ],
)
def test_others_are_told_a_length_that_pays_or_none(
    expected: dict[int, float], verified: dict[int, float], near: int | None
) -> None:
    findings = Findings(plainly("float32"))
    findings.add(AUTO)
    findings.choice = Choice(AUTO, {})
    for g, speed in expected.items():
        way = Setting("lookup", str(g), "token", "float32")
        findings.expect(way, (speed, None), 1.0, (speed, None))
        if g in verified:
            findings.record.rates[way] = turns(verified[g])
            findings.record.yardsticks[way] = turns(1.0, seed=1)
    findings.expected[Setting("org/small", "7", "token", "float32")] = 2.0, None  # of another draft
    assert findings.nearest() == near
    findings.choice = Choice(Setting("lookup", "3", "block", "float32"), {})
    assert findings.nearest() == 3


def test_a_length_has_to_pay_against_plain_decoding_in_the_same_dtype() -> None:
    way = Setting("lookup", "auto", "token", "bfloat16")
    findings = Findings(plainly("float32"))
    findings.choice = Choice(way, {})
    findings.expected[Setting("lookup", "3", "token", "bfloat16")] = 1.5, None
    assert findings.nearest() == 3
    findings.expected[plainly("bfloat16")] = 1.8, None
    assert findings.nearest() is None


def test_plain_decoding_is_recommended_only_where_something_speaks_for_it() -> None:
    findings = Findings(plainly("float32"))
    assert findings.unknown() is None
    assert findings.verdict() == "Do not speculate: no draft was named."
    findings.add(AUTO)
    assert findings.unknown() == "no whole text was measured yet"
    assert findings.content()["chosen"] is None
    findings.ended = "there was no time"
    findings.expect(AUTO, (1.3, (1.1, 1.5)), 1.0, (1.4, (1.2, 1.6)))
    told = "there was no time; lookup, g = auto is expected to be 1.30 times as fast"
    assert findings.verdict() == f"Whether it pays is not known: {told}."
    findings.dropped[AUTO] = "cannot pay"
    assert findings.unknown() is None
    assert findings.verdict().startswith("Do not speculate: no draft can pay, by acceptance rates")
    findings.add(NGRAM)
    findings.untried[NGRAM] = "2 prompts are too few"
    assert findings.unknown() is None
    assert findings.verdict().startswith("Do not speculate: no draft that could be looked at can pay")


def test_a_draft_that_could_not_be_looked_at_is_not_known() -> None:
    findings = Findings(plainly("float32"))
    findings.add(NGRAM)
    findings.untried[NGRAM] = "2 prompts are too few"
    assert findings.verdict() == "Whether it pays is not known: ngram: 2 prompts are too few."
    findings.add(AUTO)
    findings.record.rounds = 1
    assert findings.unknown() == "all texts ended before anything could be timed"


def test_another_precision_that_was_not_measured_is_not_known_either() -> None:
    findings = Findings(plainly("float32"))
    findings.add(plainly("bfloat16"))
    assert findings.unknown() is not None


def test_rows_are_told_only_where_several_were_looked_at() -> None:
    findings = Findings(plainly("float32"))
    findings.choice = Choice(AUTO, {})
    assert findings.most_rows() is None
    for B, speed, most in ((4, 1.3, 4), (8, 1.01, 4), (16, 1.5, 4)):
        findings.crowds.append(Candidate("lookup", "auto", "float32", "token", B, speed))
        assert findings.most_rows() == most
    findings.crowds[0] = Candidate("lookup", "auto", "float32", "token", 4, 0.9)
    assert findings.most_rows() == 1
    findings.choice = Choice(plainly("float32"), {})
    assert findings.most_rows() is None

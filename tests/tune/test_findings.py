"""What is known of all ways is put together as it should be."""

from __future__ import annotations

import pytest

from outpace.tune.decision import Choice
from outpace.tune.findings import Findings
from outpace.tune.way import Way, plainly
from tests.tune.test_decision import turns

AUTO = Way("lookup", "auto", "token", "float32")


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
        way = Way("lookup", str(g), "token", "float32")
        findings.expect(way, (speed, None), 1.0, (speed, None))
        if g in verified:
            findings.record.rates[way] = turns(verified[g])
            findings.record.yardsticks[way] = turns(1.0, seed=1)
    findings.expected[Way("org/small", "7", "token", "float32")] = 2.0, None  # of another draft
    assert findings.nearest() == near
    findings.choice = Choice(Way("lookup", "3", "block", "float32"), {})
    assert findings.nearest() == 3


def test_a_length_has_to_pay_against_plain_decoding_in_the_same_dtype() -> None:
    way = Way("lookup", "auto", "token", "bfloat16")
    findings = Findings(plainly("float32"))
    findings.choice = Choice(way, {})
    findings.expected[Way("lookup", "3", "token", "bfloat16")] = 1.5, None
    assert findings.nearest() == 3
    findings.expected[plainly("bfloat16")] = 1.8, None
    assert findings.nearest() is None

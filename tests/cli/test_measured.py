"""Verdicts of `outpace bench alpha`."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.cli.measured import verdicts


@pytest.mark.parametrize(
    ("g", "speed", "interval", "said"),
    [
        (2, 1.04, [0.71, 1.9],
         "g = 2, 1.04 times as fast (0.71 to 1.90 over α's interval), so it is not known whether it pays"),
        (2, 1.5, [1.2, 1.9], "g = 2, 1.50 times as fast (1.20 to 1.90 over α's interval)"),
        (2, 1.5, None, "g = 2, 1.50 times as fast"),
        (0, 1.0, [0.8, 1.3], "not known whether it pays, 0.80 to 1.30 times as fast over α's interval"),
        (0, 1.0, [1.0, 1.0], "does not pay"),
        (0, 1.0, None, "does not pay"),
    ],
)  # fmt: skip
def test_verdict_says_whether_the_interval_shows_that_speculation_pays(
    g: int, speed: float, interval: list[float] | None, said: str
) -> None:
    at: dict[str, Any] = {"B": 1, "best_g": g, "predicted": speed, "predicted_interval": interval}
    draft = {"draft": "lookup", "lenience": 1.0, "by_batch": [at]}
    assert verdicts({"drafts": [draft]}) == [f"lookup: B = 1: {said}"]

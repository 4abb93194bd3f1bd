"""Steps are counted without the first ones of each text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from outpace.bench.runs import Cell, Run, count_steps
from outpace.decoder import Decoder
from outpace.engine.sequence import Step
from outpace.sampling import SamplingParams
from tests.tiny import tiny

GREEDY = SamplingParams(temperature=0.0)


def step(row: int, phases: dict[str, float], drafted: int, accepted: int) -> Step:
    return Step(row, None, [0] * (accepted + 1), drafted, accepted, 0, [0] * drafted, phases=phases)


def test_first_steps_do_not_count_and_a_step_of_several_sequences_counts_once() -> None:
    prompt, first = {"target": 5.0}, {"draft": 2.0, "target": 3.0}
    second, third = {"draft": 0.5, "target": 1.0, "other": 0.5}, {"draft": 0.25, "target": 0.75}
    steps = [
        *(step(0, prompt, 0, 0), step(1, prompt, 0, 0)),
        *(step(0, first, 3, 3), step(1, first, 3, 0)),
        *(step(0, second, 3, 2), step(1, second, 1, 1)),
        step(1, third, 3, 0),
    ]
    found = count_steps(Run(Cell("small", GREEDY, "3"), 0), steps, [8, 20])
    assert found.iterations == 2
    assert found.seconds == 3.0
    assert found.draft_seconds == 0.75
    assert found.texts == [(3, 2.0), (3, 3.0)]  # the second text was in both steps
    assert found.tokens == 6
    assert found.drafted == Counter({3: 2, 1: 1})
    assert (found.accepted, found.rejected) == (3, 2)
    assert found.missing == 1


def test_draft_tokens_beyond_max_new_tokens_are_not_missing() -> None:
    phases: list[dict[str, float]] = [{"target": 1.0} for _ in range(3)]
    steps = [step(0, phases[0], 0, 0), step(0, phases[1], 3, 3), step(0, phases[2], 1, 1)]
    found = count_steps(Run(Cell("small", GREEDY, "3"), 0), steps, [7])
    assert found.missing == 0
    found = count_steps(Run(Cell("small", GREEDY, "auto"), 0), steps, [20])
    assert found.missing == 0  # the policy did not request more


def test_failed_text_is_left_out_with_a_warning() -> None:
    (*_, last) = Decoder(tiny()).stream([1, 2], max_new_tokens=3)
    assert last.output is not None
    failed = replace(last, output=replace(last.output, error=ValueError("the logits are unusable")))
    with pytest.warns(
        UserWarning, match="small, temperature 0, g = 0: prompts left out: the logits are unusable"
    ):
        assert count_steps(Run(Cell("small", GREEDY, "0"), 0), [failed], [3]).texts == []

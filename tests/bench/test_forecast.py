"""Lines of a sweep, from runs whose figures follow by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from outpace.bench import loops
from outpace.bench.cost import Drafting, Pass, Verification
from outpace.bench.forecast import figures
from outpace.bench.prediction import Parts
from outpace.bench.runs import Cell, Run
from outpace.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NEVER = Counter({0: 100})


# An iteration of g guesses: 100 ms, 25 more for each, of which 20 are the draft's step
PARTS = {
    ("small", GREEDY): Parts(
        1,
        Drafting(20.0),
        [Pass(1, n, 95.0 + 5 * n) for n in (1, 3, 6)],
        [Verification(1, g, 0.0, True) for g in (0, 5)],
    )
}


def run(length: str, seconds: float, iterations: int, drafted: Counter[int], **more: float) -> Run:
    """100 tokens of one text."""
    numbers = {"kept": 0, "lost": 0, "missing": 0, "draft_seconds": 0.0, "group": 0, **more}
    group = int(numbers.pop("group"))
    found = Run(Cell("small", GREEDY, length), group, [(100, seconds)], iterations, seconds)
    found.drafted = drafted
    for name, value in numbers.items():
        setattr(found, name, value)
    return found


def test_forecasts_are_those_of_hand() -> None:
    plain = run("0", 10.0, 100, NEVER)
    two = run("2", 8.0, 50, Counter({2: 50}), kept=60, lost=30, draft_seconds=2.0)
    first, second = figures([plain, two], PARTS)
    assert (first.speedup, first.predicted, first.predicted_simple, first.alpha) == (1.0, None, None, None)
    assert first.mean_ms == 12800  # 10 s of 100 tokens, for 128
    assert first.loop_ms == 100
    assert second.mean_ms == 10240
    assert second.tokens_per_second == 12.5
    assert second.acceptance == 0.6  # of 100 guesses
    assert second.alpha == pytest.approx(2 / 3, abs=1e-4)  # of 90 that were judged
    assert second.tokens_per_pass == 2
    assert second.c == 0.2  # 2 s of 100 steps, beside 100 ms
    tokens = 1 + 2 / 3 + 4 / 9
    assert second.speedup == 1.25
    assert second.predicted == pytest.approx(tokens * 100 / 150, abs=1e-4)
    assert figures([plain, two])[1].predicted is None
    assert second.predicted_simple == pytest.approx(tokens / 1.4, abs=1e-4)


def test_alpha_and_c_of_a_forecast_are_those_of_all_lengths() -> None:
    plain = run("0", 10.0, 100, NEVER)
    one = run("1", 9.0, 60, Counter({1: 60}), kept=40, lost=20, draft_seconds=1.0)
    two = run("2", 8.0, 50, Counter({2: 50}), kept=60, lost=30, draft_seconds=3.0)
    other = run("auto", 7.0, 50, Counter({9: 50}), kept=400, lost=10, draft_seconds=9.0)
    found = {line.length: line for line in figures([plain, one, two, other], PARTS)}
    assert {line.c for line in found.values()} == {0.25}  # 4 s of 160 steps, beside 100 ms
    for length, tokens, taken in (("1", 1 + 2 / 3, 125), ("2", 1 + 2 / 3 + 4 / 9, 150)):
        assert found[length].predicted == pytest.approx(tokens * 100 / taken, abs=1e-4)
    assert found["auto"].predicted is found["auto"].predicted_simple is None
    assert found["auto"].alpha == pytest.approx(400 / 410, abs=1e-4)


def test_a_cell_without_a_prompt_of_plain_decoding_has_no_line_yet() -> None:
    plain = run("0", 10.0, 100, NEVER, group=1)
    two = run("2", 8.0, 50, Counter({2: 50}), kept=60, lost=30)
    assert [line.length for line in figures([plain, two])] == ["0"]
    both = figures([plain, two, run("2", 5.0, 50, Counter({2: 50}), kept=60, lost=30, group=1)])
    assert [line.speedup for line in both] == [1.0, 2.0]


def test_without_phases_c_is_what_the_first_guess_adds() -> None:
    plain = run("0", 10.0, 100, NEVER)
    two = run("2", 8.0, 50, Counter({2: 50}), kept=60, lost=30)
    five = run("5", 9.0, 30, Counter({5: 30}), kept=70, lost=30)
    assert figures([plain, two, five])[2].c == 0.3  # 160 ms beside 100, for two


def test_guesses_that_were_not_made_are_reckoned_with() -> None:
    plain = run("0", 10.0, 100, NEVER)
    copied = run("2", 8.0, 50, Counter({0: 30, 2: 20}), kept=30, lost=5, missing=30, draft_seconds=1e-9)
    line = figures([plain, copied], PARTS)[1]
    alpha = 30 / 35
    tokens = (30 + 20 * (1 + alpha + alpha**2)) / 50
    assert line.alpha == pytest.approx(alpha, abs=1e-4)
    assert line.predicted == pytest.approx(tokens * 100 / (0.6 * 100 + 0.4 * 150), abs=1e-4)
    assert line.predicted_simple == pytest.approx(1 + 30 / 65 + (30 / 65) ** 2, abs=1e-4)


def test_speeds_are_of_groups_that_both_have_written_about() -> None:
    plain = [run("0", 10.0, 100, NEVER, group=group) for group in (0, 1)]
    ours = [run("1", 5.0, 60, Counter({1: 60}), kept=40, lost=20, group=group) for group in (1, 2)]
    plain[0].texts[0] = (1, 10.0)  # of no consequence: its group has no other side
    line = figures([*plain, *ours])[1]
    assert line.speedup == 2.0
    assert line.interval is None
    assert line.texts == 2


def test_cells_without_texts_or_yardstick_have_no_line() -> None:
    plain, two = run("0", 10.0, 100, NEVER), run("2", 8.0, 50, Counter({2: 50}), kept=60, lost=30)
    assert figures([two]) == []
    two.texts = []
    assert [line.length for line in figures([plain, two])] == ["0"]


def test_lines_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    lengths = [run(str(g), 8.0, 50, Counter({g: 50}), kept=20 * g, lost=30) for g in (1, 2, 5)]
    plain, auto = run("0", 10.0, 100, NEVER), run("auto", 7.0, 50, Counter({2: 50}), kept=60, lost=30)
    loops.draw(figures([plain, *lengths, auto]), tmp_path / "sweep.svg")
    text = (tmp_path / "sweep.svg").read_text()
    for said in ("time of 128 tokens", "time of an iteration", "to P90", "small, temperature 0, auto"):
        assert said in text


def test_a_pass_is_as_wide_as_the_longest_of_its_rows() -> None:
    passes = [Pass(2, 1, 100.0), Pass(2, 3, 150.0)]
    parts = Parts(2, Drafting(0.0), passes, [])
    # Of two rows, both are silent in a quarter of iterations
    assert parts.speedup(0.5, Counter({0: 10, 2: 10})) == pytest.approx(
        (0.5 + 0.5 * 1.75) / (0.25 + 0.75 * 1.5)
    )

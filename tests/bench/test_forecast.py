"""Lines of a sweep match calculations by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from outpace.bench import sweep_plot
from outpace.bench.cost import Drafting, Pass, Verification
from outpace.bench.forecast import figures
from outpace.bench.prediction import Parts
from outpace.bench.runs import Cell, Run
from outpace.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NO_DRAFT_TOKENS = Counter({0: 100})


# A step takes 100 ms, and 25 more for each draft token, of which 20 are drafting.
PARTS = {
    ("small", GREEDY): Parts(
        1,
        Drafting(20.0),
        [Pass(1, n, 95.0 + 5 * n) for n in (1, 3, 6)],
        [Verification(1, g, 0.0, True) for g in (0, 5)],
    )
}


def run(num_draft_tokens: str, seconds: float, iterations: int, drafted: Counter[int], **more: float) -> Run:
    """Return a run with 100 tokens of one text."""
    numbers = {"accepted": 0, "rejected": 0, "missing": 0, "draft_seconds": 0.0, "group": 0, **more}
    group = int(numbers.pop("group"))
    found = Run(Cell("small", GREEDY, num_draft_tokens), group, [(100, seconds)], iterations, seconds)
    found.drafted = drafted
    for name, value in numbers.items():
        setattr(found, name, value)
    return found


def test_measured_and_predicted_figures_match_a_calculation_by_hand() -> None:
    baseline = run("0", 10.0, 100, NO_DRAFT_TOKENS)
    two = run("2", 8.0, 50, Counter({2: 50}), accepted=60, rejected=30, draft_seconds=2.0)
    first, second = figures([baseline, two], PARTS)
    assert (first.speedup, first.predicted, first.predicted_simple, first.alpha) == (1.0, None, None, None)
    assert first.mean_ms == 12800  # 10 s of 100 tokens, for 128
    assert first.loop_ms == 100
    assert second.mean_ms == 10240
    assert second.tokens_per_second == 12.5
    assert second.acceptance == 0.6  # of 100 draft tokens
    assert second.alpha == pytest.approx(2 / 3, abs=1e-4)  # of 90 that were verified
    assert second.tokens_per_pass == 2
    assert second.c == 0.2  # 2 s for 100 draft tokens, relative to 100 ms
    tokens = 1 + 2 / 3 + 4 / 9
    assert second.speedup == 1.25
    assert second.predicted == pytest.approx(tokens * 100 / 150, abs=1e-4)
    assert figures([baseline, two])[1].predicted is None
    assert second.predicted_simple == pytest.approx(tokens / 1.4, abs=1e-4)


def test_predictions_use_alpha_and_c_of_all_fixed_draft_lengths() -> None:
    baseline = run("0", 10.0, 100, NO_DRAFT_TOKENS)
    one = run("1", 9.0, 60, Counter({1: 60}), accepted=40, rejected=20, draft_seconds=1.0)
    two = run("2", 8.0, 50, Counter({2: 50}), accepted=60, rejected=30, draft_seconds=3.0)
    other = run("auto", 7.0, 50, Counter({9: 50}), accepted=400, rejected=10, draft_seconds=9.0)
    found = {line.num_draft_tokens: line for line in figures([baseline, one, two, other], PARTS)}
    assert {line.c for line in found.values()} == {0.25}  # 4 s for 160 draft tokens, relative to 100 ms
    for g, tokens, ms in (("1", 1 + 2 / 3, 125), ("2", 1 + 2 / 3 + 4 / 9, 150)):
        assert found[g].predicted == pytest.approx(tokens * 100 / ms, abs=1e-4)
    assert found["auto"].predicted is found["auto"].predicted_simple is None
    assert found["auto"].alpha == pytest.approx(400 / 410, abs=1e-4)


def test_cell_without_a_prompt_of_the_baseline_has_no_line_yet() -> None:
    baseline = run("0", 10.0, 100, NO_DRAFT_TOKENS, group=1)
    two = run("2", 8.0, 50, Counter({2: 50}), accepted=60, rejected=30)
    assert [line.num_draft_tokens for line in figures([baseline, two])] == ["0"]
    both = figures([baseline, two, run("2", 5.0, 50, Counter({2: 50}), accepted=60, rejected=30, group=1)])
    assert [line.speedup for line in both] == [1.0, 2.0]


def test_without_draft_times_c_is_the_time_a_draft_token_adds_to_a_step() -> None:
    baseline = run("0", 10.0, 100, NO_DRAFT_TOKENS)
    two = run("2", 8.0, 50, Counter({2: 50}), accepted=60, rejected=30)
    five = run("5", 9.0, 30, Counter({5: 30}), accepted=70, rejected=30)
    assert figures([baseline, two, five])[2].c == 0.3  # 160 ms instead of 100, for two draft tokens


def test_draft_tokens_that_were_not_proposed_count_in_predictions() -> None:
    baseline = run("0", 10.0, 100, NO_DRAFT_TOKENS)
    lookup = run(
        "2", 8.0, 50, Counter({0: 30, 2: 20}), accepted=30, rejected=5, missing=30, draft_seconds=1e-9
    )
    line = figures([baseline, lookup], PARTS)[1]
    alpha = 30 / 35
    tokens = (30 + 20 * (1 + alpha + alpha**2)) / 50
    assert line.alpha == pytest.approx(alpha, abs=1e-4)
    assert line.predicted == pytest.approx(tokens * 100 / (0.6 * 100 + 0.4 * 150), abs=1e-4)
    assert line.predicted_simple == pytest.approx(1 + 30 / 65 + (30 / 65) ** 2, abs=1e-4)


def test_speedup_uses_only_prompts_that_the_cell_and_the_baseline_have() -> None:
    baseline = [run("0", 10.0, 100, NO_DRAFT_TOKENS, group=group) for group in (0, 1)]
    speculative = [
        run("1", 5.0, 60, Counter({1: 60}), accepted=40, rejected=20, group=group) for group in (1, 2)
    ]
    baseline[0].texts[0] = (1, 10.0)  # does not count: the cell has no run of this group
    line = figures([*baseline, *speculative])[1]
    assert line.speedup == 2.0
    assert line.interval is None
    assert line.texts == 2


def test_cells_without_texts_or_baseline_have_no_line() -> None:
    baseline, two = (
        run("0", 10.0, 100, NO_DRAFT_TOKENS),
        run("2", 8.0, 50, Counter({2: 50}), accepted=60, rejected=30),
    )
    assert figures([two]) == []
    two.texts = []
    assert [line.num_draft_tokens for line in figures([baseline, two])] == ["0"]


def test_lines_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    lengths = [run(str(g), 8.0, 50, Counter({g: 50}), accepted=20 * g, rejected=30) for g in (1, 2, 5)]
    baseline, auto = (
        run("0", 10.0, 100, NO_DRAFT_TOKENS),
        run("auto", 7.0, 50, Counter({2: 50}), accepted=60, rejected=30),
    )
    sweep_plot.save_plot(figures([baseline, *lengths, auto]), tmp_path / "sweep.svg")
    text = (tmp_path / "sweep.svg").read_text()
    for said in ("latency of 128 tokens", "time of a step", "to P90", "small, temperature 0, auto"):
        assert said in text


def test_a_pass_has_as_many_tokens_as_the_longest_draft_of_the_batch() -> None:
    passes = [Pass(2, 1, 100.0), Pass(2, 3, 150.0)]
    parts = Parts(2, Drafting(0.0), passes, [])
    # Neither of two sequences has draft tokens in a quarter of the steps.
    assert parts.speedup(0.5, Counter({0: 10, 2: 10})) == pytest.approx(
        (0.5 + 0.5 * 1.75) / (0.25 + 0.75 * 1.5)
    )

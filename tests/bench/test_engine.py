"""Whole texts are timed on every side, beside what theory has to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.bench import engine, plot, synthetic, theory
from tests.bench.test_synthetic import DRAFT, TARGET


def small(name: str, alpha: float, **options: Any) -> synthetic.Pair:
    return synthetic.pair(TARGET, synthetic.LOOKUP if name == "lookup" else DRAFT, alpha, **options)


def test_every_side_is_timed_and_known_ones_are_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TOKENS", 6)
    monkeypatch.setattr(engine, "NEW", 60)
    cases = [engine.Case("tiny", 0.8, 3, B, 8) for B in (1, 4)]
    cpu = torch.device("cpu")
    figures = list(engine.measure(cpu, torch.float32, cases, pairs=small))
    assert [(one.side, one.B) for one in figures] == [
        (side, B) for B in (1, 4) for side in engine.SIDES if B == 1 or side != "transformers assisted"
    ]
    assert all(one.tokens_per_second > 0 for one in figures)
    speculative = [one for one in figures if one.side == "outpace"][-1]
    # 12 texts, 20 iterations, a standard error of 0.08
    assert speculative.tokens_per_iteration == pytest.approx(theory.expected_tokens(0.8, 3), abs=0.6)
    assert speculative.predicted is not None
    assert speculative.floor_milliseconds is not None
    assert list(engine.measure(cpu, torch.float32, cases, known=figures, pairs=fails)) == figures


def test_copies_are_timed_where_there_is_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TOKENS", 6)
    monkeypatch.setattr(engine, "NEW", 20)
    cases = [engine.Case("lookup", 0.9, 3, 2, 64, static=False)]
    figures = list(engine.measure(torch.device("cpu"), torch.float32, cases, pairs=small))
    assert [one.side for one in figures] == ["outpace plain", "outpace", "transformers"]
    assert figures[1].tokens_per_iteration is not None
    assert figures[1].tokens_per_iteration > 1.5
    assert figures[1].predicted is None


def fails(*args: Any, **options: Any) -> synthetic.Pair:
    raise AssertionError("nothing is left to measure")


def test_the_selection_has_every_pair_and_column() -> None:
    cases = engine.chosen()
    assert {case.name for case in cases} == set(synthetic.PAIRS)
    assert {case.alpha for case in cases} == set(engine.ALPHAS)
    assert {case.g for case in cases} == set(engine.DRAFTS)
    assert {case.B for case in cases} == set(engine.BATCHES)
    assert {case.context for case in cases} == set(engine.CONTEXTS)
    assert set(cases) <= set(engine.chosen(full=True))


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    sides = [("transformers", 0.0, 0), ("outpace plain", 0.0, 0), ("outpace", 0.8, 3), ("outpace", 0.8, 5)]
    figures = [
        engine.Throughput(side, "a/b", alpha, g, B, 128, 100.0 * B + g, predicted=90.0 if g else None)
        for side, alpha, g in sides
        for B in (1, 8)
    ]
    plot.draw(figures, tmp_path / "engine.svg")
    text = (tmp_path / "engine.svg").read_text()
    assert "<svg" in text
    assert set(plot.COLOURS) == set(engine.SIDES)
    for colour in (plot.COLOURS[side] for side, _, _ in sides):
        assert colour in text

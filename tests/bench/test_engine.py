"""Throughput of whole texts is measured with every method, beside the prediction of theory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.bench import engine, engine_plot, synthetic, theory
from tests.bench.test_synthetic import DRAFT, TARGET


def small(name: str, alpha: float, **options: Any) -> synthetic.Pair:
    return synthetic.pair(TARGET, synthetic.LOOKUP if name == "lookup" else DRAFT, alpha, **options)


def test_every_method_is_measured_and_known_figures_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "TRANSFORMERS_TOKENS", 6)
    monkeypatch.setattr(engine, "ENGINE_TOKENS", 60)
    cases = [engine.Case("tiny", 0.8, 3, B, 8) for B in (1, 4)]
    cpu = torch.device("cpu")
    figures = list(engine.measure(cpu, torch.float32, cases, pairs=small))
    assert [(one.method, one.B) for one in figures] == [
        (method, B)
        for B in (1, 4)
        for method in engine.METHODS
        if B == 1 or method != "transformers assisted"
    ]
    assert all(one.tokens_per_second > 0 for one in figures)
    speculative = [one for one in figures if one.method == "outpace"][-1]
    # 12 texts, 20 steps, a standard error of 0.08
    assert speculative.tokens_per_iteration == pytest.approx(theory.expected_tokens(0.8, 3), abs=0.6)
    assert speculative.predicted is not None
    assert speculative.floor_milliseconds is not None
    assert list(engine.measure(cpu, torch.float32, cases, known=figures, pairs=fails)) == figures


def test_prompt_lookup_is_measured_if_a_pair_has_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TRANSFORMERS_TOKENS", 6)
    monkeypatch.setattr(engine, "ENGINE_TOKENS", 20)
    cases = [engine.Case("lookup", 0.9, 3, 2, 64, static=False)]
    figures = list(engine.measure(torch.device("cpu"), torch.float32, cases, pairs=small))
    assert [one.method for one in figures] == ["outpace baseline", "outpace", "transformers"]
    assert figures[1].tokens_per_iteration is not None
    assert figures[1].tokens_per_iteration > 1.5
    assert figures[1].predicted is None


def fails(*args: Any, **options: Any) -> synthetic.Pair:
    raise AssertionError("nothing is left to measure")


def test_default_selection_has_every_pair_and_every_value() -> None:
    cases = engine.select_cases()
    assert {case.name for case in cases} == set(synthetic.PAIRS)
    assert {case.alpha for case in cases} == set(engine.ALPHAS)
    assert {case.g for case in cases} == set(engine.DRAFT_LENGTHS)
    assert {case.B for case in cases} == set(engine.BATCHES)
    assert {case.context for case in cases} == set(engine.CONTEXTS)
    assert set(cases) <= set(engine.select_cases(full=True))


def test_figures_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    methods = [
        ("transformers", 0.0, 0),
        ("outpace baseline", 0.0, 0),
        ("outpace", 0.8, 3),
        ("outpace", 0.8, 5),
    ]
    figures = [
        engine.Throughput(method, "a/b", alpha, g, B, 128, 100.0 * B + g, predicted=90.0 if g else None)
        for method, alpha, g in methods
        for B in (1, 8)
    ]
    engine_plot.save_plot(figures, tmp_path / "engine.svg")
    text = (tmp_path / "engine.svg").read_text()
    assert "<svg" in text
    assert set(engine_plot.COLOURS) == set(engine.METHODS)
    for colour in (engine_plot.COLOURS[method] for method, _, _ in methods):
        assert colour in text

"""`outpace plan`: its numbers, errors and plots."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from outpace.bench import theory
from outpace.bench.curves import Point
from tests.cli.conftest import Run


def test_the_plan_matches_the_formulas_of_the_paper(run: Run) -> None:
    status, out, errors = run("plan", "--alpha", "0.8", "--c", "0.05")
    assert status == 0, errors
    assert "Draft g = 8: 4.33 tokens per pass, 3.09 times as fast" in " ".join(out.split())
    status, out, _ = run("plan", "--alpha", "0.8", "--c", "0.05", "--num-draft-tokens", "4", "--json")
    found = json.loads(out)
    assert found["best"]["speedup"] == round(theory.speedup(0.8, 8, 0.05), 3)
    assert [one["g"] for one in found["lengths"]] == [1, 2, 3, 4, 5, 8]
    assert found["needed"][0] == {"speedup": 1.0, "more": True, "alpha": 0.05}
    for one in found["needed"]:
        best = theory.speedup(one["alpha"], theory.best_length(one["alpha"], 0.05, 32), 0.05)
        assert abs(best - one["speedup"]) < 0.01
    # Leviathan et al. 2023, Table 5
    status, out, _ = run("plan", "--alpha", "0.62", "--json")
    assert [one["alpha"][0] for one in json.loads(out)["lenience"]] == [0.71, 0.76, 0.84]


def test_a_draft_without_speedup_is_not_recommended(run: Run) -> None:
    status, out, _ = run("plan", "--alpha", "0.1", "--c", "0.2")
    assert status == 0
    assert "Do not speculate: a draft pays only if its α is above c = 0.2." in out
    status, out, _ = run("plan", "--alpha", "0.9", "--c", "2")
    assert "none is enough" in out
    status, out, _ = run("plan", "--alpha", "0.9", "--c", "2", "--json")
    assert [one["alpha"] for one in json.loads(out)["needed"]] == [None] * 4


def test_wrong_numbers_give_one_line(run: Run) -> None:
    status, _, errors = run("plan", "--alpha", "0.8", "--c", "inf")
    assert (status, errors) == (2, "outpace: --c: got inf; it must be a number from 0 to 1000\n")
    for words in (("--alpha", "1.2"), ("--alpha", "0.5", "--c", "-1"), ("--alpha", "x"), ()):
        status, _, errors = run("plan", *words)
        assert status == 2
        assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--max-draft-tokens", "100000000"], "--max-draft-tokens: got 100000000; it must be from 1 to 1000"),
        (["--max-draft-tokens", "0"], "--max-draft-tokens: got 0; it must be from 1 to 1000"),
        (
            ["--num-draft-tokens", "10000000000"],
            "--num-draft-tokens: got 10000000000; it must be from 0 to 1000",
        ),
        (["--num-draft-tokens", f"{10**400}"], "it must be from 0 to 1000"),
        (["--c", "1e308"], "--c: got 1e+308; it must be a number from 0 to 1000"),
        (["--ops", "1e308"], "--ops: got 1e+308; it must be a number from 0 to 1000"),
        (["--ops", "nan"], "--ops: got nan; it must be a number from 0 to 1000"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_numbers_out_of_range_give_one_line(run: Run, words: list[str], why: str) -> None:
    status, out, errors = run("plan", "--alpha", "0.8", *words)
    assert (status, out) == (2, "")
    assert why in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("alpha", ["0", "0.8", "1"])
@pytest.mark.parametrize("c", ["0", "0.05", "1000"])
def test_extreme_plans_are_finite_and_without_warnings(run: Run, alpha: str, c: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flags = ["--alpha", alpha, "--c", c, "--max-draft-tokens", "1000", "--num-draft-tokens", "1000"]
        status, out, errors = run("plan", *flags, "--json")
        assert (status, errors) == (0, "")
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert run("plan", *flags)[0] == 0


def test_formulas_with_huge_floats_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert theory.speedup(0.8, 5, 1e308) == 0
        assert theory.operations(0.8, 5, 1e308) == float("inf")


def test_the_plot_has_all_curves(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert run("plan", "--alpha", "0.8", "--c", "0.05", "--plot", str(picture))[0] == 0
    text = picture.read_text()
    for label in ("expected tokens per pass", "best g", "oracle", "α = 0.8, c = 0.05, g = 8"):
        assert label in text


def test_the_plot_uses_the_values_of_the_flags(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    words = ["--alpha", "0.8", "--c", "0.05", "--ops", "0.2", "--max-draft-tokens", "4"]
    status, out, _ = run("plan", *words, "--plot", str(picture))
    assert status == 0
    assert "Draft g = 4:" in out
    text = picture.read_text()
    for label in ("α = 0.8, c = 0.05, g = 4", "speedup over the baseline, c = 0.05", "ĉ = 0.2"):
        assert label in text


def test_operations_of_a_point_use_its_own_ops() -> None:
    point = Point(0.8, 0.05, ops=0.2, most=4)
    assert point.operations == theory.operations(0.8, 4, 0.2)
    assert Point(0.8, 0.05).operations == theory.operations(0.8, 8, 0.05)

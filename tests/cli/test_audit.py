"""`outpace audit`: its verdicts, its exit status and its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outpace.auditing.faults import FAULTS
from outpace.cli.audit import FAULT_NAMES
from tests.cli.conftest import Run

PROMPT = "ab ba bb aa ab bb ba aa b"


@pytest.fixture
def flags(model: str, other: str, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT + "\n")
    return [
        *("--target", model, "--draft", other, "--dtype", "float32", "--prompts", str(prompts)),
        *("--samples", "600", "--num-draft-tokens", "3"),
    ]


def test_a_correct_decoder_passes_and_a_planted_fault_is_found(run: Run, flags: list[str]) -> None:
    code, out, err = run("audit", *flags)
    assert (code, out.splitlines()[0]) == (0, "No difference found.")
    assert "would have been found with 99% certainty" in " ".join(out.split())
    assert "sampling: 600 samples, about" in err
    code, out, err = run("audit", *flags, "--greedy-tokens", "0", "--plant", "accept-all")
    assert (code, out.splitlines()[0][:16]) == (1, "DIFFERENCE FOUND")
    assert "planted: Every draft token is accepted." in err
    assert "The planted fault was found by: sampling." in err


def test_json_has_every_figure_of_the_report(run: Run, flags: list[str]) -> None:
    code, out, _ = run("audit", *flags, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["verdict"] == "no difference found"
    assert report["verdicts"] == {"greedy": "no difference found", "sampling": "no difference found"}
    assert report["certainty"] == 0.99
    assert 0 < report["detectable"] < 0.5
    assert report["alarm"] == 1e-3
    assert report["p_value"] == report["joint"][0]["p_value"]
    assert report["draft_tokens"] == report["joint"][0]["draft_tokens"] > report["accepted_tokens"] > 0
    assert report["prompts"] == [PROMPT]


def test_without_draft_tokens_the_exit_status_is_3(run: Run, flags: list[str]) -> None:
    code, out, _ = run("audit", *flags, "--num-draft-tokens", "0", "--samples", "100")
    assert code == 3
    assert out.startswith("Could not tell: no draft token was proposed")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal_and_shows_the_start_of_each_prompt(
    run: Run, flags: list[str], width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text(PROMPT + " and so on" * 8 + "\n" + PROMPT + "\n")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run("audit", *flags, "--samples", "300", "--greedy-tokens", "8")
    assert max(map(len, out.splitlines())) <= width
    long, short = out.rstrip().splitlines()[-2:]
    assert re.match(r"ab ba bb.*…  ", long)
    assert short.startswith(PROMPT if width > 60 else PROMPT[:8])
    for row in (long, short):
        assert re.search(r" same +[0-9.e-]+ +[0-9.]+% +\d+/\d+ *$", row)


def test_a_configuration_names_the_models(run: Run, model: str, other: str, tmp_path: Path) -> None:
    config = tmp_path / "outpace.toml"
    config.write_text(f'target = "{model}"\ndraft = "{other}"\nnum_draft_tokens = 2\n')
    code, out, _ = run("audit", "--config", str(config), "--samples", "0", "--json")
    assert code == 0
    assert json.loads(out)["draft_length_policy"] == "Fixed(2)"


def test_a_misspelt_fault_is_suggested(run: Run) -> None:
    code, _, err = run("audit", "--plant", "rolback")
    assert code == 2
    assert "--plant: got 'rolback'; it must be one of accept-all, resample" in err
    assert 'did you mean "rollback"?' in err


def test_help_names_every_fault() -> None:
    assert FAULT_NAMES.split("|") == [*FAULTS]

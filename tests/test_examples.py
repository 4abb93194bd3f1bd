"""The scripts in `examples/` run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace import Decoder, loading
from outpace.models import default, hub
from tests.tiny import byte_tokenizer, tiny

EXAMPLES = Path(__file__).parents[1] / "examples"
WITH_A_MODEL = ["quick_start", "batch", "own_drafter", "inside_transformers"]


@pytest.fixture
def _tiny_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the default model by a tiny one."""
    tokenizer = byte_tokenizer()
    model = tiny(vocab_size=272)
    model.generation_config.pad_token_id = 0

    def load(draft: Any = "lookup") -> Decoder:
        return Decoder(model, None if draft == "none" else draft, tokenizer)

    monkeypatch.setattr(loading, "load", load)


@pytest.mark.usefixtures("_tiny_default")
@pytest.mark.parametrize("name", WITH_A_MODEL)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_verification_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "verification_alone.py"), run_name="__main__")
    assert "sequence 1: accepted" in capsys.readouterr().out


def test_the_tuning_example_calls_existing_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli.test_help import ALL

    called: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda words, check: called.append(words))
    monkeypatch.setattr(sys, "argv", ["tune_and_use.py", "30"])
    runpy.run_path(str(EXAMPLES / "tune_and_use.py"), run_name="__main__")
    assert [words[3] for words in called] == ["tune", "generate"]
    for words in called:
        flags = {flag for option in ALL[words[3]].params for flag in option.opts}
        assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.full
def test_the_tuning_example_runs_with_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if not hub.is_complete(hub.cache_folder() / default.DEFAULT):
        pytest.skip("the default model is not in the cache: outpace generate downloads it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tune_and_use.py", "60"])
    runpy.run_path(str(EXAMPLES / "tune_and_use.py"), run_name="__main__")
    assert (tmp_path / "outpace.toml").exists()
    assert "speedup over the baseline" in capfd.readouterr().out


def test_every_example_has_a_test() -> None:
    assert {script.stem for script in EXAMPLES.glob("*.py")} == {
        *WITH_A_MODEL,
        "verification_alone",
        "tune_and_use",
    }

"""Prompts from files: what cannot be used is said, and what cannot be read is said before a model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.cli import drafts
from tests.cli.conftest import Run

COMMANDS = {
    "measure": ["-m", "6", "--context", "8", "--pass", "1", "--batch", "1", "--drafts", "1"],
    "sweep": ["-m", "8", "--length", "1"],
    "tune": ["-m", "24", "--budget", "4", "--drafts", "lookup"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_rows_that_cannot_be_used_are_said_and_counted(
    run: Run, model: str, folder: Path, command: str
) -> None:
    rows = ['{"prompt": "ab ab"}', "", '{"prompt": "ba', '{"nothing": 1}', '{"prompt": "ab ba"}']
    (folder / "bad.jsonl").write_text("\n".join(rows))
    flags = ["--target", model, "--data", "bad.jsonl", "--device", "cpu", "--dtype", "float32"]
    _, _, errors = run(command, *flags, *COMMANDS[command], "--temperature", "0")
    (line,) = [one for one in errors.splitlines() if "left out" in one]
    assert line.startswith("bad.jsonl: 2 of 4 rows left out: line 3: not JSON (")
    (written,) = [one for one in folder.iterdir() if one.suffix == ".json"]
    assert json.loads(written.read_text())["data"] == {"name": "bad.jsonl", "rows": 4, "left_out": 2}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "data: rows.jsonl: no such file"),
        (b"", "data: rows.jsonl has no rows"),
        (b'{"prompt": "\xff"}', "data: rows.jsonl is not a text file in UTF-8"),
        (b'{"nothing": 1}\n', "has no row that can be used: line 1: there is no text to start from"),
    ],
    ids=["missing", "empty", "no text", "no prompts"],
)
def test_data_are_read_before_a_model_is(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, text: bytes | None, why: str
) -> None:
    refuse_models(monkeypatch)
    if text is not None:
        (folder / "rows.jsonl").write_bytes(text)
    status, _, errors = run(command, *COMMANDS[command], "--data", "rows.jsonl")
    assert status == 2
    assert why in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "flags", "why"),
    [
        ("measure", ["--lenience", "0"], "--lenience: got 0"),
        ("measure", ["--within", "2"], "--within: got 2"),
        ("measure", ["--confidence", "1"], "--confidence: got 1"),
        ("measure", ["--top-p", "2"], "--top-p: got 2.0"),
        ("sweep", ["--rule", "coin"], "rule: got 'coin'"),
        ("sweep", ["--top-p", "2"], "--top-p: got 2.0"),
        ("tune", ["--budget", "0"], "budget: got 0"),
        ("tune", ["--top-p", "2"], "--top-p: got 2.0"),
    ],
)
def test_numbers_are_checked_before_a_model_is_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, flags: list[str], why: str
) -> None:
    refuse_models(monkeypatch)
    status, _, errors = run(command, *COMMANDS[command], *flags)
    assert status == 2
    assert why in errors.splitlines()[-1]


def refuse_models(patch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    patch.setattr(drafts, "load_model", load)

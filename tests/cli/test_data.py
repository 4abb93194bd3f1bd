"""Prompts from files: unusable rows and files are reported before a model is loaded."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import loading
from outpace.bench.data import read
from outpace.cli import drafts
from outpace.tasks import transcribe
from outpace.tasks.journal import Journal
from tests.cli.conftest import Run, interrupted

COMMANDS = {
    "bench alpha": ["-m", "6", "--context", "8", "--pass", "1", "--batch", "1", "--num-draft-tokens", "1"],
    "bench sweep": ["-m", "8", "--num-draft-tokens", "1"],
    "tune": ["-m", "24", "--budget", "4", "--drafts", "lookup"],
    "eval": ["specbench", "-m", "4"],
}
COMMANDS_WITH_NOTES = [name for name in COMMANDS if name != "eval"]  # eval reports bad rows in its table
ROW = {"prompt": "ab ab", "source": "ab ab", "test": "def check(f): 0", "entry_point": "f", "audio": "a.wav",
       "text": "a", "reference": "b"}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS_WITH_NOTES)
def test_unusable_rows_are_reported_and_counted(run: Run, model: str, folder: Path, command: str) -> None:
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
        (b"\n \n\r\n", "data: rows.jsonl has no rows"),
        (b"\xef\xbb\xbf", "data: rows.jsonl has no row that can be used: line 1: not JSON ("),
        (b'{"a": 1}\n{"prompt": "\xff"}', "data: rows.jsonl is not a text file in UTF-8 (line 2)"),
        ('{"prompt": "a"}'.encode("utf-16"), "not a text file in UTF-8 (it starts as UTF-16 does)"),
        (b'{"nothing": 1}\n', "has no row that can be used: line 1: there is no text to start from"),
        (b"{}\n", "has no row that can be used: line 1: there is no text to start from"),
        (b'{"turns": [""]}\n', "has no row that can be used: line 1: there is no text to start from"),
        (b"\nnull\n", "data: rows.jsonl has no row that can be used: line 2: not a JSON object"),
        (b"3", "data: rows.jsonl has no row that can be used: line 1: not a JSON object"),
        (b"[]\n", "data: rows.jsonl has no row that can be used: line 1: not a JSON object"),
        (b'"text"\n', "data: rows.jsonl has no row that can be used: line 1: not a JSON object"),
        (b"[" * 100_000, "has no row that can be used: line 1: not JSON that can be read ("),
        (b'{"prompt": ' + b"9" * 100_000 + b"}", "line 1: not JSON that can be read ("),
        (b'{"prompt": "' + b"a" * (1 << 22), "has no row that can be used: line 1: not JSON ("),
    ],
    ids=["missing", "empty", "blank", "mark", "no text", "UTF-16", "no prompts", "{}", "no turns", "null",
         "3", "[]", "string", "deep", "number", "long"],
)  # fmt: skip
def test_bad_data_files_are_refused_before_a_model_is_loaded(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, text: bytes | None, why: str
) -> None:
    forbid_loading(monkeypatch)
    if text is not None:
        (folder / "rows.jsonl").write_bytes(text)
    status, _, errors = run(command, *COMMANDS[command], "--data", "rows.jsonl")
    assert status == 2
    assert why in errors.splitlines()[-1]
    assert len(errors.splitlines()[-1]) < 300


@pytest.mark.parametrize("command", COMMANDS)
def test_data_must_be_a_regular_file(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    forbid_loading(monkeypatch)
    (folder / "rows").mkdir()
    os.mkfifo(folder / "pipe")
    for name, why in (
        ("rows", "rows is a folder without a manifest.jsonl"),
        ("pipe", "pipe is not a regular"),
    ):
        status, _, errors = run(command, *COMMANDS[command], "--data", name)
        assert status == 2
        assert f"data: {why}" in errors.splitlines()[-1]


def test_a_byte_order_mark_is_ignored(folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "ab"}\r\n{"prompt": "ba"}\r\n')
    assert [list(one.turns) for one in read("rows.jsonl").items] == [["ab"], ["ba"]]


@pytest.mark.parametrize(
    ("command", "flags", "why"),
    [
        ("bench alpha", ["--lenience", "0"], "--lenience: got 0"),
        ("bench alpha", ["--within", "2"], "--within: got 2"),
        ("bench alpha", ["--confidence", "1"], "--confidence: got 1"),
        ("bench alpha", ["--top-p", "2"], "--top-p: got 2.0"),
        ("bench sweep", ["--rule", "coin"], "rule: got 'coin'"),
        ("bench sweep", ["--top-p", "2"], "--top-p: got 2.0"),
        ("tune", ["--budget", "0"], "budget: got 0"),
        ("tune", ["--top-p", "2"], "--top-p: got 2.0"),
    ],
)
def test_numbers_are_checked_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, flags: list[str], why: str
) -> None:
    forbid_loading(monkeypatch)
    status, _, errors = run(command, *COMMANDS[command], *flags)
    assert status == 2
    assert why in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("task", "flags", "why"),
    [
        ("dialog", ["--runners", "fast"], "--runners: got 'fast'"),
        ("dialog", ["--runners", "basline"], 'did you mean "baseline"?'),
        (
            "dialog",
            ["--runners", "exact", "-d", "none"],
            "--runners: none of exact is possible: there is no drafter",
        ),
        (
            "dialog",
            ["--runners", "sigmoid"],
            "--runners: none of sigmoid is possible: greedy decoding is always",
        ),
        ("dialog", ["--rule", "tokn"], "rule: got 'tokn'"),
        ("dialog", ["--dtype", "float31"], "dtype: got 'float31'"),
        ("dialog", ["--device", "abacus"], "device: got 'abacus'"),
        ("dialog", ["--num-draft-tokens", "some"], "--num-draft-tokens: got 'some'"),
        (
            "dialog",
            ["--num-draft-tokens", "3", "-d", "none"],
            "--num-draft-tokens: nothing is drafted with --draft none",
        ),
        ("dialog", ["-t", "./nothing"], "./nothing: no such file or folder"),
        ("dialog", ["-d", "./nothing"], "./nothing: no such file or folder"),
        ("dialog", ["-d", "ngram:nothing"], "draft: nothing: no such file"),
        ("dialog", ["-d", "ngram:rows.jsonl"], "draft: rows.jsonl holds no n-gram drafter"),
        ("dialog", ["-d", "lokup"], 'lokup: no such file, folder or hub model; did you mean "lookup"?'),
        ("dialog", ["--top-p", "2"], "--top-p: got 2"),
        ("dialog", ["--seed", str(2**64 - 1)], "seed: got"),
        ("dialog", ["--scale", "inf"], "--scale: got inf"),
        ("dialog", ["--language", "en"], "--language: only for asr"),
        ("dialog", ["-o", "."], "--out: . is a folder"),
        ("dialog", ["-o", "rows.jsonl/x"], "--out: rows.jsonl: no such folder can be made"),
        ("dialog", ["-o", "x"], "--out: x.md is a folder"),
        ("dialog", ["-o", "untested.jsonl"], "untested.jsonl is not a file of `outpace eval`"),
        ("translate", ["--languages", "en-"], "--languages: got 'en-'"),
        ("asr", ["--language", "germn"], 'did you mean "german"?'),
        ("code", ["--data", "untested.jsonl"], "no row that can be used: line 1: there is no test"),
        ("summarize", ["--data", "untested.jsonl"], "no row that can be used: line 1: there is no summary"),
        (
            "translate",
            ["--data", "untested.jsonl"],
            "no row that can be used: line 1: there is no translation",
        ),
        ("asr", ["--data", "untested.jsonl"], "no row that can be used: line 1: there is no audio"),
    ],
)
def test_eval_checks_flags_files_and_data_before_a_model_is_loaded(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, task: str, flags: list[str], why: str
) -> None:
    forbid_loading(monkeypatch)
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "untested.jsonl").write_text('{"source": "ab", "entry_point": "f"}\n')
    (folder / "x.md").mkdir()
    status, _, errors = run("eval", task, "--data", "rows.jsonl", *flags)
    assert status == 2
    assert why in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("task", "package"), [("asr", "jiwer"), ("summarize", "rouge_score"), ("translate", "sacrebleu")]
)
def test_a_missing_package_is_reported_before_a_model_is_loaded(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, task: str, package: str
) -> None:
    forbid_loading(monkeypatch)
    monkeypatch.setitem(sys.modules, package, None)
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    status, _, errors = run("eval", task, "--data", "rows.jsonl")
    assert status == 2
    assert errors.splitlines()[-1] == f"outpace: this needs {package}: pip install 'outpace[tasks]'"


def test_an_existing_run_is_checked_before_a_model_is_loaded(
    run: Run, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    words = "eval", "dialog", "--data", "rows.jsonl", "-m", "4", "-o", "out.jsonl"
    status, shown, errors = run(*words, "-t", model, "--dtype", "float32")
    assert status == 0, errors
    saved = Path("out.jsonl.md").read_text()
    whole = Path("out.jsonl").read_text()
    forbid_loading(monkeypatch)

    status, again, errors = run(*words, "-t", model, "--dtype", "float32")
    assert (status, again) == (0, shown), errors
    assert "out.jsonl has all rows; --fresh runs them again" in errors
    assert Path("out.jsonl.md").read_text() == saved

    status, _, errors = run(*words, "-t", model, "--dtype", "float32", "--seed", "3")
    assert status == 2
    assert "is of another run (seed: 0 there, 3 here); name another file, or --fresh" in errors

    with Journal(folder / "out.jsonl"):
        status, _, errors = run(*words, "-t", model, "--dtype", "float32")
    assert status == 2
    assert "another run is writing to out.jsonl" in errors

    for flags, why in (
        (["--dtype", "bfloat16"], "dtype: float32 there, bfloat16 here"),
        (["--dtype", "float32", "--num-draft-tokens", "2"], "num_draft_tokens: default there, 2 here"),
        (
            ["--dtype", "float32", "--rule", "block", "--revision", "v2"],
            "rule: token there, block here; revision: default there, v2 here",
        ),
    ):
        status, _, errors = run(*words, "-t", model, *flags)
        assert status == 2
        assert f"is of another run ({why}); name another file, or --fresh" in errors

    _, _, errors = run(*words, "-t", model, "--dtype", "float32", "--fresh")
    assert "a model was loaded" in errors

    Path("out.jsonl").write_text(whole[: len(whole) - 20])
    _, _, errors = run(*words, "-t", model, "--dtype", "float32")
    assert "its last line is incomplete; that row is run again" in errors
    assert "a model was loaded" in errors
    assert Path("out.jsonl").read_text() == whole[: len(whole) - 20]


def test_eval_does_not_resume_the_run_of_another_model_of_the_same_name(
    run: Run, model: str, other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    for name, source in (("one", model), ("two", other)):
        shutil.copytree(source, folder / name / "model")
    words = "eval", "dialog", "--data", "rows.jsonl", "-m", "4", "-o", "out.jsonl", "-t"
    assert run(*words, str(folder / "one" / "model"))[0] == 0
    whole = Path("out.jsonl").read_text()
    Path("out.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    forbid_loading(monkeypatch)
    status, _, errors = run(*words, str(folder / "two" / "model"))
    assert status == 2
    assert "is of another run (target: another model of this name); name another file" in errors


def test_eval_records_its_date(run: Run, model: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    words = "eval", "dialog", "--data", "rows.jsonl", "-m", "4", "-o", "out.jsonl", "-t", model
    before = datetime.now(UTC).replace(microsecond=0)
    assert run(*words, "--runners", "baseline")[0] == 0
    written = json.loads(Path("out.jsonl").read_text().splitlines()[0])["date"]
    assert before <= datetime.fromisoformat(written) <= datetime.now(UTC)


@pytest.mark.parametrize("data", ["rows.jsonl", "link.jsonl", "folder", "table.jsonl.md"])
def test_eval_refuses_to_overwrite_its_data(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    forbid_loading(monkeypatch)
    out = {"folder": "folder/manifest.jsonl", "table.jsonl.md": "table.jsonl"}.get(data, "rows.jsonl")
    (folder / "folder").mkdir()
    for name in ("rows.jsonl", "folder/manifest.jsonl", "table.jsonl.md"):
        (folder / name).write_text(json.dumps(ROW) + "\n")
    (folder / "link.jsonl").symlink_to(folder / "rows.jsonl")
    status, _, errors = run("eval", "dialog", "--data", data, "--fresh", "-o", out)
    assert status == 2
    assert "is the file of --data; name another file" in errors.splitlines()[-1]


def test_a_run_with_a_row_missing_is_not_complete(run: Run, model: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    words = "eval", "dialog", "--data", "rows.jsonl", "-m", "4", "-o", "out.jsonl", "-t", model
    assert run(*words)[0] == 0
    lines = Path("out.jsonl").read_text().splitlines(keepends=True)
    Path("out.jsonl").write_text("".join(lines[:3] + lines[4:]))
    status, _, errors = run(*words)
    assert status == 0, errors
    assert f"out.jsonl has {len(lines) - 2} of {len(lines) - 1} results; resuming" in errors
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()[1:]]
    untimed = {(one["runner"], one["row"]): one["texts"] for one in found}
    before = [json.loads(line) for line in lines[1:]]
    assert untimed == {(one["runner"], one["row"]): one["texts"] for one in before}


@pytest.mark.full
def test_an_interrupted_eval_is_resumed(
    run: Run, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # the subprocess uses as many threads
    rows = [{"prompt": f"count to {i}"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "dialog", "--data", "rows.jsonl", "-m", "24", "-t", model, "--runners", "baseline,exact"]
    out = folder / "eval-dialog.jsonl"
    status, _, errors = interrupted(words, lambda: out.exists() and out.read_bytes().count(b"\n") > 3)
    assert status == 130
    done = out.read_bytes().count(b"\n") - 1
    assert done < 80
    assert f"eval-dialog.jsonl has {done} results; the same command resumes the run" in errors
    assert not Path(f"{out}.lock").exists()
    before = out.read_bytes()
    status, _, errors = run(*words)
    assert status == 0, errors
    assert f"eval-dialog.jsonl has {done} of 80 results; resuming" in errors
    assert out.read_bytes().startswith(before)
    assert out.read_bytes().count(b"\n") == 81


def test_eval_takes_defaults_from_a_configuration(run: Run, model: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "tuned.toml").write_text(f'target = "{model}"\ndraft = "lookup"\nnum_draft_tokens = 2\n')
    status, _, errors = run("eval", "dialog", "--data", "rows.jsonl", "-m", "4", "--config", "tuned.toml")
    assert status == 0, errors
    header = json.loads(Path("eval-dialog.jsonl").read_text().splitlines()[0])
    assert header["target"] == Path(model).name
    assert "num_draft_tokens  Fixed(2)" in header["settings"]["models"]


def test_eval_passes_trust_remote_code_and_revision_to_loaders(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: dict[str, Any] = {}

    def load(*names: Any, **options: Any) -> None:
        received.update(options)
        raise ValueError("that is enough")

    monkeypatch.setattr(loading, "load", load)
    models_module = sys.modules["outpace.cli.models"]
    monkeypatch.setattr(models_module, "refuse_speech", lambda *_, **__: None)
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    words = "eval", "dialog", "--data", "rows.jsonl", "-t", "owner/name"
    assert "that is enough" in run(*words, "--trust-remote-code", "--revision", "v2")[2]
    assert (received["trust_remote_code"], received["revision"]) == (True, "v2")
    received.clear()
    run(*words)
    assert not received.get("trust_remote_code")
    assert received.get("revision") is None


def test_the_help_of_eval_explains_its_exit_status(run: Run) -> None:
    _, shown, _ = run("eval", "--help")
    assert "Exit status: 0 if all rows were evaluated" in " ".join(shown.split())


def forbid_loading(patch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    for module in (drafts, loading, transcribe):
        patch.setattr(module, "load_model", load)
    patch.setattr(transcribe, "load_processor", load)

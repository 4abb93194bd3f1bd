"""`outpace report`: it writes a page, or prints one line that says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.report.markup import Markup
from tests.report.sample_results import evaluated, measured, save, save_journal, swept, tuned


def test_report_writes_one_page_and_counts_its_figures_and_tables(run: Run, tmp_path: Path) -> None:
    paths = save(tmp_path, measure=measured() | {"drafts": []}, tune=tuned())
    out = tmp_path / "page.html"
    out.write_text("an earlier one")
    status, printed, errors = run("report", *paths, "-o", str(out))
    assert (status, printed) == (0, "")
    assert errors == f"{out}: 3 figures, 4 tables\n"
    assert Markup(out.read_text(encoding="utf-8")).titles[-1] == "How this was measured"
    assert {one.name for one in tmp_path.iterdir()} == {"measure.json", "page.html", "tune.json"}


def test_counts_of_one_are_singular(run: Run, tmp_path: Path) -> None:
    content = {name: value for name, value in measured().items() if name not in ("drafts", "trace", "verify")}
    out = tmp_path / "page.html"
    assert run("report", *save(tmp_path, measure=content), "-o", str(out))[2] == f"{out}: 1 figure, 1 table\n"


def test_default_output_is_report_html_and_pytorch_is_not_imported(tmp_path: Path) -> None:
    save(tmp_path, tune=tuned())
    code = (
        "import sys; sys.argv = ['outpace', 'report', 'tune.json']\n"
        "from outpace.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout == "False\n"
    assert (tmp_path / "report.html").exists()


def test_help_names_the_input_files(run: Run) -> None:
    status, out, _ = run("report", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert status == 0
    assert "Usage: outpace report" in words
    for expected in (
        "`outpace bench alpha`, `bench sweep`, `tune` (.json) and `eval` (.jsonl)",
        "or folders that hold",
    ):
        assert expected in words


def test_folder_adds_all_its_result_files_and_names_the_skipped_ones(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    save(folder, tune=tuned(), other={"kind": "bench"})
    save_journal(folder / "eval-summarize.jsonl", evaluated())
    (folder / "eval-summarize.jsonl.md").write_text("| summarize |\n")
    (folder / "questions.jsonl").write_text('{"prompt": "Why?"}\n')
    out = tmp_path / "page.html"
    status, _, errors = run("report", str(folder), "-o", str(out))
    assert status == 0
    skipped = [line for line in errors.splitlines() if line.startswith("left out: ")]
    assert skipped == [
        f"left out: {folder / name} was not written by outpace bench alpha, bench sweep, tune or eval"
        for name in ("other.json", "questions.jsonl")
    ]
    titles = Markup(out.read_text(encoding="utf-8")).titles
    assert titles == ["Tuning candidates", "Quality and speed: summarize", "How this was measured"]


def test_files_with_the_same_name_are_shown_with_their_folders(run: Run, tmp_path: Path) -> None:
    paths = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        paths += save(tmp_path / name, tune=tuned())
    out = tmp_path / "page.html"
    assert run("report", *paths, "-o", str(out))[0] == 0
    titles = Markup(out.read_text(encoding="utf-8")).titles
    assert titles[:2] == [f"Tuning candidates: {path}" for path in paths]


def test_wrong_input_is_an_error_of_one_line(run: Run, tmp_path: Path) -> None:
    odd = {"kind": "alpha", "passes": [{"B": 1}]}
    bench, tune, other, none = save(
        tmp_path, bench={"kind": "bench"}, tune=tuned(), odd=odd, none={"kind": "sweep", "figures": []}
    )
    wrong = {"empty.json": b"", "text.json": b"{", "bytes.json": b"\xff\xfe\x00", "list.json": b"[1, 2]",
            "null.jsonl": b"null\n", "rows.jsonl": b'{"prompt": "a"}\n{"prompt": "b"}\n'}  # fmt: skip
    path = {name: tmp_path / name for name in wrong}
    for name, content in wrong.items():
        path[name].write_bytes(content)
    missing, out = tmp_path / "none" / "none.json", tmp_path / "report.html"
    damaged = save_journal(tmp_path / "damaged.jsonl", [evaluated()[0], {"odd": 1}, evaluated()[1]])
    started = save_journal(tmp_path / "started.jsonl", evaluated()[:1])
    headless = save_journal(tmp_path / "headless.jsonl", [{"task": "asr", "settings": {}, "data": None}])
    hint = "it must be one that `outpace bench alpha`, `bench sweep`, `tune` or `eval` wrote"
    for paths, message in (
        ((str(missing),), f"{missing}: no such file"),
        ((str(path["empty.json"]), tune), f"{path['empty.json']}: the file is empty; {hint}"),
        ((str(path["text.json"]), tune), f"{path['text.json']}: not a JSON file; {hint}"),
        ((str(path["bytes.json"]), tune), f"{path['bytes.json']}: not a text file; {hint}"),
        ((str(path["list.json"]), tune), f"{path['list.json']}: not a result file; {hint}"),
        ((str(path["null.jsonl"]), tune), f"{path['null.jsonl']}: not a JSON file; {hint}"),
        ((str(path["rows.jsonl"]), tune), f"{path['rows.jsonl']}: not a result file; {hint}"),
        ((tune, bench), f"{bench}: not a result file; {hint}"),
        ((tune, damaged), f"{damaged}: line 2 is not as `outpace eval` writes it"),
        ((tune, headless), f"{headless}: line 1 is not as `outpace eval` writes it"),
        ((tune, other), "odd.json: it is not as `outpace bench alpha` writes it: KeyError('n')"),
        (
            (none, started),
            "results: nothing was measured yet in none.json, started.jsonl; run the command to its end",
        ),
    ):
        status, _, errors = run("report", *paths, "-o", str(out))
        assert (status, errors) == (2, f"outpace: {message}\n")
    (tmp_path / "folder").mkdir()
    status, _, errors = run("report", str(tmp_path / "folder"), "-o", str(out))
    message = "no file in this folder was written by `outpace bench alpha`, `bench sweep`, `tune` or `eval`"
    assert (status, errors) == (2, f"outpace: {tmp_path / 'folder'}: {message}\n")
    assert run("report")[0] == 2
    assert not out.exists()


def test_unusable_output_path_is_an_error_of_one_line(run: Run, tmp_path: Path) -> None:
    (tune,) = save(tmp_path, tune=tuned())
    nowhere = tmp_path / "none" / "report.html"
    for out, message in (
        (nowhere, f"--out: {nowhere.parent}: no such folder"),
        (tmp_path, f"--out: {tmp_path} is a folder"),
        (tune, f"--out: {tune} is one of the results"),
    ):
        status, _, errors = run("report", tune, "-o", str(out))
        assert (status, errors) == (2, f"outpace: {message}\n")
    assert json.loads(Path(tune).read_text()) == tuned()


@pytest.mark.parametrize(
    ("package", "message"),
    [("matplotlib", "a plot needs matplotlib"), ("jinja2", "this needs jinja2")],
)
def test_missing_package_is_named_with_the_command_to_install_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "outpace.report.page", raising=False)
    (path,) = save(tmp_path, sweep=swept())
    status, _, errors = run("report", path, "-o", str(tmp_path / "report.html"))
    assert (status, errors) == (2, f"outpace: {message}: pip install 'outpace[plot]'\n")
    assert not (tmp_path / "report.html").exists()

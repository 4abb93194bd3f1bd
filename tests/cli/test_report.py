"""`outpace report`: files in, a page out, or a line that says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.report.markup import Markup
from tests.report.written import evaluated, measured, save, save_journal, swept, tuned


def test_files_become_a_page(run: Run, tmp_path: Path) -> None:
    paths = save(tmp_path, measure=measured() | {"drafts": []}, tune=tuned())
    out = tmp_path / "page.html"
    out.write_text("an earlier one")
    status, printed, errors = run("report", *paths, "-o", str(out))
    assert (status, printed) == (0, "")
    assert errors == f"{out}: 3 figures, 4 tables\n"
    assert Markup(out.read_text(encoding="utf-8")).titles[-1] == "How this was measured"
    assert {one.name for one in tmp_path.iterdir()} == {"measure.json", "page.html", "tune.json"}


def test_one_of_a_kind_is_one(run: Run, tmp_path: Path) -> None:
    content = {name: one for name, one in measured().items() if name not in ("drafts", "trace", "verify")}
    out = tmp_path / "page.html"
    assert run("report", *save(tmp_path, measure=content), "-o", str(out))[2] == f"{out}: 1 figure, 1 table\n"


def test_it_is_report_html_by_default_and_needs_no_pytorch(tmp_path: Path) -> None:
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


def test_it_explains_itself(run: Run) -> None:
    status, out, _ = run("report", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert status == 0
    assert "Usage: outpace report" in words
    for said in (
        "`outpace bench alpha`, `bench sweep`, `tune` (.json) and `eval` (.jsonl)",
        "or folders that hold",
    ):
        assert said in words


def test_a_folder_gives_all_of_its_results_and_names_what_it_leaves_out(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    save(folder, tune=tuned(), other={"kind": "bench"})
    save_journal(folder / "eval-summarize.jsonl", evaluated())
    (folder / "eval-summarize.jsonl.md").write_text("| summarize |\n")
    (folder / "questions.jsonl").write_text('{"prompt": "Why?"}\n')
    out = tmp_path / "page.html"
    status, _, errors = run("report", str(folder), "-o", str(out))
    assert status == 0
    left = [line for line in errors.splitlines() if line.startswith("left out: ")]
    assert left == [
        f"left out: {folder / name} was not written by outpace bench alpha, bench sweep, tune or eval"
        for name in ("other.json", "questions.jsonl")
    ]
    titles = Markup(out.read_text(encoding="utf-8")).titles
    assert titles == ["What was tried", "Quality and speed: summarize", "How this was measured"]


def test_files_of_one_name_are_told_apart_by_their_folders(run: Run, tmp_path: Path) -> None:
    paths = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        paths += save(tmp_path / name, tune=tuned())
    out = tmp_path / "page.html"
    assert run("report", *paths, "-o", str(out))[0] == 0
    titles = Markup(out.read_text(encoding="utf-8")).titles
    assert titles[:2] == [f"What was tried: {path}" for path in paths]


def test_what_is_no_result_is_a_line(run: Run, tmp_path: Path) -> None:
    odd = {"kind": "alpha", "passes": [{"B": 1}]}
    bench, tune, other, none = save(
        tmp_path, bench={"kind": "bench"}, tune=tuned(), odd=odd, none={"kind": "sweep", "figures": []}
    )
    made = {"empty.json": b"", "text.json": b"{", "bytes.json": b"\xff\xfe\x00", "list.json": b"[1, 2]",
            "null.jsonl": b"null\n", "rows.jsonl": b'{"prompt": "a"}\n{"prompt": "b"}\n'}  # fmt: skip
    path = {name: tmp_path / name for name in made}
    for name, content in made.items():
        path[name].write_bytes(content)
    missing, out = tmp_path / "none" / "none.json", tmp_path / "report.html"
    damaged = save_journal(tmp_path / "damaged.jsonl", [evaluated()[0], {"odd": 1}, evaluated()[1]])
    begun = save_journal(tmp_path / "begun.jsonl", evaluated()[:1])
    headless = save_journal(tmp_path / "headless.jsonl", [{"task": "asr", "settings": {}, "data": None}])
    wanted = "it must be one that `outpace bench alpha`, `bench sweep`, `tune` or `eval` wrote"
    for given, said in (
        ((str(missing),), f"{missing}: no such file"),
        ((str(path["empty.json"]), tune), f"{path['empty.json']}: the file is empty; {wanted}"),
        ((str(path["text.json"]), tune), f"{path['text.json']}: not a JSON file; {wanted}"),
        ((str(path["bytes.json"]), tune), f"{path['bytes.json']}: not a text file; {wanted}"),
        ((str(path["list.json"]), tune), f"{path['list.json']}: a file of something else; {wanted}"),
        ((str(path["null.jsonl"]), tune), f"{path['null.jsonl']}: not a JSON file; {wanted}"),
        ((str(path["rows.jsonl"]), tune), f"{path['rows.jsonl']}: a file of something else; {wanted}"),
        ((tune, bench), f"{bench}: a file of something else; {wanted}"),
        ((tune, damaged), f"{damaged}: line 2 is not as `outpace eval` writes it"),
        ((tune, headless), f"{headless}: line 1 is not as `outpace eval` writes it"),
        ((tune, other), "odd.json: it is not as `outpace bench alpha` writes it: KeyError('n')"),
        (
            (none, begun),
            "results: nothing was measured yet in none.json, begun.jsonl; run the command to its end",
        ),
    ):
        status, _, errors = run("report", *given, "-o", str(out))
        assert (status, errors) == (2, f"outpace: {said}\n")
    (tmp_path / "folder").mkdir()
    status, _, errors = run("report", str(tmp_path / "folder"), "-o", str(out))
    said = "no file in this folder was written by `outpace bench alpha`, `bench sweep`, `tune` or `eval`"
    assert (status, errors) == (2, f"outpace: {tmp_path / 'folder'}: {said}\n")
    assert run("report")[0] == 2
    assert not out.exists()


def test_where_a_page_cannot_be_is_a_line(run: Run, tmp_path: Path) -> None:
    (tune,) = save(tmp_path, tune=tuned())
    nowhere = tmp_path / "none" / "report.html"
    for out, said in (
        (nowhere, f"--out: {nowhere.parent}: no such folder"),
        (tmp_path, f"--out: {tmp_path} is a folder"),
        (tune, f"out: {tune} is one of the results"),
    ):
        status, _, errors = run("report", tune, "-o", str(out))
        assert (status, errors) == (2, f"outpace: {said}\n")
    assert json.loads(Path(tune).read_text()) == tuned()


@pytest.mark.parametrize(
    ("package", "said"),
    [("matplotlib", "a plot needs matplotlib"), ("jinja2", "this needs jinja2")],
)
def test_what_is_missing_is_named_with_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "outpace.report.page", raising=False)
    (path,) = save(tmp_path, sweep=swept())
    status, _, errors = run("report", path, "-o", str(tmp_path / "report.html"))
    assert (status, errors) == (2, f"outpace: {said}: pip install 'outpace[plot]'\n")
    assert not (tmp_path / "report.html").exists()

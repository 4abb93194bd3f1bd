"""`outpace report`: files in, a page out, or a line that says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.report.markup import Markup
from tests.report.written import measured, save, swept, tuned


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
    assert status == 0
    assert "Usage: outpace report" in out


def test_what_is_no_result_is_a_line(run: Run, tmp_path: Path) -> None:
    odd = {"kind": "measure", "passes": [{"B": 1}]}
    bench, tune, other = save(tmp_path, bench={"kind": "bench"}, tune=tuned(), odd=odd)
    missing = tmp_path / "none.json"
    empty, text = tmp_path / "empty.json", tmp_path / "text.json"
    empty.write_text(json.dumps({"kind": "sweep", "figures": []}))
    text.write_text("{")
    out = tmp_path / "report.html"
    for given, said in (
        ((str(missing),), f"{missing}: no such file"),
        ((str(text), tune), f"{text}: not a JSON file"),
        ((str(tmp_path),), f"{tmp_path} is a folder"),
        (
            (tune, bench),
            f"{bench}: it was not written by `outpace measure` or `outpace sweep` or `outpace tune`",
        ),
        ((tune, other), "odd.json: it is not as `outpace measure` writes it: KeyError('n')"),
        ((str(empty),), "results: there is nothing to draw in empty.json"),
    ):
        status, _, errors = run("report", *given, "-o", str(out))
        assert (status, errors) == (2, f"outpace: {said}\n")
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

"""Tables of the measuring commands: whole at 80 columns, with the page's names and cells."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import pytest

from outpace.bench.forecast import SweepLine
from outpace.cli import lines, measured, tables, tuned
from outpace.cli.show import screen
from outpace.report import measured as measured_page
from outpace.report import swept as swept_page
from outpace.report import tuned as tuned_page
from tests.report import written

LONG = "some-organisation/A-Model-Of-A-Rather-Long-Name-7B-Instruct"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def heads(shown: str) -> set[str]:
    """Heads of all tables, each put together from its lines."""
    found: set[str] = set()
    above: list[list[str]] = []
    for line in shown.splitlines():
        if line.startswith("┃"):
            above.append([cell.strip() for cell in line.strip("┃").split("┃")])
        elif above:
            found |= {" ".join(filter(None, cells)) for cells in zip(*above, strict=True)}
            above = []
    return found


def whole(shown: str) -> bool:
    """Whether nothing is cut: every line of a table ends with its border, within the screen."""
    drawn = [line.rstrip() for line in shown.splitlines() if line[:1] in "┃│┏┡└"]
    return (
        bool(drawn)
        and "…" not in shown
        and max(map(len, drawn)) <= 80
        and all(line[-1] in "┃│┓┩┘" for line in drawn)
    )


def swept(**changed: Any) -> list[SweepLine]:
    names = {one.name for one in fields(SweepLine)}
    rows = [one for one in written.swept()["figures"] if one["temperature"] == 0]
    return [SweepLine(**{name: one[name] for name in names} | changed) for one in rows]


def content(draft: str | None = None) -> dict[str, Any]:
    """What `measure` hands to its tables."""
    found = written.measured() | {"g": 4}
    for one in found["drafts"]:
        one |= {"tokens_per_pass": [2.1, 2.2]} | ({"draft": draft} if draft else {})
    return found


def tuning(draft: str | None = None) -> dict[str, Any]:
    found = written.tuned() | {"max_batch": 4}
    more = {"batch": 4, "dtype": "float32", "rule": "token", "why": "expected to pay, " * 4}
    found["candidates"].append(found["candidates"][0] | more)
    for one in found["candidates"]:
        one |= {"draft": draft} if draft else {}
    return found


@pytest.mark.parametrize("draft", [None, LONG])
def test_tables_are_whole_at_80_columns(capsys: pytest.CaptureFixture[str], draft: str | None) -> None:
    slow = {f"{name}_ms": 123456.7 for name in ("mean", "deviation", "p50", "p90", "p99", "loop")}
    lines.show(swept(**slow | ({"draft": draft} if draft else {})))
    assert whole(capsys.readouterr().out)
    measured.show(content(draft))
    assert whole(capsys.readouterr().out)
    tuned.show(tuning(draft) | {"transformers": None, "vllm": None})
    shown = capsys.readouterr().out
    assert whole(shown)
    if draft:
        names = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
        assert draft in "".join(names)  # folded, not cut


def test_a_quantity_has_one_name_in_the_command_and_on_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines.show(swept())
    names = heads(capsys.readouterr().out)
    (section, _) = swept_page.sections(written.swept())
    page = {head for table in section.tables for head in table.heads}
    assert names <= page
    assert page - names == {"draft", "tokens/s", "texts", "tokens"}  # in a title, or on the page alone

    tuned.show(tuning() | {"transformers": None, "vllm": None})
    (section,) = tuned_page.sections(tuning())
    assert heads(capsys.readouterr().out) == set(section.tables[0].heads)

    console_title, columns, _ = measured.of_drafts(content())
    assert "40 prompts" in console_title
    drafts = measured_page.sections(content())[0].tables[0]
    assert {one.head for one in columns} | {"c"} == set(drafts.heads)


def test_a_cell_is_the_same_in_the_command_and_on_the_page() -> None:
    _, columns, _ = measured.of_drafts(content())
    drafts = measured_page.sections(content())[0].tables[0]
    for one in columns:
        at = list(drafts.heads).index(one.head)
        assert list(one.cells) == [row[at] for row in drafts.rows]


def test_columns_that_do_not_fit_come_below_with_the_names_of_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [["lookup", *["1.00 (0.90–1.10)"] * 8]]
    some = tables.columns(["draft", *(f"head {i}" for i in range(8))], rows, words=("draft",))
    tables.show(screen(sys.stdout), "speeds", some)
    shown = capsys.readouterr().out
    assert whole(shown)
    assert shown.count("│ lookup │") == 2
    assert heads(shown) == {one.head for one in some}


def test_an_interval_stands_below_its_figure_where_that_saves_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = written.tuned()
    for one in few["candidates"]:
        one["draft"] = "lookup"
    few["candidates"].append(few["candidates"][0] | {"batch": 4, "why": "expected to pay, " * 4})
    tuned.show(few | {"max_batch": 4, "transformers": None, "vllm": None})
    shown = capsys.readouterr().out
    assert whole(shown)
    assert shown.count("┏") == 1
    assert "(1.98–2.15)" in shown

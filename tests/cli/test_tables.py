"""Tables of the measuring commands fit 80 columns, with the same names and cells as the report page."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import pytest

from outpace.bench.forecast import SweepLine
from outpace.cli import measured, tables, tuned
from outpace.cli.show import screen
from outpace.cli.sweep import show_tables
from outpace.report import measured as measured_page
from outpace.report import swept as swept_page
from outpace.report import tuned as tuned_page
from tests.report import sample_results

LONG = "some-organisation/A-Model-Of-A-Rather-Long-Name-7B-Instruct"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def heads(shown: str) -> set[str]:
    """Return the heads of all tables, each joined from its lines."""
    found: set[str] = set()
    above: list[list[str]] = []
    for line in shown.splitlines():
        if line.startswith("┃"):
            above.append([cell.strip() for cell in line.strip("┃").split("┃")])
        elif above:
            found |= {" ".join(filter(None, cells)) for cells in zip(*above, strict=True)}
            above = []
    return found


def uncut(shown: str) -> bool:
    """Return whether nothing is cut: every line of a table ends with its border within 80 columns."""
    table_lines = [line.rstrip() for line in shown.splitlines() if line[:1] in "┃│┏┡└"]
    return (
        bool(table_lines)
        and "…" not in shown
        and max(map(len, table_lines)) <= 80
        and all(line[-1] in "┃│┓┩┘" for line in table_lines)
    )


def swept(**changed: Any) -> list[SweepLine]:
    names = {one.name for one in fields(SweepLine)}
    rows = [one for one in sample_results.swept()["figures"] if one["temperature"] == 0]
    return [SweepLine(**{name: one[name] for name in names} | changed) for one in rows]


def content(draft: str | None = None) -> dict[str, Any]:
    """Return results as `bench alpha` passes them to its tables."""
    found = sample_results.measured() | {"g": 4}
    for one in found["drafts"]:
        one |= {"tokens_per_pass": [2.1, 2.2]} | ({"draft": draft} if draft else {})
    return found


def tuning(draft: str | None = None) -> dict[str, Any]:
    found = sample_results.tuned() | {"max_batch": 4}
    more = {"batch": 4, "dtype": "float32", "rule": "token", "why": "expected to pay, " * 4}
    found["candidates"].append(found["candidates"][0] | more)
    for one in found["candidates"]:
        one |= {"draft": draft} if draft else {}
    return found


@pytest.mark.parametrize("draft", [None, LONG])
def test_tables_are_not_cut_at_80_columns(capsys: pytest.CaptureFixture[str], draft: str | None) -> None:
    slow = {f"{name}_ms": 123456.7 for name in ("mean", "deviation", "p50", "p90", "p99", "loop")}
    show_tables(swept(**slow | ({"draft": draft} if draft else {})))
    assert uncut(capsys.readouterr().out)
    measured.show(content(draft))
    assert uncut(capsys.readouterr().out)
    tuned.show(tuning(draft) | {"transformers": None, "vllm": None})
    shown = capsys.readouterr().out
    assert uncut(shown)
    if draft:
        names = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
        assert draft in "".join(names)  # folded, not cut


def test_command_and_report_page_use_the_same_column_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_tables(swept())
    names = heads(capsys.readouterr().out)
    (section, _) = swept_page.sections(sample_results.swept())
    page = {head for table in section.tables for head in table.heads}
    assert names <= page
    assert page - names == {"draft", "tokens/s", "texts", "tokens"}  # in a title, or on the page alone

    tuned.show(tuning() | {"transformers": None, "vllm": None})
    (section,) = tuned_page.sections(tuning())
    assert heads(capsys.readouterr().out) == set(section.tables[0].heads)

    console_title, columns, _ = measured.draft_table(content())
    assert "40 prompts" in console_title
    drafts = measured_page.sections(content())[0].tables[0]
    assert {one.head for one in columns} | {"c"} == set(drafts.heads)


def test_command_and_report_page_show_the_same_cells() -> None:
    _, columns, _ = measured.draft_table(content())
    drafts = measured_page.sections(content())[0].tables[0]
    for one in columns:
        at = list(drafts.heads).index(one.head)
        assert list(one.cells) == [row[at] for row in drafts.rows]


def test_columns_that_do_not_fit_go_to_a_second_table_with_the_key_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [["lookup", *["1.00 (0.90–1.10)"] * 8]]
    some = tables.columns(["draft", *(f"head {i}" for i in range(8))], rows, words=("draft",))
    tables.show(screen(sys.stdout), "speeds", some)
    shown = capsys.readouterr().out
    assert uncut(shown)
    assert shown.count("│ lookup │") == 2
    assert heads(shown) == {one.head for one in some}


def test_intervals_go_below_their_figures_if_that_saves_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = sample_results.tuned()
    for one in few["candidates"]:
        one["draft"] = "lookup"
    few["candidates"].append(few["candidates"][0] | {"batch": 4, "why": "expected to pay, " * 4})
    tuned.show(few | {"max_batch": 4, "transformers": None, "vllm": None})
    shown = capsys.readouterr().out
    assert uncut(shown)
    assert shown.count("┏") == 1
    assert "(1.98–2.15)" in shown

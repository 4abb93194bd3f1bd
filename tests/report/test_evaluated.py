"""A run of `outpace eval` on the page: the command's own numbers, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.report import files
from outpace.report.evaluated import columns, intervals
from outpace.report.page import page
from outpace.tasks import table as tables
from tests.report.markup import Markup
from tests.report.test_page import paragraphs
from tests.report.written import evaluated, save_journal, swept

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "eval").glob("*.jsonl"))


def made(path: Path, lines: list[dict[str, Any]]) -> str:
    return page([(path.name, files.read(Path(save_journal(path, lines))))])


def printed(path: Path) -> dict[str, list[str]]:
    """The table that the command wrote beside its rows."""
    rows = [line.strip("| ").split(" | ") for line in Path(f"{path}.md").read_text().splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def test_there_are_runs_to_look_at() -> None:
    assert {path.stem for path in COMMITTED} >= {"asr-greedy", "code", "dialog", "specbench", "summarize"}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_page_has_the_numbers_that_the_command_printed(path: Path) -> None:
    content = files.read(path)
    assert content["complete"] is True
    found = Markup(page([(path.name, content)]))
    rows = {row[0]: row[1:] for row in found.rows}
    for name, cells in printed(path).items():
        if name not in ("---", content["task"]) and not name.startswith("tokens per pass, "):
            assert [cell.split(" (")[0] for cell in rows[name]] == cells
    assert rows["measure"] == content["sides"]
    assert content["command"] in found.words
    assert f"Quality and speed: {content['task']}" in found.titles


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_an_interval_of_quality_holds_its_figure_and_nothing_impossible(path: Path) -> None:
    for one in columns(files.read(path)):
        for name, interval in intervals(one).items():
            assert interval is not None
            low, high = interval
            assert low <= one.quality[name] <= high
            assert (high <= 0) if name == "log-probability" else (low >= 0)


def test_quality_and_speed_have_intervals_over_rows(tmp_path: Path) -> None:
    text = made(tmp_path / "run.jsonl", evaluated())
    rows = {row[0]: row[1:] for row in Markup(text).rows}
    # Four values 30 to 33: t(0.975, 3) = 3.182 times a standard error of 1.291 / 2.
    assert rows["ROUGE-1"] == ["31.50 (29.45–33.55)"] * 2
    plain, exact = rows["over plain"]
    assert plain == "1.00"
    assert exact.startswith("2.06 (1.")
    assert rows["same text as plain"] == ["–", "3 of 4"]
    assert rows["acceptance"] == ["–", "0.350"]


def test_texts_that_are_the_same_are_shown_once_with_who_wrote_them(tmp_path: Path) -> None:
    words = Markup(made(tmp_path / "run.jsonl", evaluated())).words
    assert "plain:\nA summary of article 0.\n\nexact:\nAnother summary." in words
    assert "plain, exact:\nA summary of article 1." in words


def test_settings_data_and_draft_stand_beside_the_figures(tmp_path: Path) -> None:
    text = made(tmp_path / "run.jsonl", evaluated(temperature=0.7))
    answer, section = paragraphs(text, "source")
    assert answer == section
    assert section.startswith(
        "Measured on: 4 rows of articles.jsonl; at most 64 new tokens each; temperature 0.7; org/Target-7B,"
    )
    assert "Draft: org/Draft-0.5B, g = 5, seed 3." in text
    assert "same text as plain" not in text  # sampled texts may differ
    assert paragraphs(text, "verdict")[0].startswith(
        "summarize with org/Draft-0.5B, g = 5 is 2.06 times as fast as plain decoding (1."
    )


def test_a_sweep_with_other_prompts_is_told_apart(tmp_path: Path) -> None:
    content = files.read(Path(save_journal(tmp_path / "run.jsonl", evaluated())))
    slow = swept()
    for one in slow["figures"]:
        one |= {"speedup": 0.8, "interval": [0.7, 0.9]} if one["length"] != "0" else {}
    text = page([("s.json", slow), ("run.jsonl", content)])
    said = paragraphs(text[text.index("<h2>Quality and speed") :], "doubt")
    assert "prompts: 40 prompts of questions.jsonl there, 4 rows of articles.jsonl here" in said[0]
    assert "speedup 0.80 (0.70 to 0.90) there, over plain 2.06" in said[0]


def test_a_run_that_was_stopped_says_so_and_shows_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = evaluated()[:6]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"side": "exact", "ro')
    content = files.read(path)
    assert content["complete"] is False
    assert len(content["records"]) == 5
    text = page([("run.jsonl", content)])
    assert "run.jsonl is not complete" in text
    rows = {row[0]: row[1:] for row in Markup(text).rows}
    assert rows["rows"] == ["2", "2"]  # that both have come to


def test_a_row_that_was_tried_again_counts_once(tmp_path: Path) -> None:
    lines = evaluated()
    failed = {"side": "exact", "row": 3, "id": "article/3", "error": "RuntimeError: no memory", "again": True}
    content = files.read(Path(save_journal(tmp_path / "run.jsonl", [*lines[:-1], failed, lines[-1]])))
    assert content["complete"] is True
    rows = {row[0]: row[1:] for row in Markup(page([("run.jsonl", content)])).rows}
    assert (rows["rows"], rows["failed"]) == (["4", "4"], ["0", "0"])


def test_what_needs_the_data_comes_from_the_table_beside_a_whole_run(tmp_path: Path) -> None:
    lines = evaluated()
    lines[0]["task"] = "translate"
    path = tmp_path / "run.jsonl"
    save_journal(path, lines)
    Path(f"{path}.md").write_text(
        tables.markdown("translate", ["plain", "exact"], [("BLEU", ["31.2", "31.3"])])
    )
    assert ["BLEU", "31.2", "31.3"] in Markup(page([("run.jsonl", files.read(path))])).rows
    save_journal(path, lines[:-1])
    assert "31.2" not in page([("run.jsonl", files.read(path))])  # the table is of another run

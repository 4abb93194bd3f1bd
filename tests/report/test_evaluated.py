"""Sections of `outpace eval` runs: the numbers that the command printed, with intervals."""

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
from tests.report.sample_results import evaluated, save_journal, swept
from tests.report.test_page import paragraphs

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "eval").glob("*.jsonl"))


def page_of(path: Path, lines: list[dict[str, Any]]) -> str:
    return page([(path.name, files.read(Path(save_journal(path, lines))))])


def saved_table(path: Path) -> dict[str, list[str]]:
    """Return the table that the command saved beside the journal, by measure."""
    rows = [line.strip("| ").split(" | ") for line in Path(f"{path}.md").read_text().splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def test_committed_results_include_every_kind_of_task() -> None:
    assert {path.stem for path in COMMITTED} >= {"asr-greedy", "code", "dialog", "specbench", "summarize"}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_page_shows_the_numbers_that_the_command_printed(path: Path) -> None:
    content = files.read(path)
    assert content["complete"] is True
    found = Markup(page([(path.name, content)]))
    rows = {row[0]: row[1:] for row in found.rows}
    for name, cells in saved_table(path).items():
        if name not in ("---", content["task"]) and not name.startswith("tokens per pass, "):
            assert [cell.split(" (")[0] for cell in rows[name]] == cells
    assert rows["measure"] == content["runners"]
    assert content["command"] in found.words
    assert f"Quality and speed: {content['task']}" in found.titles


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_quality_interval_contains_its_value_and_no_impossible_value(path: Path) -> None:
    for column in columns(files.read(path)):
        for name, interval in intervals(column).items():
            assert interval is not None
            low, high = interval
            assert low <= column.quality[name] <= high
            assert (high <= 0) if name == "log-probability" else (low >= 0)


def test_quality_and_speed_have_intervals_over_rows(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run.jsonl", evaluated())
    rows = {row[0]: row[1:] for row in Markup(text).rows}
    # Four values 30 to 33: t(0.975, 3) = 3.182 times a standard error of 1.291 / 2.
    assert rows["ROUGE-1"] == ["31.50 (29.45–33.55)"] * 2
    baseline, exact = rows["over baseline"]
    assert baseline == "1.00"
    assert exact.startswith("2.06 (1.")
    assert rows["same text as baseline"] == ["–", "3 of 4"]
    assert rows["acceptance"] == ["–", "0.350"]


def test_equal_texts_are_shown_once_with_the_names_of_their_runners(tmp_path: Path) -> None:
    words = Markup(page_of(tmp_path / "run.jsonl", evaluated())).words
    assert "baseline:\nA summary of article 0.\n\nexact:\nAnother summary." in words
    assert "baseline, exact:\nA summary of article 1." in words


def test_eval_section_names_its_data_settings_and_draft(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run.jsonl", evaluated(temperature=0.7))
    answer, section = paragraphs(text, "source")
    assert answer == section
    assert section.startswith(
        "Measured on: 4 rows of articles.jsonl; at most 64 new tokens each; temperature 0.7; org/Target-7B,"
    )
    assert "Draft: org/Draft-0.5B, g = 5, seed 3." in text
    assert "same text as baseline" not in text  # sampled texts may differ
    assert paragraphs(text, "answer")[0].startswith(
        "summarize with org/Draft-0.5B, g = 5 is 2.06 times as fast as without speculation (1."
    )


def test_note_names_the_prompts_if_a_sweep_and_an_eval_run_disagree(tmp_path: Path) -> None:
    content = files.read(Path(save_journal(tmp_path / "run.jsonl", evaluated())))
    slow = swept()
    for row in slow["figures"]:
        row |= {"speedup": 0.8, "interval": [0.7, 0.9]} if row["num_draft_tokens"] != "0" else {}
    text = page([("s.json", slow), ("run.jsonl", content)])
    note, *_ = paragraphs(text[text.index("<h2>Quality and speed") :], "note")
    assert "prompts: 40 prompts of questions.jsonl there, 4 rows of articles.jsonl here" in note
    assert "speedup 0.80 (0.70 to 0.90) there, over baseline 2.06" in note


def test_interrupted_run_is_called_incomplete_and_shows_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = evaluated()[:6]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"runner": "exact", "ro')
    content = files.read(path)
    assert content["complete"] is False
    assert len(content["records"]) == 5
    text = page([("run.jsonl", content)])
    assert "run.jsonl is not complete" in text
    rows = {row[0]: row[1:] for row in Markup(text).rows}
    assert rows["rows"] == ["2", "2"]  # rows that both runners have finished


def test_row_that_was_retried_counts_once(tmp_path: Path) -> None:
    lines = evaluated()
    failed = {
        "runner": "exact",
        "row": 3,
        "id": "article/3",
        "error": "RuntimeError: no memory",
        "again": True,
    }
    content = files.read(Path(save_journal(tmp_path / "run.jsonl", [*lines[:-1], failed, lines[-1]])))
    assert content["complete"] is True
    rows = {row[0]: row[1:] for row in Markup(page([("run.jsonl", content)])).rows}
    assert (rows["rows"], rows["failed"]) == (["4", "4"], ["0", "0"])


def test_measures_that_need_references_come_from_the_table_beside_a_complete_run(tmp_path: Path) -> None:
    lines = evaluated()
    lines[0]["task"] = "translate"
    path = tmp_path / "run.jsonl"
    save_journal(path, lines)
    Path(f"{path}.md").write_text(
        tables.markdown("translate", ["baseline", "exact"], [("BLEU", ["31.2", "31.3"])])
    )
    assert ["BLEU", "31.2", "31.3"] in Markup(page([("run.jsonl", files.read(path))])).rows
    save_journal(path, lines[:-1])
    assert "31.2" not in page(
        [("run.jsonl", files.read(path))]
    )  # the run is incomplete, so the table belongs to another one

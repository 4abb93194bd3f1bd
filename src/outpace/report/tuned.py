"""Sections of a page for the results of ``outpace tune``."""

from __future__ import annotations

from outpace.report.columns import tune_columns
from outpace.report.section import Content, DraftConfig, Section, Speed, Table, Text
from outpace.report.source import source
from outpace.report.words import format_value

TITLE = "Tuning candidates"
TEXT_COLUMNS = ("draft", "dtype", "rule", "why")  # aligned to the left
TEXTS = {
    "config": "The recommended configuration.",
    "transformers": "The same candidate in Transformers.",
    "vllm": "The same candidate in vLLM.",
}


def sections(content: Content) -> list[Section]:
    """Return the section on the candidates of a tuning."""
    candidates = content.get("candidates") or []
    chosen = content.get("chosen")
    tables = []
    if candidates:
        columns = tune_columns(candidates)
        heads = list(columns)
        rows = [[cell(one) for cell in columns.values()] for one in candidates]
        chosen_row = candidates.index(chosen) if chosen in candidates else None
        caption = (
            "Speedups over the baseline, with 95\u00a0% intervals. expected is computed from acceptance and "
            "costs; verified was measured on whole texts."
        )
        caption += " The chosen row is marked." if chosen_row is not None else " Nothing was chosen."
        text_columns = [i for i, head in enumerate(heads) if head in TEXT_COLUMNS]
        tables.append(Table(caption, heads, rows, text_columns=text_columns, chosen=chosen_row))
    texts = [Text(caption, content[name]) for name, caption in TEXTS.items() if content.get(name)]
    return [
        Section(
            TITLE,
            _time_used(content),
            tables=tables,
            texts=texts,
            source=source(content),
            speeds=speeds(content),
        )
    ]


def speeds(content: Content) -> dict[DraftConfig, Speed]:
    """Return the verified speedup, or else the expected one, of each candidate at batch size 1."""
    found = {}
    for one in content.get("candidates") or ():
        name = "expected" if one.get("verified") is None else "verified"
        if one.get(name) is not None and one.get("num_draft_tokens") != "0" and one.get("batch") == 1:
            found[one["draft"], str(one["num_draft_tokens"])] = Speed(name, one[name], one.get("interval"))
    return found


def _time_used(content: Content) -> str:
    spent, budget = content.get("spent_seconds"), content.get("budget_seconds")
    if spent is None:
        return ""
    limit = "" if budget is None else f" of {format_value(budget)}"
    return f"The tuning used {format_value(spent)}{limit} seconds."

"""Sections of a page for the results of ``outpace tune``."""

from __future__ import annotations

from outpace.report.columns import tune_columns
from outpace.report.section import Content, Section, Speed, Table, Text, Way
from outpace.report.source import source
from outpace.report.words import said

TITLE = "What was tried"
LEFT = ("draft", "dtype", "rule", "why")  # columns of words
TEXTS = {
    "config": "The configuration to run.",
    "transformers": "The same inside Transformers.",
    "vllm": "The same for vLLM.",
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
        at = candidates.index(chosen) if chosen in candidates else None
        words = (
            "Speeds are over plain decoding, with 95\u00a0% intervals. expected follows from acceptance and "
            "costs; verified was measured on whole texts."
        )
        words += " The chosen row is marked." if at is not None else " Nothing was chosen."
        left = [i for i, head in enumerate(heads) if head in LEFT]
        tables.append(Table(words, heads, rows, words=left, chosen=at))
    texts = [Text(words, content[name]) for name, words in TEXTS.items() if content.get(name)]
    about = source(content)
    return [Section(TITLE, _spent(content), tables=tables, texts=texts, source=about, speeds=speeds(content))]


def speeds(content: Content) -> dict[Way, Speed]:
    """Return the verified speed, or else the expected one, of every draft with one sequence at a time."""
    found = {}
    for one in content.get("candidates") or ():
        name = "expected" if one.get("verified") is None else "verified"
        if one.get(name) is not None and one.get("length") != "0" and one.get("batch") == 1:
            found[one["draft"], str(one["length"])] = Speed(name, one[name], one.get("interval"))
    return found


def _spent(content: Content) -> str:
    spent, budget = content.get("spent_seconds"), content.get("budget_seconds")
    if spent is None:
        return ""
    return f"{said(spent)} seconds were spent" + ("." if budget is None else f", of {said(budget)} given.")

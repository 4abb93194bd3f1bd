"""What `outpace tune` wrote, as sections of a page."""

from __future__ import annotations

from typing import Any

from outpace.report.section import Content, Section, Table, Text
from outpace.report.words import between, said

HEADS = ("draft", "g", "speed", "interval", "verified", "batch", "dtype", "rule", "why")
TEXTS = {
    "config": "The configuration to run.",
    "transformers": "The same inside Transformers.",
    "vllm": "The same for vLLM.",
}


def sections(content: Content) -> list[Section]:
    candidates = content.get("candidates") or []
    chosen = content.get("chosen")
    tables = []
    if candidates:
        rows = [_cells(one) for one in candidates]
        at = candidates.index(chosen) if chosen in candidates else None
        words = (
            "speed is what was expected over plain decoding, verified what whole texts came to; the interval "
            "is of the latter where there is one. What was chosen is marked."
        )
        tables.append(Table(words, HEADS, rows, words=(0, 6, 7, 8), chosen=at))
    texts = [Text(words, content[name]) for name, words in TEXTS.items() if content.get(name)]
    return [Section("What was tried", _spent(content), tables=tables, texts=texts)]


def _spent(content: Content) -> str:
    spent, budget = content.get("spent_seconds"), content.get("budget_seconds")
    if spent is None:
        return ""
    return f"{said(spent)} seconds were spent" + ("." if budget is None else f", of {said(budget)} given.")


def _cells(one: dict[str, Any]) -> list[str]:
    return [
        *(said(one.get("draft")), said(one.get("length")), said(one.get("expected"), ".2f")),
        *(between(one.get("interval"), ".2f"), said(one.get("verified")), said(one.get("batch"))),
        *(said(one.get(name)) for name in ("dtype", "rule", "why")),
    ]

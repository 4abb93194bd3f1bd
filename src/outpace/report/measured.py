"""Sections of a page for the results of ``outpace bench alpha``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from outpace.bench.curves import Point
from outpace.checks.errors import counted
from outpace.report import formulas, run
from outpace.report.columns import MEASURE, Columns, describe_payoff, value
from outpace.report.figures import Line, lines
from outpace.report.section import CaptionedFigure, Content, DraftConfig, Section, Speed, Table
from outpace.report.source import Source, source
from outpace.report.words import format_value, short_name

DraftResult = dict[str, Any]  # of one draft, in a file of `outpace bench alpha`
BY_DOMAIN: Columns = {
    "draft": value("draft"),
    "kind of text": value("kind"),
    "α": value("alpha", ".3f", "interval"),
    "draft tokens": value("draft_tokens"),
}
BY_BATCH: Columns = {"draft": value("draft"), "B": value("B"), "predicted": describe_payoff}


def sections(content: Content) -> list[Section]:
    """Return the sections on acceptance, formulas, positions, costs, and one traced run."""
    conditions = source(content)
    if content.get("new_tokens") is not None:
        tokens = f"{counted(content['new_tokens'], 'token')} of the target"
        conditions = {"prompts": conditions.pop("prompts", ""), "tokens": tokens, **conditions}
    traced = {**conditions, "prompts": "one run: the first prompt"}
    return [
        replace(_drafts(content), source=conditions, speeds=speeds(content)),
        replace(_formulas(content), source=conditions),
        replace(_positions(content), source=conditions),
        replace(_costs(content), source=_timing_source(content, conditions)),
        *(replace(section, source=traced) for section in run.sections(content)),
    ]


def speeds(content: Content) -> dict[DraftConfig, Speed]:
    """Return the predicted speed of each draft at its best g."""
    return {
        (draft["draft"], str(draft["best_g"])): Speed(
            "predicted", draft["predicted"], draft.get("predicted_interval")
        )
        for draft in content.get("drafts") or ()
        if draft.get("lenience") in (None, 1) and draft.get("best_g") and draft.get("predicted") is not None
    }


def cost(content: Content, draft: DraftResult) -> float | None:
    """Return c, the time of a draft step relative to a forward pass of the target; None if unknown."""
    step_ms, pass_ms = draft.get("step_ms"), run.single_token_ms(content)
    return step_ms / pass_ms if step_ms is not None and pass_ms else None


def draft_name(draft: DraftResult) -> str:
    """Return a draft's short name, with the lenience if it is not 1."""
    lenience = draft.get("lenience")
    return short_name(draft.get("draft")) + ("" if lenience in (None, 1) else f", l = {lenience:g}")


def strictest(content: Content) -> list[DraftResult]:
    """Return the drafts at the largest lenience, which is the one of real runs."""
    drafts: Sequence[DraftResult] = content.get("drafts") or ()
    largest = max((draft.get("lenience") or 1.0 for draft in drafts), default=1.0)
    return [draft for draft in drafts if (draft.get("lenience") or 1.0) == largest]


def _timing_source(content: Content, conditions: Source) -> Source:
    """Return the source of timings, without prompts and sampling: passes run on random tokens."""
    context = content.get("context")
    after = f" after a context of {counted(context, 'token')}" if context else ""
    return {name: words for name, words in conditions.items() if name != "sampling"} | {
        "prompts": f"random tokens{after}"
    }


def _table(
    caption: str, columns: Columns, rows: Sequence[DraftResult], text_columns: Sequence[int] = (0,)
) -> Table:
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return Table(caption, list(columns), cells, text_columns)


def _drafts(content: Content) -> Section:
    columns = {**MEASURE, "c": value("c", "small")}
    rows = [{**draft, "c": cost(content, draft)} for draft in content.get("drafts") or ()]
    percent = format_value(float(content.get("confidence", 0.95)) * 100)
    caption = (
        f"α is the mean of Σ min(p, q) at the target's own tokens, with a {percent}\u00a0% interval. D_LK is "
        "1 − α at lenience 1. coverage is the share of tokens that had a draft token. α counted is the share "
        "that real runs accepted, of the draft tokens verified. step ms is the time of a draft step. c is "
        "that time relative to a target's pass. predicted is the speed at the best g, relative to decoding "
        "without speculation. It follows from α, coverage and the times measured. Its interval has the "
        "predictions at both ends of α's interval."
    )
    tables = [_table(caption, columns, rows)] if rows else []
    return Section("How often draft tokens are accepted", tables=[*tables, *_breakdowns(content)])


def _breakdowns(content: Content) -> Iterator[Table]:
    """Return tables of α by kind of text, and of speeds by batch size."""
    drafts = strictest(content)
    domains = [
        {"draft": draft_name(draft), "kind": kind, **measurement}
        for draft in drafts
        for kind, measurement in (draft.get("by_domain") or {}).items()
    ]
    if domains:
        yield _table("α by kind of text.", BY_DOMAIN, domains, (0, 1))
    batches = [
        {"draft": draft_name(draft), **prediction}
        for draft in drafts
        for prediction in draft.get("by_batch") or ()
    ]
    if batches:
        caption = "The predicted speed at the best g, with B sequences at a time."
        yield _table(caption, BY_BATCH, batches, (0, 2))


def _formulas(content: Content) -> Section:
    drafts = [
        formulas.DraftMark(
            Point(draft["alpha"], c, draft_name(draft)), draft.get("best_g"), draft.get("predicted")
        )
        for draft in content.get("drafts") or ()
        if draft.get("alpha") is not None and (c := cost(content, draft)) is not None
    ]
    passes = {timing["n"]: timing["ms"] for timing in content.get("passes") or () if timing["B"] == 1}
    return formulas.section(drafts, passes)


def _positions(content: Content) -> Section:
    drafts = strictest(content)
    figures = []
    if series := _lines(drafts, lambda draft: draft.get("by_position"), 1, intervals="by_position_intervals"):
        caption = (
            "Share of draft tokens accepted at each position, if all before them were, with its interval. "
            "The formulas assume that it is the same everywhere."
        )
        plot = lines("accepted, by position", "position of the draft token", series)
        figures.append(CaptionedFigure(plot, caption))
    if series := _lines(drafts, lambda draft: (draft.get("blocks") or {}).get("observed"), 0):
        predictions = _lines(
            drafts, lambda draft: (draft.get("blocks") or {}).get("predicted"), 0, predicted=True
        )
        caption = "Shares of iterations by how many draft tokens they accepted."
        if predictions:
            caption += " Dotted: as α predicts if each is accepted independently of the others."
        title = "iterations, by draft tokens accepted"
        figures.append(
            CaptionedFigure(lines(title, "draft tokens accepted", [*series, *predictions]), caption)
        )
    if series := _lines(drafts, lambda draft: draft.get("autocorrelation"), 1):
        caption = f"Correlation of acceptance at a token with that some tokens later. {_dependence(drafts)}"
        plot = lines("autocorrelation of acceptance", "tokens later", series)
        figures.append(CaptionedFigure(plot, caption.strip()))
    return Section("Acceptance by position", figures=figures)


def _dependence(drafts: Iterable[DraftResult]) -> str:
    """Return for each draft whether neighbouring tokens are independent, as the formulas assume."""
    clauses = []
    for draft in drafts:
        known = [value for value in draft.get("autocorrelation") or () if value is not None]
        chance = draft.get("chance")
        if known and chance is not None:
            beyond = sum(abs(value) > chance for value in known)
            name = draft_name(draft)
            if beyond:
                clauses.append(
                    f"{name}: {beyond} of {len(known)} lie beyond ±{chance:.2f}, so not independent"
                )
            else:
                clauses.append(f"{name}: all lie within ±{chance:.2f}, as independent tokens would")
    return "; ".join(clauses) + "." * bool(clauses)


def _lines(
    drafts: Iterable[DraftResult],
    values_of: Callable[[DraftResult], Any],
    first: int,
    predicted: bool = False,
    intervals: str | None = None,
) -> list[Line]:
    """Return a line for each draft that has the values, without those that are missing.

    Args:
        drafts: The drafts.
        values_of: Function that returns the values of a draft.
        first: Horizontal position of the first value.
        predicted: Whether the values were predicted.
        intervals: Key of the values' intervals in a draft, if there are any.
    """
    series = []
    for i, draft in enumerate(drafts):
        values = list(values_of(draft) or ())
        bounds = (draft.get(intervals) if intervals is not None else None) or [None] * len(values)
        points = [
            (x, y, (y - interval[0], interval[1] - y) if interval else (0.0, 0.0))
            for x, (y, interval) in enumerate(zip(values, bounds, strict=True), first)
            if y is not None
        ]
        if points:
            x, y, error_bars = zip(*points, strict=True)
            series.append(Line(draft_name(draft), x, y, i, error_bars if intervals else None, predicted))
    return series


def _costs(content: Content) -> Section:
    passes = content.get("passes") or ()
    tables, figures = [], []
    if passes:
        series = []
        for i, B in enumerate(sorted({timing["B"] for timing in passes})):
            points = sorted((timing["n"], timing["ms"]) for timing in passes if timing["B"] == B)
            series.append(Line(f"B = {B}", [n for n, _ in points], [ms for _, ms in points], i))
        caption = "Time of a target's pass over n tokens of each of B sequences. "
        caption += " ".join(
            formulas.describe_cost(dict(zip(line.x, line.y, strict=True)), line.name) for line in series
        )
        plot = lines("milliseconds of a target's pass", "tokens of a sequence, n", series)
        figures.append(CaptionedFigure(plot, caption.strip()))
        caption = "Milliseconds of a target's pass over n tokens of each of B sequences."
        tables.append(_timings(caption, passes, "n"))
    verify = content.get("verify") or ()
    for sampled in dict.fromkeys(timing.get("sampled") for timing in verify):
        kind = {None: "", True: " sampled from a distribution", False: " that are each the likeliest"}[
            sampled
        ]
        caption = f"Milliseconds of verifying g draft tokens{kind}, of each of B sequences."
        tables.append(
            _timings(caption, [timing for timing in verify if timing.get("sampled") == sampled], "g")
        )
    return Section("What a pass costs", figures=figures, tables=tables)


def _timings(caption: str, timings: Sequence[dict[str, Any]], over: str) -> Table:
    """Return a table of milliseconds, with a row for each number of tokens and a column for each B."""
    known = {(timing[over], timing["B"]): timing["ms"] for timing in timings}
    rows, columns = sorted({n for n, _ in known}), sorted({B for _, B in known})
    cells = [[str(n), *(format_value(known.get((n, B)), ".2f") for B in columns)] for n in rows]
    return Table(caption, (over, *(f"B = {B}" for B in columns)), cells, text_columns=())

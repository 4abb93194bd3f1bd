"""Sections of a page for the results of ``outpace bench alpha``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from outpace.bench.curves import Point
from outpace.checks.errors import counted
from outpace.report import formulas, run
from outpace.report.columns import MEASURE, Columns, pays, value
from outpace.report.figures import Line, lines
from outpace.report.section import Content, Figure, Section, Speed, Table, Way
from outpace.report.source import Source, source
from outpace.report.words import said, short

Draft = dict[str, Any]
BY_DOMAIN: Columns = {
    "draft": value("draft"),
    "kind of text": value("kind"),
    "α": value("alpha", ".3f", "interval"),
    "draft tokens": value("tokens"),
}
BY_BATCH: Columns = {"draft": value("draft"), "B": value("B"), "predicted": pays}


def sections(content: Content) -> list[Section]:
    """Return the sections on acceptance, formulas, positions, costs, and one traced run."""
    about = source(content)
    if content.get("tokens") is not None:
        of = f"{counted(content['tokens'], 'token')} of the target"
        about = {"prompts": about.pop("prompts", ""), "tokens": of, **about}
    traced = {**about, "prompts": "one run: the first prompt"}
    return [
        replace(_drafts(content), source=about, speeds=speeds(content)),
        replace(_formulas(content), source=about),
        replace(_positions(content), source=about),
        replace(_costs(content), source=_timed(content, about)),
        *(replace(one, source=traced) for one in run.sections(content)),
    ]


def speeds(content: Content) -> dict[Way, Speed]:
    """Return the predicted speed of each draft at its best g."""
    return {
        (one["draft"], str(one["best_g"])): Speed(
            "predicted", one["predicted"], one.get("predicted_interval")
        )
        for one in content.get("drafts") or ()
        if one.get("lenience") in (None, 1) and one.get("best_g") and one.get("predicted") is not None
    }


def cost(content: Content, draft: Draft) -> float | None:
    """Return c, the time of a draft step relative to a forward pass of the target; None if unknown."""
    step, plain = draft.get("step_ms"), run.plain_ms(content)
    return step / plain if step is not None and plain else None


def named(draft: Draft) -> str:
    """Return a draft's short name, with the lenience if it is not 1."""
    lenience = draft.get("lenience")
    return short(draft.get("draft")) + ("" if lenience in (None, 1) else f", l = {lenience:g}")


def strictest(content: Content) -> list[Draft]:
    """Return the drafts at the largest lenience, which is the one of real runs."""
    drafts: Sequence[Draft] = content.get("drafts") or ()
    largest = max((one.get("lenience") or 1.0 for one in drafts), default=1.0)
    return [one for one in drafts if (one.get("lenience") or 1.0) == largest]


def _timed(content: Content, about: Source) -> Source:
    """Return the source of timings: passes run on random tokens, so prompts and sampling do not count."""
    context = content.get("context")
    after = f" after a context of {counted(context, 'token')}" if context else ""
    return {name: said for name, said in about.items() if name != "sampling"} | {
        "prompts": f"random tokens{after}"
    }


def _table(words: str, columns: Columns, rows: Sequence[Draft], left: Sequence[int] = (0,)) -> Table:
    return Table(words, list(columns), [[cell(row) for cell in columns.values()] for row in rows], left)


def _drafts(content: Content) -> Section:
    columns = {**MEASURE, "c": value("c", "small")}
    rows = [{**one, "c": cost(content, one)} for one in content.get("drafts") or ()]
    sure = said(float(content.get("confidence", 0.95)) * 100)
    words = (
        f"α is the mean of Σ min(p, q) at the target's own tokens, with a {sure}\u00a0% interval. D_LK is "
        "1 − α at lenience 1. coverage is the share of tokens that had a draft token. α counted is the share "
        "that real runs accepted, of the draft tokens verified. step ms is the time of a draft step, and c "
        "the same over a target's pass. predicted is the speed over plain decoding at the best g, by α, "
        "coverage and the times measured, with its values at the ends of α's interval."
    )
    tables = [_table(words, columns, rows)] if rows else []
    return Section("How often draft tokens are accepted", tables=[*tables, *_parts(content)])


def _parts(content: Content) -> Iterator[Table]:
    """Return tables of α by kind of text, and of speeds by batch size."""
    drafts = strictest(content)
    domains = [
        {"draft": named(one), "kind": kind, **at}
        for one in drafts
        for kind, at in (one.get("by_domain") or {}).items()
    ]
    if domains:
        yield _table("α by kind of text.", BY_DOMAIN, domains, (0, 1))
    batches = [{"draft": named(one), **at} for one in drafts for at in one.get("by_batch") or ()]
    if batches:
        yield _table("The predicted speed at the best g, with B rows at a time.", BY_BATCH, batches, (0, 2))


def _formulas(content: Content) -> Section:
    drafts = [
        formulas.Draft(Point(one["alpha"], c, named(one)), one.get("best_g"), one.get("predicted"))
        for one in content.get("drafts") or ()
        if one.get("alpha") is not None and (c := cost(content, one)) is not None
    ]
    passes = {one["n"]: one["ms"] for one in content.get("passes") or () if one["B"] == 1}
    return formulas.section(drafts, passes)


def _positions(content: Content) -> Section:
    drafts = strictest(content)
    figures = []
    if shown := _over(drafts, lambda one: one.get("by_position"), 1, spread="by_position_intervals"):
        words = (
            "Share of draft tokens accepted at each position, if all before them were, with its interval. "
            "The formulas take it to be the same everywhere."
        )
        figures.append(Figure(lines("accepted, by position", "position of the draft token", shown), words))
    if shown := _over(drafts, lambda one: (one.get("blocks") or {}).get("observed"), 0):
        foretold = _over(drafts, lambda one: (one.get("blocks") or {}).get("predicted"), 0, predicted=True)
        words = "Shares of iterations by how many draft tokens they accepted."
        if foretold:
            words += " Dotted: as α predicts if each is accepted independently of the others."
        title = "iterations, by draft tokens accepted"
        figures.append(Figure(lines(title, "draft tokens accepted", [*shown, *foretold]), words))
    if shown := _over(drafts, lambda one: one.get("autocorrelation"), 1):
        words = f"Correlation of acceptance at a token with that some tokens later. {_dependence(drafts)}"
        figures.append(Figure(lines("autocorrelation of acceptance", "tokens later", shown), words.strip()))
    return Section("Acceptance by position", figures=figures)


def _dependence(drafts: Iterable[Draft]) -> str:
    """Return for each draft whether neighbours are independent, as the formulas assume."""
    found = []
    for one in drafts:
        known, chance = [x for x in one.get("autocorrelation") or () if x is not None], one.get("chance")
        if known and chance is not None:
            beyond = sum(abs(x) > chance for x in known)
            if beyond:
                found.append(
                    f"{named(one)}: {beyond} of {len(known)} lie beyond ±{chance:.2f}, so not independent"
                )
            else:
                found.append(f"{named(one)}: all lie within ±{chance:.2f}, as independent tokens would")
    return "; ".join(found) + "." * bool(found)


def _over(
    drafts: Iterable[Draft],
    part: Callable[[Draft], Any],
    first: int,
    predicted: bool = False,
    spread: str | None = None,
) -> list[Line]:
    """Return a line for each draft that has some part, without its missing values.

    Args:
        drafts: The drafts.
        part: Function that returns the values of a draft.
        first: Horizontal position of the first value.
        predicted: Whether the values were predicted.
        spread: Key of the intervals in a draft, if there are any.
    """
    found = []
    for i, one in enumerate(drafts):
        values = list(part(one) or ())
        ends = (one.get(spread) if spread is not None else None) or [None] * len(values)
        there = [
            (x, y, (y - between[0], between[1] - y) if between else (0.0, 0.0))
            for x, (y, between) in enumerate(zip(values, ends, strict=True), first)
            if y is not None
        ]
        if there:
            x, y, off = zip(*there, strict=True)
            found.append(Line(named(one), x, y, i, off if spread else None, predicted))
    return found


def _costs(content: Content) -> Section:
    passes = content.get("passes") or ()
    tables, figures = [], []
    if passes:
        drawn = []
        for i, B in enumerate(sorted({one["B"] for one in passes})):
            mine = sorted((one["n"], one["ms"]) for one in passes if one["B"] == B)
            drawn.append(Line(f"B = {B}", [n for n, _ in mine], [ms for _, ms in mine], i))
        words = "Time of a target's pass over n tokens of each of B rows. "
        words += " ".join(formulas.dearer(dict(zip(one.x, one.y, strict=True)), one.name) for one in drawn)
        figures.append(
            Figure(lines("milliseconds of a target's pass", "tokens of a row, n", drawn), words.strip())
        )
        tables.append(_times("Milliseconds of a target's pass over n tokens of each of B rows.", passes, "n"))
    verify = content.get("verify") or ()
    for kind in dict.fromkeys(one.get("drawn") for one in verify):
        of = {None: "", True: " sampled from a distribution", False: " that are each the likeliest"}[kind]
        words = f"Milliseconds of verifying g draft tokens{of}, of each of B rows."
        tables.append(_times(words, [one for one in verify if one.get("drawn") == kind], "g"))
    return Section("What a pass costs", figures=figures, tables=tables)


def _times(words: str, times: Sequence[dict[str, Any]], over: str) -> Table:
    known = {(one[over], one["B"]): one["ms"] for one in times}
    rows, columns = sorted({n for n, _ in known}), sorted({B for _, B in known})
    cells = [[str(n), *(said(known.get((n, B)), ".2f") for B in columns)] for n in rows]
    return Table(words, (over, *(f"B = {B}" for B in columns)), cells, words=())

"""What `outpace measure` wrote, as sections of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from outpace.bench.curves import Point
from outpace.report import formulas, run
from outpace.report.figures import Line, lines
from outpace.report.section import Content, Figure, Section, Table
from outpace.report.words import between, said, sampled, short
from outpace.wording import counted

Draft = dict[str, Any]


def sections(content: Content) -> list[Section]:
    return [
        _drafts(content),
        _formulas(content),
        _positions(content),
        _costs(content),
        *run.sections(content),
    ]


def cost(content: Content, draft: Draft) -> float | None:
    """c."""
    step, plain = draft.get("step_ms"), run.plain_ms(content)
    return step / plain if step is not None and plain else None


def named(draft: Draft) -> str:
    """Lenience is part of the name, where there is any."""
    lenience = draft.get("lenience")
    return short(draft.get("draft")) + ("" if lenience in (None, 1) else f", l = {lenience:g}")


def strictest(content: Content) -> list[Draft]:
    """Drafts at the largest lenience, which is the one that runs are made with."""
    drafts: Sequence[Draft] = content.get("drafts") or ()
    largest = max((one.get("lenience") or 1.0 for one in drafts), default=1.0)
    return [one for one in drafts if (one.get("lenience") or 1.0) == largest]


def _drafts(content: Content) -> Section:
    heads = ("draft", "l", "α", "interval", "c", "best g", "speed", "counted", "coverage", "guesses")
    rows = [
        (
            *(said(one.get("draft")), said(one.get("lenience")), said(one.get("alpha"), ".3f")),
            *(between(one.get("interval"), ".3f"), said(cost(content, one), ".3g"), said(one.get("best_g"))),
            *(said(one.get("predicted"), ".2f"), said(one.get("counted"), ".3f")),
            *(said(one.get("coverage"), ".1%"), said(one.get("tokens"))),
        )
        for one in content.get("drafts") or ()
    ]
    sure = said(float(content.get("confidence", 0.95)) * 100)
    words = (
        f"α is the mean of Σ min(p, q) at the target's own tokens, with a {sure}\u00a0% interval, at "
        "lenience l; c the time of a draft's step, of a target's pass; speed what the best g is expected "
        "to bring over plain decoding, by the times measured; counted the share that real runs "
        "kept of the guesses that were judged; coverage the share of tokens that there was a guess for."
    )
    tables = [Table(words, heads, rows)] if rows else []
    return Section("How often guesses are kept", _setting(content), tables=[*tables, *_parts(content)])


def _parts(content: Content) -> Iterator[Table]:
    """By kind of text, and by rows."""
    drafts = strictest(content)
    for words, parts in (
        ("α by kind of text: a draft helps more with some.", [one.get("by_domain") or {} for one in drafts]),
        (
            "Best g, and the speed expected of it, by rows at a time.",
            [{f"B = {at['B']}": at for at in one.get("by_batch") or ()} for one in drafts],
        ),
    ):
        heads = list(dict.fromkeys(name for one in parts for name in one))
        if heads:
            cells = [[_part(one.get(name)) for name in heads] for one in parts]
            named_cells = [[named(draft), *row] for draft, row in zip(drafts, cells, strict=True)]
            yield Table(words, ("draft", *heads), named_cells)


def _part(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    if "best_g" in found:
        g, speed = found["best_g"], said(found.get("predicted"), ".2f")
        return f"g = {g}: {speed}" if g else "does not pay"
    known = found.get("interval")
    return said(found.get("alpha"), ".3f") + (f" ({between(known, '.2f')})" if known else "")


def _setting(content: Content) -> str:
    counts = [
        counted(content[f"{noun}s"], noun)
        for noun in ("prompt", "token")
        if content.get(f"{noun}s") is not None
    ]
    how = [sampled(content["sampling"])] if content.get("sampling") else []
    return f"Measured over {', '.join(counts + how)}." if counts else ""


def _formulas(content: Content) -> Section:
    points = [
        Point(one["alpha"], c, named(one))
        for one in content.get("drafts") or ()
        if one.get("alpha") is not None and (c := cost(content, one)) is not None
    ]
    return formulas.section(points)


def _positions(content: Content) -> Section:
    drafts = strictest(content)
    figures = []
    if shown := _over(drafts, lambda one: one.get("by_position"), 1, spread="by_position_intervals"):
        words = (
            "Share of guesses kept at each position, if all before them were kept, with its interval: the "
            "formulas take it to be the same everywhere."
        )
        figures.append(Figure(lines("kept, by position", "position of the guess", shown), words))
    if shown := _over(drafts, lambda one: (one.get("blocks") or {}).get("observed"), 0):
        foretold = _over(drafts, lambda one: (one.get("blocks") or {}).get("predicted"), 0, predicted=True)
        words = (
            "Shares of iterations that kept so many guesses; dotted, what follows from α if each is kept "
            "independently of the others."
        )
        figures.append(
            Figure(lines("iterations, by guesses kept", "guesses kept", [*shown, *foretold]), words)
        )
    if shown := _over(drafts, lambda one: one.get("autocorrelation"), 1):
        words = (
            "How much the acceptance at a token says of that some tokens later: near 0, they are "
            "independent, as the formulas assume."
        )
        figures.append(Figure(lines("autocorrelation of acceptance", "tokens later", shown), words))
    return Section("Acceptance by position", figures=figures)


def _over(
    drafts: Iterable[Draft],
    part: Callable[[Draft], Any],
    first: int,
    predicted: bool = False,
    spread: str | None = None,
) -> list[Line]:
    """A line for each draft that has this part, without what is missing in it; spread: where its intervals
    are, if there are any."""
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
        words = "Time of a pass over the tokens in it: where the line is level, checking guesses is free."
        figures.append(Figure(lines("milliseconds of a target's pass", "tokens of a text, n", drawn), words))
        tables.append(
            _times("Milliseconds of a target's pass over n tokens of each of B texts.", passes, "n")
        )
    verify = content.get("verify") or ()
    for kind in dict.fromkeys(one.get("drawn") for one in verify):
        of = {None: "guesses", True: "guesses drawn from a distribution", False: "guesses that were chosen"}[
            kind
        ]
        words = f"Milliseconds of verifying g {of}, of each of B texts."
        tables.append(_times(words, [one for one in verify if one.get("drawn") == kind], "g"))
    return Section("What a pass costs", figures=figures, tables=tables)


def _times(words: str, times: Sequence[dict[str, Any]], over: str) -> Table:
    known = {(one["B"], one[over]): one["ms"] for one in times}
    rows, columns = sorted({B for B, _ in known}), sorted({n for _, n in known})
    cells = [[str(B), *(said(known.get((B, n)), ".2f") for n in columns)] for B in rows]
    return Table(words, ("B", *(f"{over} = {n}" for n in columns)), cells)

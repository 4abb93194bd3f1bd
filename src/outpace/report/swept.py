"""What `outpace sweep` wrote, as sections of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from outpace.report.figures import Line, lines
from outpace.report.section import Content, Figure, Section, Table
from outpace.report.words import between, said, sampled, short

Row = dict[str, Any]
Value = Callable[[Row], float | None]
SAMPLING = ("temperature", "top_k", "top_p")

# What matters most comes first: a phone shows no more without scrolling.
COLUMNS = (
    ("draft", "draft", ""), ("g", "length", ""), ("speed", "speedup", ".2f"), ("interval", "interval", ".2f"),
    ("predicted", "predicted", ".2f"), ("by α, c", "predicted_simple", ".2f"),
    ("tokens/s", "tokens_per_second", ".1f"), ("kept", "acceptance", ".3f"),
    ("a pass", "tokens_per_call", ".2f"), ("loop ms", "loop_ms", ".2f"), ("mean ms", "mean_ms", ".1f"),
    ("deviation", "deviation_ms", ".1f"), ("P50", "p50_ms", ".1f"), ("P90", "p90_ms", ".1f"),
    ("P99", "p99_ms", ".1f"), ("texts", "texts", ""), ("tokens", "tokens", ""),
)  # fmt: skip


def sections(content: Content) -> list[Section]:
    """One for each way to sample."""
    rows: Sequence[Row] = content.get("figures") or ()
    ways: dict[str, list[Row]] = {}
    for row in rows:
        ways.setdefault(way(row), []).append(row)
    return [_section(content, name, some) for name, some in ways.items()]


def way(row: Row) -> str:
    return sampled({name: row.get(name) for name in SAMPLING})


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest that speculates."""
    there = [row for row in rows if row.get("length") != "0" and row.get("speedup") is not None]
    return max(there, key=lambda row: float(row["speedup"]), default=None)


def _section(content: Content, name: str, rows: Sequence[Row]) -> Section:
    fastest = best(rows)
    table = Table(
        "speed is over plain decoding of the same prompts, with a 95\u00a0% interval; predicted follows "
        "from the acceptance and from what passes, steps and verification take by themselves, by α, c from "
        "Theorem 3.8 alone. kept is the share "
        "of guesses kept, a pass the tokens that a pass brought, loop ms the time of an iteration; the "
        "times after it are of 128 tokens. The fastest row is marked.",
        [head for head, _, _ in COLUMNS],
        [[_cell(row.get(part), form) for _, part, form in COLUMNS] for row in rows],
        chosen=None if fastest is None else list(rows).index(fastest),
    )
    lead = [f"{said(content['prompts'])} prompts"] if content.get("prompts") else []
    lead += [f"{said(content['batch'])} at a time"] if content.get("batch") else []
    return Section(f"Speed by g, {name}", ", ".join(lead) + "." * bool(lead), _figures(rows), [table])


def _cell(value: Any, form: str) -> str:
    return between(value, form) if isinstance(value, list | tuple) else said(value, form)


def _figures(rows: Sequence[Row]) -> list[Figure]:
    """Chen et al. 2023, Figure 1, and how well the speed was foretold."""
    places = _places(rows)
    ticks = _ticks(places)

    def figure(title: str, caption: str, *shown: Line) -> list[Figure]:
        return [Figure(lines(title, "guesses an iteration, g", shown, ticks), caption)] if shown else []

    def of(value: Value, spread: Callable[[Row], Sequence[float]] | None = None) -> list[Line]:
        return _lines(rows, places, value, spread)

    return [
        *figure(
            "milliseconds of 128 tokens",
            "Time of 128 tokens, with standard deviations over texts: the lowest point is the best g (as in "
            "Chen et al. 2023, Figure 1, left).",
            *of(lambda row: row.get("mean_ms"), lambda row: [row.get("deviation_ms") or 0.0] * 2),
        ),
        *figure(
            "tokens of a pass, of g + 1",
            "Tokens that a pass brought, divided by g + 1 that it could have: the longer the guess, the more "
            "of it is in vain (middle).",
            *of(_efficiency),
        ),
        *figure(
            "milliseconds of an iteration",
            "Time of an iteration: it grows with every step of the draft (right).",
            *of(lambda row: row.get("loop_ms")),
        ),
        *figure(
            "speed over plain decoding",
            "How many times as fast as plain decoding, with 95\u00a0% intervals; dotted, as predicted from "
            "the acceptance and from what the parts of an iteration take by themselves.",
            *of(lambda row: row.get("speedup"), _ends),
            *_lines(rows, places, lambda row: row.get("predicted"), None, predicted=True),
        ),
    ]


def _places(rows: Sequence[Row]) -> dict[str, float]:
    """Where lengths are: numbers at theirs, policies to the right of them."""
    names = list(dict.fromkeys(str(row.get("length")) for row in rows))
    numbers = {name: float(name) for name in names if name.isdecimal()}
    last = max(numbers.values(), default=0.0)
    others = [name for name in names if name not in numbers]
    return numbers | {name: last + max(1.0, 0.3 * last) * i for i, name in enumerate(others, 1)}


def _ticks(places: dict[str, float]) -> dict[float, str]:
    """Without numbers that there is no room for."""
    apart = max(places.values(), default=0.0) / 14
    found: dict[float, str] = {}
    for at, name in sorted((at, name) for name, at in places.items()):
        if not found or at - max(found) >= apart:
            found[at] = name
    return found


def _lines(
    rows: Sequence[Row],
    places: dict[str, float],
    value: Value,
    spread: Callable[[Row], Sequence[float]] | None,
    predicted: bool = False,
) -> list[Line]:
    """A line for each draft over numbers, and a point for each policy."""
    found = []
    for i, draft in enumerate(dict.fromkeys(row.get("draft") for row in rows)):
        mine = [(places[str(row.get("length"))], row) for row in rows if row.get("draft") == draft]
        x, y, ends = list[float](), list[float](), list[Sequence[float]]()
        for at, row in sorted(mine, key=lambda one: one[0]):
            known = value(row)
            if known is None:
                continue
            if not str(row.get("length")).isdecimal():
                x, y, ends = [*x, at], [*y, math.nan], [*ends, (0.0, 0.0)]  # no line leads there
            x, y, ends = [*x, at], [*y, known], [*ends, spread(row) if spread else ()]
        if x:
            found.append(Line(short(draft), x, y, i, ends if spread else None, predicted))
    return found


def _efficiency(row: Row) -> float | None:
    g, brought = str(row.get("length")), row.get("tokens_per_call")
    return brought / (int(g) + 1) if g.isdecimal() and brought is not None else None


def _ends(row: Row) -> Sequence[float]:
    low, high = row.get("interval") or [row["speedup"]] * 2
    return row["speedup"] - low, high - row["speedup"]

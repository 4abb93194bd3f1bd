"""What `outpace measure` found, as tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from outpace.wording import counted

Content = Mapping[str, Any]


def show(content: Content) -> None:
    """All parts that are there."""
    from outpace.cli.show import screen

    console = screen(sys.stdout)
    if not sys.stdout.isatty():
        console.width = 130
    console.print(of_drafts(content))
    if content.get("passes"):
        console.print(of_passes(content))
    if any(one["blocks"] for one in content["drafts"]):
        console.print(of_independence(content))
    domains = next(iter(content["drafts"]))["by_domain"]
    if len(domains) > 1:
        console.print(of_domains(content, list(domains)))
    if content.get("passes"):
        for line in verdicts(content):
            console.print(line)


def of_drafts(content: Content) -> Any:
    names = ("draft", "lenience", "α", "interval", "guesses", "coverage", "D_LK", "counted", "step ms",
             "best g", "speed")  # fmt: skip
    of = ", ".join(counted(content[f"{noun}s"], noun) for noun in ("prompt", "token"))
    table = _table(f"{of} of the target", names)
    for one in content["drafts"]:
        table.add_row(
            one["draft"],
            f"{one['lenience']:g}",
            _number(one["alpha"]),
            _interval(one["interval"]),
            str(one["tokens"]),
            f"{one['coverage']:.0%}",
            _number(one["divergence"] if one["lenience"] == 1 else None),
            _number(one["counted"]),
            _number(one["step_ms"], 2),
            "–" if one["best_g"] is None else str(one["best_g"]),
            _number(one["predicted"], 2),
        )
    return table


def of_passes(content: Content) -> Any:
    """Milliseconds, and beside them times one over a single token."""
    passes = {(one["B"], one["n"]): one["ms"] for one in content["passes"]}
    batches, lengths = (sorted({key[i] for key in passes}) for i in (0, 1))
    table = _table("a target's pass, ms (times one over a token)", ("tokens", *(f"B = {B}" for B in batches)))
    for n in lengths:
        cells = (f"{passes[B, n]:.1f} ({passes[B, n] / passes[B, 1]:.2f})" for B in batches)
        table.add_row(str(n), *cells)
    for drawn in (True, False):
        rows = {(one["B"], one["g"]): one["ms"] for one in content.get("verify", ()) if one["drawn"] == drawn}
        for g in sorted({g for _, g in rows}):
            kind = "drawn" if drawn else "chosen"
            table.add_row(f"verify {g} {kind}", *(f"{rows[B, g]:.2f}" for B in batches))
    return table


def of_independence(content: Content) -> Any:
    """Whether drafts are kept each anew with probability α."""
    counted = [one for one in content["drafts"] if one["blocks"]]
    most = max(len(one["blocks"]["observed"]) for one in counted)
    names = ("draft", "correlation", "chance", "by position", *(f"{k} kept" for k in range(most)), "a pass")
    title = f"is each draft kept anew? (g = {content['g']}; kept: seen, and by α)"
    table = _table(title, names, left=4)
    for one in counted:
        both = list(zip(one["blocks"]["observed"], one["blocks"]["predicted"], strict=True))
        cells = [f"{seen:.2f} {thought:.2f}" for seen, thought in both]
        table.add_row(
            one["draft"],
            " ".join(_number(value, 2) for value in one["autocorrelation"]),
            f"±{one['chance']:.2f}",
            _positions(one),
            *cells,
            *[""] * (most - len(cells)),
            "{:.2f} {:.2f}".format(*one["tokens_per_pass"]),
        )
    return table


def _positions(one: Content) -> str:
    """Shares, and by how much each may be off at most."""
    cells = []
    for share, interval in zip(one["by_position"], one["by_position_intervals"], strict=True):
        half = "" if interval is None else f"±{max(interval[1] - share, share - interval[0]):.2f}"
        cells.append(_number(share, 2) + half)
    return " ".join(cells)


def of_domains(content: Content, domains: list[str]) -> Any:
    table = _table("α by kind of text", ("draft", "lenience", *domains))
    for one in content["drafts"]:
        cells = []
        for domain in domains:
            found = one["by_domain"][domain]
            half = "" if found["interval"] is None else f" {_interval(found['interval'])}"
            cells.append(_number(found["alpha"], 2) + half)
        table.add_row(one["draft"], f"{one['lenience']:g}", *cells)
    return table


def verdicts(content: Content) -> list[str]:
    """A line of each draft at the strictest lenience."""
    lines = []
    strictest = max(one["lenience"] for one in content["drafts"])
    for one in content["drafts"]:
        if one["lenience"] != strictest or not one["by_batch"]:
            continue
        each = [f"B = {at['B']}: {_pays(at)}" for at in one["by_batch"]]
        lines.append(f"{one['draft']}: " + "; ".join(each))
    return lines


def _pays(at: Content) -> str:
    """Whether a draft does, and what it brings, as far as α is known."""
    interval = at["predicted_interval"]
    unsure = interval is not None and interval[0] <= 1 < interval[1]
    times = "" if interval is None else "{:.2f} to {:.2f}".format(*interval)
    if not at["best_g"]:
        hope = f"not known whether it pays, {times} times as fast over α's interval"
        return hope if unsure else "does not pay"
    over = f" ({times} over α's interval)" if times else ""
    doubt = ", so it is not known whether it pays" if unsure else ""
    return f"g = {at['best_g']}, {at['predicted']:.2f} times as fast{over}{doubt}"


def _table(title: str, names: tuple[str, ...], left: int = 1) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right")
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _interval(value: list[float] | None) -> str:
    return "–" if value is None else "{:.2f}–{:.2f}".format(*value)

"""The tables of ``outpace bench alpha`` in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.checks.errors import counted
from outpace.cli import tables
from outpace.report.columns import MEASURE, pays
from outpace.report.words import said, with_interval

Content = Mapping[str, Any]
NAMES = ("draft", "by", "tokens")  # columns that start at the left
Shown = tuple[str, list[tables.Column], int]  # a title, columns, and how many of them name a row


def show(content: Content) -> None:
    """Print all parts that were measured."""
    from outpace.cli.show import screen

    console = screen(sys.stdout)
    shown = [of_drafts(content)]
    if content.get("passes"):
        shown.append(of_passes(content))
    if any(one["blocks"] for one in content["drafts"]):
        shown += of_independence(content)
    domains = next(iter(content["drafts"]))["by_domain"]
    if len(domains) > 1:
        shown.append(of_domains(content, list(domains)))
    for title, columns, keys in shown:
        tables.show(console, title, columns, keys)
    if content.get("passes"):
        for line in verdicts(content):
            console.print(line)


def of_drafts(content: Content) -> Shown:
    """Return the table of drafts."""
    of = ", ".join(counted(content[f"{noun}s"], noun) for noun in ("prompt", "token"))
    rows = [[cell(one) for cell in MEASURE.values()] for one in content["drafts"]]
    return f"{of} of the target", tables.columns(list(MEASURE), rows, NAMES), 2


def of_passes(content: Content) -> Shown:
    """Return the table of forward passes in milliseconds, and relative to one over a single token."""
    passes = {(one["B"], one["n"]): one["ms"] for one in content["passes"]}
    batches, lengths = (sorted({key[i] for key in passes}) for i in (0, 1))
    rows = [
        [str(n), *(f"{passes[B, n]:.1f} ({passes[B, n] / passes[B, 1]:.2f})" for B in batches)]
        for n in lengths
    ]
    for drawn in (True, False):
        times = {
            (one["B"], one["g"]): one["ms"] for one in content.get("verify", ()) if one["drawn"] == drawn
        }
        for g in sorted({g for _, g in times}):
            kind = "drawn" if drawn else "chosen"
            rows.append([f"verify {g} {kind}", *(f"{times[B, g]:.2f}" for B in batches)])
    title = "a target's pass, ms (times one over a token)"
    return title, tables.columns(["tokens", *(f"B = {B}" for B in batches)], rows, NAMES), 1


def of_independence(content: Content) -> list[Shown]:
    """Return tables that show whether each draft token is accepted with probability α.

    The formulas assume this, independently of the other draft tokens.
    """
    shown = [one for one in content["drafts"] if one["blocks"]]
    lags, places = (max(len(one[part]) for one in shown) for part in ("autocorrelation", "by_position"))
    most = max(len(one["blocks"]["observed"]) for one in shown)
    correlated = [
        [one["draft"], *_filled([said(value, ".2f") for value in one["autocorrelation"]], lags),
         f"±{one['chance']:.2f}"]
        for one in shown
    ]  # fmt: skip
    accepted = [
        [one["draft"], *_filled([with_interval(*each, ".2f") for each in _places(one)], places)]
        for one in shown
    ]
    counts = [
        [one["draft"], by, *_filled([f"{share:.2f}" for share in one["blocks"][part]], most), f"{tokens:.2f}"]
        for one in shown
        for (by, part), tokens in zip(COUNTED.items(), one["tokens_per_pass"], strict=True)
    ]
    return [
        (
            "autocorrelation of acceptance, by tokens later",
            tables.columns(["draft", *map(str, range(1, lags + 1)), "chance"], correlated, NAMES), 1,
        ),
        (
            "accepted, by position of the draft token",
            tables.columns(["draft", *map(str, range(1, places + 1))], accepted, NAMES), 1,
        ),
        (
            f"iterations, by draft tokens accepted (g = {content['g']})",
            tables.columns(["draft", "by", *map(str, range(most)), "tokens per pass"], counts, NAMES), 2,
        ),
    ]  # fmt: skip


COUNTED = {"counts": "observed", "α": "predicted"}


def _places(one: Content) -> Sequence[tuple[float | None, Any]]:
    return list(zip(one["by_position"], one["by_position_intervals"], strict=True))


def _filled(cells: Sequence[str], number: int) -> list[str]:
    return [*cells, *[""] * (number - len(cells))]


def of_domains(content: Content, domains: list[str]) -> Shown:
    """Return the table of α by kind of text."""
    rows = [
        [
            one["draft"], f"{one['lenience']:g}",
            *(with_interval(found["alpha"], found["interval"], ".2f")
              for domain in domains if (found := one["by_domain"][domain])),
        ]
        for one in content["drafts"]
    ]  # fmt: skip
    return "α by kind of text", tables.columns(["draft", "lenience", *domains], rows, NAMES), 2


def verdicts(content: Content) -> list[str]:
    """Return a line for each draft at the largest lenience."""
    lines = []
    strictest = max(one["lenience"] for one in content["drafts"])
    for one in content["drafts"]:
        if one["lenience"] != strictest or not one["by_batch"]:
            continue
        each = [f"B = {at['B']}: {pays(at)}" for at in one["by_batch"]]
        lines.append(f"{one['draft']}: " + "; ".join(each))
    return lines

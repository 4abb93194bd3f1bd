"""The tables of ``outpace bench alpha`` in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.checks.errors import counted
from outpace.cli import tables
from outpace.report.columns import MEASURE, describe_payoff
from outpace.report.words import format_value, with_interval

Content = Mapping[str, Any]
NAMES = ("draft", "by", "tokens")  # columns of words
TitledTable = tuple[str, list[tables.Column], int]  # a title, columns, and how many of them name a row


def show(content: Content) -> None:
    """Print a table for each part that was measured."""
    from outpace.cli.show import screen

    console = screen(sys.stdout)
    titled_tables = [draft_table(content)]
    if content.get("passes"):
        titled_tables.append(pass_table(content))
    if any(one["blocks"] for one in content["drafts"]):
        titled_tables += independence_tables(content)
    domains = next(iter(content["drafts"]))["by_domain"]
    if len(domains) > 1:
        titled_tables.append(domain_table(content, list(domains)))
    for title, columns, keys in titled_tables:
        tables.show(console, title, columns, keys)
    if content.get("passes"):
        for line in verdicts(content):
            console.print(line)


def draft_table(content: Content) -> TitledTable:
    """Return the table of drafts."""
    prompts, tokens = counted(content["prompts"], "prompt"), counted(content["new_tokens"], "token")
    rows = [[cell(one) for cell in MEASURE.values()] for one in content["drafts"]]
    return f"{prompts}, {tokens} of the target", tables.columns(list(MEASURE), rows, NAMES), 2


def pass_table(content: Content) -> TitledTable:
    """Return the table of forward passes in milliseconds, and relative to one over a single token."""
    passes = {(one["B"], one["n"]): one["ms"] for one in content["passes"]}
    batches, lengths = (sorted({key[i] for key in passes}) for i in (0, 1))
    rows = [
        [str(n), *(f"{passes[B, n]:.1f} ({passes[B, n] / passes[B, 1]:.2f})" for B in batches)]
        for n in lengths
    ]
    for sampled in (True, False):
        times = {
            (one["B"], one["g"]): one["ms"] for one in content.get("verify", ()) if one["sampled"] == sampled
        }
        for g in sorted({g for _, g in times}):
            kind = "sampled" if sampled else "chosen"
            rows.append([f"verify {g} {kind}", *(f"{times[B, g]:.2f}" for B in batches)])
    title = "a target's pass, ms (relative to one over a single token)"
    return title, tables.columns(["tokens", *(f"B = {B}" for B in batches)], rows, NAMES), 1


def independence_tables(content: Content) -> list[TitledTable]:
    """Return tables that show whether draft tokens are accepted independently, as the formulas assume."""
    drafts = [one for one in content["drafts"] if one["blocks"]]
    lags, positions = (max(len(one[part]) for one in drafts) for part in ("autocorrelation", "by_position"))
    most = max(len(one["blocks"]["observed"]) for one in drafts)
    correlated = [
        [one["draft"], *_padded([format_value(value, ".2f") for value in one["autocorrelation"]], lags),
         f"±{one['chance']:.2f}"]
        for one in drafts
    ]  # fmt: skip
    accepted = [
        [one["draft"], *_padded([with_interval(*each, ".2f") for each in _positions(one)], positions)]
        for one in drafts
    ]
    counts = [
        [one["draft"], by, *_padded([f"{share:.2f}" for share in one["blocks"][part]], most), f"{tokens:.2f}"]
        for one in drafts
        for (by, part), tokens in zip(COUNTED.items(), one["tokens_per_pass"], strict=True)
    ]
    return [
        (
            "autocorrelation of acceptance, by tokens later",
            tables.columns(["draft", *map(str, range(1, lags + 1)), "chance"], correlated, NAMES), 1,
        ),
        (
            "accepted, by position of the draft token",
            tables.columns(["draft", *map(str, range(1, positions + 1))], accepted, NAMES), 1,
        ),
        (
            f"steps, by draft tokens accepted (g = {content['g']})",
            tables.columns(["draft", "by", *map(str, range(most)), "tokens per pass"], counts, NAMES), 2,
        ),
    ]  # fmt: skip


COUNTED = {"counts": "observed", "α": "predicted"}


def _positions(one: Content) -> Sequence[tuple[float | None, Any]]:
    return list(zip(one["by_position"], one["by_position_intervals"], strict=True))


def _padded(cells: Sequence[str], number: int) -> list[str]:
    return [*cells, *[""] * (number - len(cells))]


def domain_table(content: Content, domains: list[str]) -> TitledTable:
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
        each = [f"B = {at['B']}: {describe_payoff(at)}" for at in one["by_batch"]]
        lines.append(f"{one['draft']}: " + "; ".join(each))
    return lines

"""Columns of result tables: one head and one format per quantity, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outpace.report.words import format_interval, format_value, with_interval

ResultRow = Mapping[str, Any]  # of a JSON file of results
Cell = Callable[[ResultRow], str]
Columns = Mapping[str, Cell]


def value(key: str, spec: str = "", interval: str | None = None) -> Cell:
    """Return the cell of a JSON key.

    Args:
        key: Key of the value.
        spec: Format of the value.
        interval: Key of an interval to show in brackets after the value.
    """
    return lambda row: with_interval(row.get(key), row.get(interval) if interval else None, spec)


def _speedup(row: ResultRow) -> str:
    return with_interval(
        row.get("speedup"), None if row.get("num_draft_tokens") == "0" else row.get("interval"), ".2f"
    )


def _error(row: ResultRow) -> str:
    if row.get("predicted") is None:
        return "–"
    error = round(row["predicted"] / row["speedup"] - 1, 2) + 0.0  # + 0.0 turns -0.0 into 0.0
    return f"{error:+.0%}"


def _expected(row: ResultRow) -> str:
    """Return the expected speed; the interval belongs to it only if nothing was verified."""
    interval = row.get("interval") if row.get("verified") is None else None
    return with_interval(row.get("expected"), interval, ".2f")


def _verified(row: ResultRow) -> str:
    interval = row.get("interval") if row.get("verified") is not None else None
    return with_interval(row.get("verified"), interval, ".2f")


def _predicted(row: ResultRow) -> str:
    """Return the predicted speed; at best g = 0 the interval is left out, as it is of another g."""
    return with_interval(
        row.get("predicted"), row.get("predicted_interval") if row.get("best_g") else None, ".2f"
    )


SWEEP_SPEEDS: Columns = {
    "g": value("num_draft_tokens"),
    "α counted": value("alpha", ".2f"),
    "c": lambda row: format_value(None if row.get("predicted_simple") is None else row.get("c"), "small"),
    "speedup": _speedup,
    "predicted": value("predicted", ".2f"),
    "error": _error,
    "thm 3.8": value("predicted_simple", ".2f"),
}
SWEEP_TIMES: Columns = {
    "g": value("num_draft_tokens"),
    "mean": value("mean_ms", "ms"),
    "±": value("deviation_ms", "ms"),
    "P50": value("p50_ms", "ms"),
    "P90": value("p90_ms", "ms"),
    "P99": value("p99_ms", "ms"),
    "loop ms": value("loop_ms", "ms"),
    "tokens per pass": value("tokens_per_pass", ".2f"),
    "acceptance": value("acceptance", ".2f"),
}
MEASURE: Columns = {
    "draft": value("draft"),
    "lenience": value("lenience"),
    "α": value("alpha", ".3f", "interval"),
    "draft tokens": value("draft_tokens"),
    "coverage": value("coverage", ".0%"),
    "D_LK": lambda row: format_value(row.get("divergence") if row.get("lenience") == 1 else None, ".3f"),
    "α counted": value("counted", ".3f"),
    "step ms": value("step_ms", ".2f"),
    "best g": value("best_g"),
    "predicted": _predicted,
}
TUNE: Columns = {
    "draft": value("draft"),
    "g": value("num_draft_tokens"),
    "rule": value("rule"),
    "dtype": value("dtype"),
    "batch": value("batch"),
    "expected": _expected,
    "verified": _verified,
    "why": value("why"),
}
TUNE_VARIED = ("rule", "dtype", "batch")  # shown only where candidates differ in them


def tune_columns(candidates: list[dict[str, Any]]) -> Columns:
    """Return the columns of a tuning, without those that are the same in every row."""
    constant = {name for name in TUNE_VARIED if len({candidate.get(name) for candidate in candidates}) <= 1}
    return {head: cell for head, cell in TUNE.items() if head not in constant}


def describe_payoff(prediction: ResultRow) -> str:
    """Return the predicted speed of a draft at its best g, and whether it is known to pay, in words."""
    interval, g = prediction.get("predicted_interval"), prediction.get("best_g")
    unsure = interval is not None and interval[0] <= 1 < interval[1]
    times = format_interval(interval, ".2f") if interval else ""
    if not g:
        unknown = f"not known whether it pays, {times} times as fast over α's interval"
        return unknown if unsure else "does not pay"
    over_interval = f" ({times} over α's interval)" if times else ""
    caveat = ", so it is not known whether it pays" if unsure else ""
    speed = format_value(prediction.get("predicted"), ".2f")
    return f"g = {g}, {speed} times as fast{over_interval}{caveat}"

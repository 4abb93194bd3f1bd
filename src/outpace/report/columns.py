"""Columns of result tables: one head and one form per quantity, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outpace.report.words import between, said, with_interval

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
Columns = Mapping[str, Cell]


def value(key: str, form: str = "", interval: str | None = None) -> Cell:
    """Return the cell of a JSON key, with the interval of another key in brackets behind it."""
    return lambda row: with_interval(row.get(key), row.get(interval) if interval else None, form)


def _speedup(row: Row) -> str:
    return with_interval(row.get("speedup"), None if row.get("length") == "0" else row.get("interval"), ".2f")


def _error(row: Row) -> str:
    if row.get("predicted") is None:
        return "–"
    off = round(row["predicted"] / row["speedup"] - 1, 2) + 0.0  # no minus before a zero
    return f"{off:+.0%}"


def _expected(row: Row) -> str:
    """Return the expected speed; the interval is its own only where nothing was verified."""
    own = row.get("interval") if row.get("verified") is None else None
    return with_interval(row.get("expected"), own, ".2f")


def _verified(row: Row) -> str:
    own = row.get("interval") if row.get("verified") is not None else None
    return with_interval(row.get("verified"), own, ".2f")


def _predicted(row: Row) -> str:
    """Return the predicted speed; at best g = 0 the interval is of another g, so it is left out."""
    return with_interval(
        row.get("predicted"), row.get("predicted_interval") if row.get("best_g") else None, ".2f"
    )


SWEEP_SPEEDS: Columns = {
    "g": value("length"),
    "α counted": value("alpha", ".2f"),
    "c": lambda row: said(None if row.get("predicted_simple") is None else row.get("c"), "small"),
    "speedup": _speedup,
    "predicted": value("predicted", ".2f"),
    "error": _error,
    "thm 3.8": value("predicted_simple", ".2f"),
}
SWEEP_TIMES: Columns = {
    "g": value("length"),
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
    "draft tokens": value("tokens"),
    "coverage": value("coverage", ".0%"),
    "D_LK": lambda row: said(row.get("divergence") if row.get("lenience") == 1 else None, ".3f"),
    "α counted": value("counted", ".3f"),
    "step ms": value("step_ms", ".2f"),
    "best g": value("best_g"),
    "predicted": _predicted,
}
TUNE: Columns = {
    "draft": value("draft"),
    "g": value("length"),
    "rule": value("rule"),
    "dtype": value("dtype"),
    "batch": value("batch"),
    "expected": _expected,
    "verified": _verified,
    "why": value("why"),
}
TUNE_VARIED = ("rule", "dtype", "batch")  # shown where candidates differ in them


def tune_columns(candidates: list[dict[str, Any]]) -> Columns:
    """Return the columns of a tuning, without those that are the same in every row."""
    same = {name for name in TUNE_VARIED if len({one.get(name) for one in candidates}) <= 1}
    return {head: cell for head, cell in TUNE.items() if head not in same}


def pays(at: Row) -> str:
    """Return the speed of a draft at its best g, and whether that is known to pay, in words."""
    interval, g = at.get("predicted_interval"), at.get("best_g")
    unsure = interval is not None and interval[0] <= 1 < interval[1]
    times = between(interval, ".2f") if interval else ""
    if not g:
        hope = f"not known whether it pays, {times} times as fast over α's interval"
        return hope if unsure else "does not pay"
    over = f" ({times} over α's interval)" if times else ""
    doubt = ", so it is not known whether it pays" if unsure else ""
    return f"g = {g}, {said(at.get('predicted'), '.2f')} times as fast{over}{doubt}"

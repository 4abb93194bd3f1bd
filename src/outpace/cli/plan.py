"""``outpace plan``: the expected speedup of speculation, by the formulas of Leviathan et al."""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated, Any

import typer

from outpace.cli.options import AsJson, Plot

# Leviathan et al. 2023, Table 5: the fraction of rejected draft tokens that lenience still rejects,
# for T5-small and T5-base.
REJECTED_WITH_LENIENCE = {
    0.5: (0.29 / 0.38, 0.20 / 0.32),
    0.3: (0.24 / 0.38, 0.17 / 0.32),
    0.1: (0.16 / 0.38, 0.10 / 0.32),
}
SPEEDUPS = (1.5, 2.0, 3.0)  # for which the plan shows the least α
MAX_DRAFT_TOKENS = 1000  # per step; no useful number is near it
MAX_COST = 1000.0  # a draft that costs more is a mistake


def plan(
    alpha: Annotated[float, typer.Option(min=0.0, max=1.0, help="Acceptance rate of draft tokens.")],
    c: Annotated[
        float, typer.Option(help="Time to draft one token divided by the time of a target pass.")
    ] = 0.0,
    ops: Annotated[
        float | None,
        typer.Option(
            help="Operations to draft one token, divided by the target's operations for one token. "
            "Default: c."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        list[int] | None, typer.Option(help="Also show these numbers of draft tokens; may be repeated.")
    ] = None,
    max_draft_tokens: Annotated[
        int, typer.Option(help=f"Largest number of draft tokens to consider, up to {MAX_DRAFT_TOKENS}.")
    ] = 32,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Compute the best number of draft tokens and the speedup (Leviathan et al. 2023, section 3).

    g is the number of draft tokens per step. α and c are --alpha and --c.
    `outpace bench alpha` measures them with real models.

    The formulas assume that a target pass over g + 1 tokens costs as much as a
    pass over one token. That holds on a GPU with a small batch, but not on a CPU.

    Lenience below 1 accepts more draft tokens and changes the output
    distribution. A second table shows the speedup with lenience. It assumes that
    lenience avoids the same fraction of rejections as Leviathan et al. measured
    for T5 (Table 5).

    --plot shows expected tokens, the best g, speedup and operations.
    """
    for name, cost in (("--c", c), ("--ops", ops)):
        if cost is not None and not 0 <= cost <= MAX_COST:
            raise ValueError(f"{name}: got {cost:g}; it must be a number from 0 to {MAX_COST:g}")
    if not 1 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"--max-draft-tokens: got {max_draft_tokens}; it must be from 1 to {MAX_DRAFT_TOKENS}"
        )
    for g in num_draft_tokens or ():
        if not 0 <= g <= MAX_DRAFT_TOKENS:
            raise ValueError(f"--num-draft-tokens: got {g}; it must be from 0 to {MAX_DRAFT_TOKENS}")
    if plot is not None:
        from outpace.bench.curves import backend

        backend(plot)  # a missing package is an error before anything is printed
    found = compute(alpha, c, c if ops is None else ops, num_draft_tokens or [], max_draft_tokens)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    if plot is not None:
        from outpace.bench.curves import Point, save_plot

        save_plot(plot, Point(alpha, c, ops=ops, most=max_draft_tokens))


def compute(
    alpha: float, c: float, ops: float, num_draft_tokens: list[int], max_draft_tokens: int
) -> dict[str, Any]:
    """Return the numbers of the plan."""
    from outpace.bench import theory

    def at(rate: float, g: int) -> dict[str, Any]:
        return {
            "g": g,
            "tokens": round(theory.expected_tokens(rate, g), 3),
            "speedup": round(theory.speedup(rate, g, c), 3),
            "operations": round(theory.operations(rate, g, ops), 3),
        }

    best = theory.best_length(alpha, c, max_draft_tokens)
    lengths = sorted({1, 2, 3, 5, 8, best, *num_draft_tokens} - {0} | set(num_draft_tokens))
    lenient = []
    for lenience, rejected in REJECTED_WITH_LENIENCE.items():
        rates = [1 - (1 - alpha) * one for one in rejected]
        best_of_rates = [at(rate, theory.best_length(rate, c, max_draft_tokens)) for rate in rates]
        lenient.append(
            {"lenience": lenience, "alpha": [round(one, 3) for one in rates], "best": best_of_rates}
        )
    needed: list[dict[str, Any]] = [{"speedup": 1.0, "more": True, "alpha": c if c < 1 else None}]
    for speed in SPEEDUPS:
        each = theory.needed_alpha(c, speed, range(1, max_draft_tokens + 1))
        possible = [one for one in each.tolist() if not math.isnan(one)]
        least = round(min(possible), 3) if possible else None
        needed.append({"speedup": speed, "more": False, "alpha": least})
    return {
        "alpha": alpha,
        "c": c,
        "ops": ops,
        "best": at(alpha, best),
        "oracle": oracle if math.isfinite(oracle := float(theory.oracle_speedup(alpha, c))) else None,
        "pays_above": c,
        "lengths": [at(alpha, g) for g in lengths],
        "lenience": lenient,
        "needed": needed,
    }


def show(found: dict[str, Any]) -> None:
    """Print the plan."""
    from rich.table import Table

    from outpace.cli.show import screen

    console = screen(sys.stdout)
    best, c = found["best"], found["c"]
    if best["g"]:
        console.print(
            f"Draft g = {best['g']}: {best['tokens']:.2f} tokens per pass, {best['speedup']:.2f} times as "
            f"fast, {best['operations']:.2f} times the operations. An oracle that knows which draft tokens "
            "are accepted would be "
            + ("fast without limit." if found["oracle"] is None else f"{found['oracle']:.2f} times as fast.")
        )
    else:
        console.print(f"Do not speculate: a draft pays only if its α is above c = {c:g}.")
    table = Table("g", "tokens per pass", "speed", "operations")
    for one in found["lengths"]:
        table.add_row(str(one["g"]), *(f"{one[name]:.2f}" for name in ("tokens", "speedup", "operations")))
    console.print(table)
    table = Table("lenience", "α about", "best g", "speed about")
    for one in found["lenience"]:
        low, high = one["best"]
        table.add_row(
            f"{one['lenience']:g}",
            "{:.2f} to {:.2f}".format(*one["alpha"]),
            f"{low['g']} to {high['g']}",
            f"{low['speedup']:.2f} to {high['speedup']:.2f}",
        )
    console.print(table)
    table = Table("for a speed of", "an α of at least")
    for one in found["needed"]:
        least = "none is enough" if one["alpha"] is None else f"{one['alpha']:.2f}"
        table.add_row(f"{'more than ' if one['more'] else ''}{one['speedup']:g}", least)
    console.print(table)

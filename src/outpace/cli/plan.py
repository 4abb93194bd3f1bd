"""``outpace plan``: the gain of speculation by the papers' formulas, before anything is run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

# Leviathan et al. 2023, Table 5: share of rejected draft tokens that stay rejected, for T5-small and T5-base.
LENIENT = {0.5: (0.29 / 0.38, 0.20 / 0.32), 0.3: (0.24 / 0.38, 0.17 / 0.32), 0.1: (0.16 / 0.38, 0.10 / 0.32)}
SPEEDS = (1.5, 2.0, 3.0)
LONGEST = 1000  # draft tokens per step; no number that pays is near it
COSTLIEST = 1000.0  # a draft as slow as that is a mistake


def plan(
    alpha: Annotated[float, typer.Option(min=0.0, max=1.0, help="Acceptance rate of draft tokens.")],
    c: Annotated[
        float, typer.Option(help="Time of a draft step divided by the time of a target pass.")
    ] = 0.0,
    ops: Annotated[
        float | None,
        typer.Option(
            help="Arithmetic operations of a draft step, divided by those of the target for one token. "
            "Default: c."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        list[int] | None, typer.Option(help="Also show these numbers of draft tokens; may be repeated.")
    ] = None,
    most: Annotated[
        int, typer.Option(help=f"Largest number of draft tokens to consider, up to {LONGEST}.")
    ] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Plot expected tokens, best g, speedup and operations to this file (.svg, .png, .pdf)."
        ),
    ] = None,
) -> None:
    """Say how many tokens to draft, and the speedup: Leviathan et al. 2023, section 3.

    α and c of real models: `outpace bench alpha`.
    A pass over g + 1 tokens is taken to cost as much as one over a single token, which holds on a GPU
    with few rows, and does not on a CPU.

    Lenience: if it keeps as many more drafts as Leviathan et al. measured for T5 (Table 5).
    """
    for name, cost in (("--c", c), ("--ops", ops)):
        if cost is not None and not 0 <= cost <= COSTLIEST:
            raise ValueError(f"{name}: got {cost:g}; it must be a number from 0 to {COSTLIEST:g}")
    if not 1 <= most <= LONGEST:
        raise ValueError(f"--most: got {most}; it must be from 1 to {LONGEST}")
    for g in num_draft_tokens or ():
        if not 0 <= g <= LONGEST:
            raise ValueError(f"--num-draft-tokens: got {g}; it must be from 0 to {LONGEST}")
    if plot is not None:
        from outpace.bench.curves import backend

        backend(plot)  # what is missing is said before anything is printed
    found = planned(alpha, c, c if ops is None else ops, num_draft_tokens or [], most)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    if plot is not None:
        from outpace.bench.curves import Point, draw

        draw(plot, Point(alpha, c, ops=ops, most=most))


def planned(alpha: float, c: float, ops: float, num_draft_tokens: list[int], most: int) -> dict[str, Any]:
    """Return everything that is printed, as numbers."""
    from outpace.bench import theory

    def at(share: float, g: int) -> dict[str, Any]:
        return {
            "g": g,
            "tokens": round(theory.expected_tokens(share, g), 3),
            "speedup": round(theory.speedup(share, g, c), 3),
            "operations": round(theory.operations(share, g, ops), 3),
        }

    best = theory.best_length(alpha, c, most)
    others = sorted({1, 2, 3, 5, 8, best, *num_draft_tokens} - {0} | set(num_draft_tokens))
    lenient = []
    for lenience, lost in LENIENT.items():
        shares = [1 - (1 - alpha) * one for one in lost]
        ends = [at(share, theory.best_length(share, c, most)) for share in shares]
        lenient.append({"lenience": lenience, "alpha": [round(one, 3) for one in shares], "best": ends})
    needed: list[dict[str, Any]] = [{"speedup": 1.0, "more": True, "alpha": c if c < 1 else None}]
    for speed in SPEEDS:
        each = theory.needed_alpha(c, speed, range(1, most + 1))
        enough = [one for one in each.tolist() if not math.isnan(one)]
        least = round(min(enough), 3) if enough else None
        needed.append({"speedup": speed, "more": False, "alpha": least})
    return {
        "alpha": alpha,
        "c": c,
        "ops": ops,
        "best": at(alpha, best),
        "oracle": oracle if math.isfinite(oracle := float(theory.oracle_speedup(alpha, c))) else None,
        "pays_above": c,
        "lengths": [at(alpha, g) for g in others],
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
            f"Draft g = {best['g']}: {best['tokens']:.2f} tokens a pass, {best['speedup']:.2f} times as "
            f"fast, {best['operations']:.2f} times the operations. Knowing what will be kept, one could be "
            + ("fast without limit." if found["oracle"] is None else f"{found['oracle']:.2f} times as fast.")
        )
    else:
        console.print(f"Do not speculate: a draft pays only if its α is above c = {c:g}.")
    table = Table("g", "tokens a pass", "speed", "operations")
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
        enough = "none is enough" if one["alpha"] is None else f"{one['alpha']:.2f}"
        table.add_row(f"{'more than ' if one['more'] else ''}{one['speedup']:g}", enough)
    console.print(table)

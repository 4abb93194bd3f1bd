"""`outpace audit`: is it lossless with these models?"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.options import (
    Device,
    Drafted,
    Dtype,
    LengthName,
    Lenience,
    RuleName,
    Target,
    open_decoder,
    read_text,
)
from outpace.cli.show import note, screen

if TYPE_CHECKING:
    from outpace.audit import Report

# Texts that repeat themselves, so that a drafter that copies has something to guess.
PROMPTS = (
    "A B C D E F G A B C D E F G A B C",
    "Alice likes red apples and Bob likes green pears. Alice likes red apples and Bob likes green",
)


def audit(
    target: Target = None,
    draft: Drafted = "lookup",
    rule: RuleName = "token",
    lenience: Lenience = 1.0,
    length: LengthName = None,
    device: Device = None,
    dtype: Dtype = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line, instead of the built-in two.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Draws per prompt; 0 tests greedy decoding alone.")
    ] = 1000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens whose joint distribution is tested.")] = 4,
    greedy_tokens: Annotated[int, typer.Option(min=0, help="Tokens compared in greedy decoding.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of the draws.")] = 1.0,
    alarm: Annotated[float, typer.Option(help="p-values below this fail.")] = 1e-6,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    plant: Annotated[
        str | None,
        typer.Option(
            metavar="keep-all|redraw|rollback|stale|noise",
            help="Plant a known fault first, to see that the audit can fail.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check that speculation changes nothing. Exit status: 0 lossless, 1 not lossless, 2 could not tell.

    Greedy decoding must give the target's own tokens. When sampling, the first tokens together must be
    distributed as the target alone would draw them: Pearson's chi-squared against exact probabilities.
    """
    texts = list(PROMPTS)
    if prompts is not None:
        texts = [line for line in read_text(prompts).splitlines() if line.strip()]
        if not texts:
            raise ValueError(f"{prompts}: no prompts in it")
    from contextlib import nullcontext

    from outpace.audit import audit as run
    from outpace.faults import FAULTS, planted

    if plant is not None and plant not in FAULTS:
        raise ValueError(f"--plant: got {plant!r}; known are {', '.join(FAULTS)}")
    if draft == "none":
        raise ValueError("--draft: nothing is guessed with none, so there is nothing to audit")
    decoder = open_decoder(target, draft, device, dtype, rule, lenience, length)
    if plant is not None:
        note(f"planted: {FAULTS[plant].__doc__}")
    with planted(decoder, plant) if plant is not None else nullcontext():
        report = run(
            decoder,
            texts,
            samples=samples,
            tokens=tokens,
            greedy_tokens=greedy_tokens,
            temperature=temperature,
            alarm=alarm,
            seed=seed,
            progress=not as_json and sys.stderr.isatty(),
        )
    if as_json:
        made: dict[str, Any] = {"lossless": report.passed if report.tested or not report.passed else None}
        made["settings"] = decoder.describe().splitlines()
        made["greedy"] = [dataclasses.asdict(one) for one in report.greedy]
        made["joint"] = [dataclasses.asdict(one) for one in report.joint]
        print(json.dumps(made, indent=2))
    else:
        _print(report, texts)
    if not report.passed:
        raise SystemExit(1)
    if not report.tested:
        raise ValueError(
            "nothing was guessed on these prompts, so nothing was tested; give others (--prompts)"
        )
    if plant is not None:
        note("The planted fault was not found by these checks.")


def _print(report: Report, texts: list[str]) -> None:
    from rich.table import Table

    console = screen(sys.stdout)
    verdict, *details = str(report).splitlines()
    console.print(verdict, style=f"bold {'green' if report.passed else 'red'}")
    for line in details:
        console.print(line)
    made = Table(
        "prompt", "greedy", "samples", "outcomes", "p-value", "fails below", "finds shifts of", "kept"
    )
    for column in made.columns[1:]:
        column.justify = "right"
    for i, text in enumerate(texts):
        cells = ["-"] * 7
        if report.greedy:
            one = report.greedy[i]
            same = f"{one.tokens} same" if one.differs_at is None else f"differs at {one.differs_at}"
            cells[0] = same + (" (tie)" if one.near_tie else "")
        if report.joint:
            each = report.joint[i]
            cells[1:] = [
                str(each.samples),
                str(each.outcomes),
                f"{each.p_value:.3g}",
                f"{each.alarm:.0e}",
                f"{each.detectable:.1%}",
                f"{each.accepted}/{each.drafted}",
            ]
        made.add_row(text.replace("\n", "\\n")[-24:], *cells)
    console.print(made)

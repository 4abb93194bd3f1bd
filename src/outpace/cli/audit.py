"""``outpace audit``: a check that speculation does not change the output."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.models import ModelFlags, open_decoder, with_model_flags
from outpace.cli.options import AsJson, read_text
from outpace.cli.show import note, screen

if TYPE_CHECKING:
    from outpace.auditing.report import Report

# Three words in no strict order: each of them is likely next, and prompt lookup proposes all of them. The
# token after a rejected one depends on it. A second prompt would halve the samples of each.
PROMPTS = ("out up out in up in out up in out up",)
FAULT_NAMES = "accept-all|resample|rollback|stale|noise|reuse|mislabel"


@with_model_flags
def audit(
    models: ModelFlags,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line, instead of the built-in one.")
    ] = None,
    misplacement: Annotated[
        float,
        typer.Option(
            help="Error that is found with 99 % probability: the share of probability on wrong tokens."
        ),
    ] = 0.05,
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Samples per prompt; 0 checks greedy decoding alone. Default: what --misplacement needs.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens whose joint distribution is compared.")] = 3,
    greedy_tokens: Annotated[int, typer.Option(min=0, help="Tokens compared in greedy decoding.")] = 32,
    temperature: Annotated[float, typer.Option(help="Temperature of the samples.")] = 1.0,
    alarm: Annotated[
        float,
        typer.Option(help="Probability that a difference is reported for a correct decoder."),
    ] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    plant: Annotated[
        str | None,
        typer.Option(
            metavar=FAULT_NAMES, help="Plant a known fault first, to check that the audit finds it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test that speculation does not change the output distribution.

    Exit status: 0 no difference found, 1 difference found, 3 could not tell.

    Greedy decoding must give the target's own tokens. When sampling, the joint
    distribution of the first tokens must equal the target's; Pearson's chi-squared
    test compares samples with exact probabilities. With --num-draft-tokens auto,
    the default, the audit drafts 3 tokens a step.
    """
    models.check()
    if models.draft == "none":
        raise ValueError("--draft: got none; without draft tokens there is nothing to audit")
    texts = list(PROMPTS)
    if prompts is not None:
        texts = [line for line in read_text(prompts).splitlines() if line.strip()]
        if not texts:
            raise ValueError(f"{prompts}: no prompts in it")
    from contextlib import nullcontext

    from outpace.auditing.audit import audit as run
    from outpace.auditing.faults import FAULTS, planted
    from outpace.auditing.report import DIFFERENCE, NO_DIFFERENCE
    from outpace.checks.errors import suggestion

    if plant is not None and plant not in FAULTS:
        known = ", ".join(FAULTS)
        raise ValueError(f"--plant: got {plant!r}; it must be one of {known}{suggestion(plant, FAULTS)}")
    decoder = open_decoder(models)
    if plant is not None:
        note(f"planted: {FAULTS[plant].__doc__}")
    with planted(decoder, plant) if plant is not None else nullcontext():
        report = run(
            decoder,
            texts,
            samples=samples,
            misplacement=misplacement,
            tokens=tokens,
            greedy_tokens=greedy_tokens,
            temperature=temperature,
            alarm=alarm,
            seed=seed,
            progress=not as_json,
            tell=note,
        )
    if as_json:
        print(json.dumps(_as_json(report, texts, decoder.describe().splitlines()), indent=2))
    else:
        _print(report, texts)
    if plant is not None:
        found = [name for name, one in _verdicts(report).items() if one == DIFFERENCE]
        note(f"The planted fault was found by: {', '.join(found) or 'no check'}.")
    if report.verdict != NO_DIFFERENCE:
        raise SystemExit(1 if report.verdict == DIFFERENCE else 3)


def _verdicts(report: Report) -> dict[str, str]:
    """Return the verdict of each check that ran."""
    from outpace.auditing.report import DIFFERENCE, NO_DIFFERENCE

    verdicts = {}
    if report.greedy:
        same = all(one.passed for one in report.greedy)
        verdicts["greedy"] = NO_DIFFERENCE if same else DIFFERENCE
    if report.joint:
        verdicts["sampling"] = report.sampling
    return verdicts


def _as_json(report: Report, texts: list[str], settings: list[str]) -> dict[str, Any]:
    from outpace.auditing.pearson import CERTAINTY

    fields = dataclasses.asdict(report)
    greedy, joint = fields.pop("greedy"), fields.pop("joint")
    return {
        "verdict": report.verdict,
        "verdicts": _verdicts(report),
        "certainty": CERTAINTY,
        **fields,
        "draft_tokens": report.draft_tokens,
        "accepted_tokens": report.accepted_tokens,
        "settings": settings,
        "prompts": texts,
        "greedy": greedy,
        "joint": joint,
    }


def _print(report: Report, texts: list[str]) -> None:
    from rich import box
    from rich.table import Table

    from outpace.auditing.report import NO_DIFFERENCE

    console = screen(sys.stdout)
    verdict, *details = str(report).splitlines()
    console.print(verdict, style=f"bold {'green' if report.verdict == NO_DIFFERENCE else 'red'}")
    for line in details:
        console.print(line)
    rows = [[text.replace("\n", "\\n"), *_cells(report, i)] for i, text in enumerate(texts)]
    names = ("greedy", "p-value", "finds", "accepted")
    widths = [max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(names, 1)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    # The other columns have a margin of three characters each. The prompt gets the remaining width.
    prompt_width = max(1, console.width - sum(width + 3 for width in widths))
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=prompt_width)
    for name, width in zip(names, widths, strict=True):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def _cells(report: Report, i: int) -> list[str]:
    """Return the cells of a prompt's row in the table."""
    greedy, joint = "-", ["-"] * 3
    if report.greedy:
        one = report.greedy[i]
        same = f"same, {one.ties} ties" if one.ties else "same"
        greedy = same if one.differs_at is None else f"differs at {one.differs_at}"
    if report.joint:
        each = report.joint[i]
        joint = [
            f"{each.p_value:.2g}",
            f"{each.detectable:.1%}",
            f"{each.accepted_tokens}/{each.draft_tokens}",
        ]
    return [greedy, *joint]

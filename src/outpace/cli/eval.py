"""`outpace eval`: quality and speed on a task, every way of decoding beside the others."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.options import (
    SAMPLING,
    SHOW,
    Device,
    Drafted,
    Dtype,
    LengthName,
    RuleName,
    Target,
    TopK,
    TopP,
)
from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.decode import Decoder
    from outpace.tasks.evaluate import Evaluation
    from outpace.tasks.items import Data, Item
    from outpace.tasks.journal import Journal

TASK = "Task"
Kind = StrEnum("Kind", ["asr", "summarize", "translate", "code", "specbench", "dialog"])


def eval(
    task: Annotated[Kind, typer.Argument(help="What is done.")],
    data: Annotated[
        str,
        typer.Option(
            help="JSON lines: a file, a folder with manifest.jsonl; or a hub data set, NAME[:CONFIG[:SPLIT]]",
            rich_help_panel=TASK,
        ),
    ],
    target: Target = None,
    draft: Drafted = "lookup",
    rule: RuleName = "token",
    length: LengthName = None,
    device: Device = None,
    dtype: Dtype = None,
    sides: Annotated[
        str,
        typer.Option(
            help="Columns: plain (no draft), baseline (Transformers' assisted generation), exact (--rule), "
            "sigmoid (Wagner's approximation).",
            rich_help_panel=TASK,
        ),
    ] = "plain,baseline,exact,sigmoid",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first rows.", rich_help_panel=TASK)
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Only each so many-th row, before --limit.", rich_help_panel=TASK)
    ] = 1,
    prompt: Annotated[
        str | None,
        typer.Option(help="Instead of the task's own; {source} is the row's text.", rich_help_panel=TASK),
    ] = None,
    languages: Annotated[str, typer.Option(help="Of translate: from-to.", rich_help_panel=TASK)] = "en-de",
    language: Annotated[
        str | None, typer.Option(help="Of asr. Default: detected.", rich_help_panel=TASK)
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Of each row, for pass@k of code.", rich_help_panel=TASK)
    ] = 1,
    scale: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Of sigmoid, ±. Default: 1000 for asr, 10000 elsewhere.", rich_help_panel=TASK
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-m", min=1, help="Default: the task's.", rich_help_panel=SAMPLING),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int, typer.Option(help="Of all draws.", rich_help_panel=SAMPLING)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="JSON lines; a run that was stopped goes on. Default: eval-TASK.jsonl.",
            rich_help_panel=SHOW,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew, whatever is there.", rich_help_panel=SHOW)
    ] = False,
) -> None:
    """Do a task with every way of decoding, and print quality and speed side by side.

    Rows that cannot be used, or whose program had to be stopped, are named; the exit status is then 1.
    """
    from outpace.bench.machine import machine
    from outpace.cli.bench import bare
    from outpace.tasks.evaluate import SIDES
    from outpace.tasks.items import read
    from outpace.tasks.kinds import task_of

    wanted_sides = [one.strip() for one in sides.split(",") if one.strip()]
    unknown = [one for one in wanted_sides if one not in SIDES]
    if unknown or not wanted_sides:
        raise ValueError(f"--sides: got {sides!r}; there are {', '.join(SIDES)}")
    if samples > 1 and task is not Kind.code:
        raise ValueError("--samples: several samples of a row are for code")
    if prompt is not None and "{source}" not in prompt:
        raise ValueError("--prompt: it must say {source} where the row's text goes")
    if task is Kind.asr and (prompt is not None or max_new_tokens is not None):
        name = "--prompt" if prompt is not None else "--max-new-tokens"
        raise ValueError(f"{name}: not for asr, where Whisper's own settings hold")
    codes = tuple(languages.split("-"))
    if len(codes) != 2:
        raise ValueError(f"--languages: got {languages!r}; it must be like en-de")
    chosen = task_of(str(task), codes)
    if scale is not None:
        chosen = type(chosen)(**{**vars(chosen), "scale": scale})
    rows = read(
        data,
        speech=task is Kind.asr,
        languages=codes if task is Kind.translate else None,
        limit=limit,
        every=every,
    )
    packages(str(task))
    if length is None and temperature > 0 and draft != "none":
        length = "heuristic"  # by the clock, a run that was stopped would not go on to the same texts
    decoder, processor = models(task, target, draft, device, dtype, rule, length)
    evaluation = evaluation_of(
        decoder, processor, chosen, wanted_sides, prompt, language, samples, max_new_tokens, temperature,
        top_k, top_p, seed,
    )  # fmt: skip
    path = out or Path(f"eval-{task}.jsonl")
    header = {
        "task": str(task),
        "target": target and bare(target),
        "draft": bare(draft),
        "settings": {
            "models": decoder.describe().splitlines(),
            "max_new_tokens": None if task is Kind.asr else evaluation.wanted.max_new_tokens,
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "samples": samples, "seed": seed,
            "prompt": prompt, "language": language, "languages": languages, "scale": chosen.scale,
        },
        "every": every,
        "data": {
            "name": Path(data).name if rows.local else data, "sha256": rows.digest, "rows": len(rows.items)
        },
        "machine": machine(decoder.scorer.device),
    }  # fmt: skip
    finish(evaluation, rows, path, header, fresh)


def packages(task: str) -> None:
    """What the task is judged by, before anything big is loaded."""
    from outpace.tasks import sandbox
    from outpace.tasks.extra import needed

    if task == "code":
        sandbox.check()
    for package in {
        "asr": ("jiwer", "soundfile", "soxr"), "summarize": ("rouge_score",), "translate": ("sacrebleu",)
    }.get(task, ()):  # fmt: skip
        needed(package, "tasks")


def models(
    task: Kind,
    target: str | None,
    draft: str,
    device: str | None,
    dtype: str | None,
    rule: str,
    length: str | None,
) -> tuple[Decoder, Any]:
    """The decoder, and for speech the target's processor."""
    from outpace.cli.options import length_of, open_decoder

    if task is not Kind.asr:
        return open_decoder(target, draft, device, dtype, rule, 1.0, length), None
    from outpace.tasks.transcribe import Transcriber

    wanted = length_of(length)
    options = {} if wanted is None else {"length": wanted}
    one = Transcriber.load(
        target or "openai/whisper-base", draft, device=device, dtype=dtype, tell=note, rule=rule, **options
    )
    return one.decoder, one.processor


def evaluation_of(
    decoder: Decoder,
    processor: Any,
    task: Any,
    sides: list[str],
    prompt: str | None,
    language: str | None,
    samples: int,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> Evaluation:
    from outpace.models.seq2seq import Seq2SeqScorer
    from outpace.sampling import Sampling
    from outpace.tasks.evaluate import Evaluation, likely
    from outpace.tasks.sides import Wanted

    sampling = Sampling(temperature=temperature, top_k=top_k or 0, top_p=1.0 if top_p is None else top_p)
    wanted = Wanted(
        task,
        sampling,
        max_new_tokens or task.max_new_tokens,
        samples,
        prompt,
        language,
        likely(task) and not isinstance(decoder.scorer, Seq2SeqScorer),
    )
    found = Evaluation(decoder, processor, wanted, sides, seed)
    for name, why in found.missing.items():
        note(f"no column {name}: {why}")
    if not found.sides:
        raise ValueError("--sides: none of them can be")
    return found


def finish(evaluation: Evaluation, rows: Data, path: Path, header: dict[str, Any], fresh: bool) -> None:
    """Run what is left, and print and save the table."""
    from outpace.cli.bench import command
    from outpace.tasks import table as tables
    from outpace.tasks.journal import Journal

    with Journal(path, header, {"command": command()}, fresh) as journal:
        there = len(journal.records)
        if there:
            note(f"{path} has {there} of {len(rows.items) * len(evaluation.sides)}; going on")
        try:
            run(evaluation, rows.items, journal)
        except KeyboardInterrupt:
            note(f"{len(journal.records)} are in {path}; the same command goes on")
            raise
        found = tables.columns(evaluation.wanted.task, rows.items, journal.records, list(evaluation.sides))
    failed = tables.failures(found, rows.items)
    lines = tables.table(found)
    parts = [(header["task"], lines)]
    if header["task"] == "specbench":
        parts.append(("tokens per pass, speed over plain", tables.by_category(found)))
    names = list(evaluation.sides)
    saved = "\n".join(tables.markdown(title, names, some) for title, some in parts)
    if failed:
        saved += "\nFailed:\n\n" + "".join(f"- {one}\n" for one in failed)
    beside = Path(f"{path}.md")
    beside.write_text(saved, encoding="utf-8")
    for title, some in parts:
        show(title, names, some)
    for one in failed:
        note(f"failed: {one}")
    note(f"rows in {path}, table in {beside}")
    if failed:
        raise typer.Exit(1)


def run(evaluation: Evaluation, items: list[Item], journal: Journal) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = len(items) * len(evaluation.sides)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        line = bar.add_task("", total=total, completed=len(journal.records))

        def step(side: str, row: int) -> None:
            bar.update(line, description=f"{items[row].name}: {side}", completed=len(journal.records))

        evaluation.run(items, journal, step)


def show(title: str, sides: list[str], lines: Any) -> None:
    from rich.table import Table

    from outpace.cli.show import screen

    made = Table(title, *sides)
    for column in made.columns[1:]:
        column.justify = "right"
    for name, cells in lines:
        made.add_row(name, *cells)
    screen(sys.stdout).print(made)

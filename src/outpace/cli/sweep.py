"""``outpace bench sweep``: throughput at every number of draft tokens, beside the baseline and the theory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.checks.files import check_apart, check_out
from outpace.cli import checks
from outpace.cli.bench import bare, command
from outpace.cli.options import (
    MODELS,
    MOST_ROWS,
    PROMPTS,
    SAMPLING,
    SHOW,
    AllSeeds,
    Bias,
    Config,
    Data,
    Device,
    Dtype,
    Every,
    FrequencyPenalty,
    Limit,
    MaxNewTokens,
    MinP,
    PresencePenalty,
    PromptTexts,
    RepetitionPenalty,
    Revision,
    RuleName,
    Target,
    TopK,
    TopP,
    TrustRemoteCode,
    check_models,
    configured,
    read_prompts,
    sampling_of,
)
from outpace.cli.show import note, progress

if TYPE_CHECKING:
    from outpace.bench.forecast import Known, SweepLine
    from outpace.bench.results import Results
    from outpace.bench.runs import Run
    from outpace.bench.sweep import Sweep


def sweep(
    command_line: typer.Context,
    config: Config = None,
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            "-d",
            metavar="lookup|ngram:FILE|MODEL|random",
            help="What drafts; may be repeated. Default: the draft of --config, or lookup.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            help="Instead of models: a synthetic pair of real shapes, such as llama2-7b/1.3b.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Acceptance rate of the pair. Default: 0.8.",
                     rich_help_panel=MODELS),
    ] = None,
    rule: RuleName = "token",
    num_draft_tokens: Annotated[
        list[str] | None,
        typer.Option(
            callback=checks.num_draft_tokens,
            metavar="G|auto|heuristic",
            help="Draft tokens per step; may be repeated. Default: 0, 1, 2, 3, 5, 8 and 12 where they fit "
            "--max-new-tokens, auto, and the value of --config. 0 is always measured.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(callback=checks.number("temperature"), help="0 is greedy; may be repeated. Default: 0.",
                     rich_help_panel=SAMPLING),
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    logit_bias: Bias = None,
    max_new_tokens: MaxNewTokens = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-text.", rich_help_panel=SAMPLING)
    ] = False,
    seed: AllSeeds = 0,
    prompt: PromptTexts = None,
    data: Data = None,
    limit: Limit = None,
    every: Every = 1,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the random prompts for --pair, in tokens. Default: 128.",
                     rich_help_panel=PROMPTS),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="Batch size, B.", rich_help_panel=PROMPTS)
    ] = 1,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often the whole set of prompts is run.", rich_help_panel=PROMPTS)
    ] = 1,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Write results to this JSON file after each round.",
                     rich_help_panel=SHOW),
    ] = Path("sweep.json"),
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot time, acceptance and step time against g to this file (.svg, .png, .pdf).",
                     rich_help_panel=SHOW),
    ] = None,
) -> None:  # fmt: skip
    """Time texts with every draft, sampling and length, in turn: what each brings over plain decoding.

    Times are milliseconds of 128 tokens, without the prompt, over texts: mean,
    standard deviation, percentiles. loop ms is the time of an iteration,
    tokens per pass what it brings a text. acceptance is the share of draft
    tokens accepted, α counted the same of those that were verified.

    speedup is tokens a second over those of plain decoding in the same rounds,
    with an interval that holds it in 95 of 100 cases. predicted is the same by
    α and the times of passes, draft steps and verification; error says by how
    much it is off. thm 3.8 is that of Leviathan et al. 2023, from α and c
    alone; c is the time of a draft step over that of a plain iteration.

    Ctrl-C ends it; the table and the file are then of the rounds so far.
    """
    if plot is not None:
        from outpace.bench.curves import backend

        backend(plot)  # what is missing is said before anything is measured
    check_out("--out", out)
    check_apart(("--out", out), ("--plot", plot))
    drafts = list(dict.fromkeys(draft or ["lookup"]))
    if len({bare(one) for one in drafts}) < len(drafts):
        raise ValueError("--draft: two have the same name, but for their folders")
    questions = None
    if pair is None:
        if "none" in drafts:
            raise ValueError("--draft: none is plain decoding, which is always there as g = 0; name a draft")
        check_models(target, drafts)
        questions = read_prompts(prompt, data, limit, every)
    from outpace.bench.machine import machine
    from outpace.bench.results import Results
    from outpace.bench.sweep import Sweep
    from outpace.cli import lineup
    from outpace.cli.drafts import fitting, line_up
    from outpace.models.hub import DEFAULT
    from outpace.sampling import SamplingParams

    own = num_draft_tokens is None or configured(command_line, "num_draft_tokens")
    lengths = lengths_of(num_draft_tokens or (), max_new_tokens, own)
    drawn = sampling_of(
        logit_bias, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
    ) or SamplingParams()  # fmt: skip
    samplings = [replace(drawn, temperature=one) for one in temperature or [0.0]]
    if questions is None:
        assert pair is not None
        lineup.refuse_with_pair(target=target, draft=draft, prompt=prompt, data=data)
        alpha = lineup.ALPHA if alpha is None else alpha
        decoders, prompts = lineup.synthetic(
            pair, alpha, rule, device, dtype, limit or lineup.SYNTHETIC, context or lineup.CONTEXT
        )
    else:
        lineup.refuse_without_pair(alpha=alpha, context=context)
        plain, decoders = line_up(
            target, drafts, device, dtype, rule=rule,
            trust_remote_code=trust_remote_code, revision=revision,
        )  # fmt: skip
        prompts = [one.ids for one in fitting(plain, questions.to(plain.tokenizer))]
    made = Sweep(
        decoders, samplings, lengths, prompts,
        tokens=max_new_tokens, batch=batch, repeats=repeats, seed=seed, ignore_eos=ignore_eos,
    )  # fmt: skip
    about: dict[str, Any] = {
        "command": command(),
        "machine": machine(next(iter(decoders.values())).scorer.device),
        "target": pair or bare(target or DEFAULT),
        "settings": {
            "models": {name: one.describe().splitlines() for name, one in decoders.items()},
            "alpha": alpha,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": ignore_eos,
            "repeats": repeats,
            "seed": seed,
            "sampling": {k: v for k, v in asdict(drawn).items() if k not in ("temperature", "processors")},
        },
        "data": None if questions is None else questions.about,
        "prompts": len(prompts),
        "batch": batch,
        "rounds": 0,
        "of": made.total,
        "figures": [],
    }
    finish(made, Results(out, "sweep", about), out, plot)


def lengths_of(given: Sequence[str], tokens: int, own: bool) -> list[str]:
    """Return the numbers of draft tokens and policies to measure.

    Args:
        given: Values of the flag.
        tokens: New tokens of a text; default values that need longer texts are left out.
        own: Whether to include the default values.
    """
    from outpace.bench.runs import PLAIN
    from outpace.bench.sweep import LENGTHS, check_lengths, least_tokens

    check_lengths([PLAIN], tokens)
    lengths = [str(int(one)) if one.isdecimal() else one for one in given]  # 05 is 5
    if own:
        long = [one for one in LENGTHS if least_tokens(one) > tokens]
        if long:
            note(
                f"length {', '.join(long)}: left out, as texts of {tokens} tokens are too short; "
                f"--max-new-tokens {max(map(least_tokens, long))} is enough"
            )
        lengths = [*(one for one in LENGTHS if one not in long), *lengths]
    check_lengths(lengths, tokens)
    return lengths


def finish(made: Sweep, results: Results, out: Path, plot: Path | None) -> None:
    """Measure, show and save; if interrupted, show and save the rounds so far."""
    from outpace.bench.forecast import figures
    from outpace.checks.errors import counted

    runs: list[Run] = []
    parts: Known = {}
    stopped: BaseException | None = None
    how = ""
    try:
        measure(made, runs, parts, results)
    except KeyboardInterrupt:
        stopped, how = SystemExit(130), "interrupted"
    except Exception as error:
        stopped, how = error, "failed"
    progress("")
    rounds = len(runs) // len(made.blocks[0])
    found = figures(runs, parts) if rounds else []
    if how == "interrupted" and parts:
        keep(results, found, parts, rounds)
    if stopped is None:
        if not found:
            raise ValueError(
                "max_new_tokens: all texts ended before anything could be timed; try --ignore-eos"
            )
        results.done()
    if found:
        from outpace.cli.lines import show

        show(found)
        if plot is not None:
            from outpace.bench.loops import draw

            draw(found, plot)
            note(f"picture in {plot}")
    if stopped is None:
        if len(found) < len(made.cells):
            cells = counted(len(made.cells) - len(found), "cell")
            note(f"of {cells} all texts ended before anything could be timed")
        note(f"figures in {out}")
        return
    if rounds:
        kept = "what is shown is of those" + (f", and in {out}" if results.kept else "")
    else:
        kept = f"times of parts are in {out}" if results.kept else "nothing was kept"
    note(f"{how} after {rounds} of {made.total} rounds: {kept}")
    raise stopped


def keep(results: Results, found: Sequence[SweepLine], parts: Known, rounds: int) -> None:
    """Save the results so far."""
    timed = [
        {"draft": draft, "temperature": sampling.temperature, **asdict(one)}
        for (draft, sampling), one in parts.items()
    ]
    results.put(rounds=rounds, figures=[asdict(one) for one in found], parts=timed)


def measure(made: Sweep, runs: list[Run], parts: Known, results: Results) -> None:
    """Time the parts of a step, then run all rounds, with a progress bar on a terminal.

    Results are saved after each round.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from outpace.bench.forecast import figures
    from outpace.bench.sweep import timed

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        line = bar.add_task("", total=made.total)

        def tell(said: str) -> None:
            if bar.disable:
                progress(said)
            bar.update(line, description=said)

        timed(made, parts, tell)
        keep(results, [], parts, 0)
        for count, one in enumerate(made.rounds(tell), 1):
            runs += one
            keep(results, figures(runs, parts), parts, count)
            bar.update(line, completed=count)

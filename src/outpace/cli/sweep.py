"""``outpace bench sweep``: throughput at every number of draft tokens, beside the baseline and the theory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.checks.files import check_distinct, check_output
from outpace.cli import checks
from outpace.cli.bench import bare, command
from outpace.cli.config import set_by_config
from outpace.cli.models import check_models
from outpace.cli.options import (
    MAX_SEQUENCES,
    MODELS,
    PROMPTS,
    SAMPLING,
    AllSeeds,
    Bias,
    Config,
    Data,
    Device,
    DraftNames,
    Dtype,
    Every,
    FrequencyPenalty,
    IgnoreEos,
    Limit,
    MaxNewTokens,
    MinP,
    Plot,
    PresencePenalty,
    PromptTexts,
    RepetitionPenalty,
    ResultFile,
    Revision,
    RuleName,
    Target,
    TopK,
    TopP,
    TrustRemoteCode,
    read_prompts,
    sampling_of,
)
from outpace.cli.show import note, progress, screen

if TYPE_CHECKING:
    from outpace.bench.forecast import SweepLine, TimedParts
    from outpace.bench.results import Results
    from outpace.bench.runs import Run
    from outpace.bench.sweep import Sweep


def sweep(
    command_line: typer.Context,
    config: Config = None,
    target: Target = None,
    draft: DraftNames = None,
    pair: Annotated[
        str | None,
        typer.Option(
            help="Instead of models: a synthetic pair with real layer sizes, such as llama2-7b/1.3b.",
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
            help="Draft tokens per step; may be repeated. Default: auto, the value of --config, and 0, 1, 2, "
            "3, 5, 8, 12. Numbers too large for --max-new-tokens are left out. 0 is always measured.",
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
    ignore_eos: IgnoreEos = False,
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
        int, typer.Option(min=1, max=MAX_SEQUENCES, help="Batch size, B.", rich_help_panel=PROMPTS)
    ] = 1,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often the whole set of prompts is run.", rich_help_panel=PROMPTS)
    ] = 1,
    out: ResultFile = Path("sweep.json"),
    plot: Plot = None,
) -> None:  # fmt: skip
    """Measure the speedup of every draft, temperature and number of draft tokens over the baseline.

    Columns of the table:

    - "mean", "±", "P50", "P90", "P99": latency of 128 tokens in ms, without the
      prompt; mean, standard deviation and percentiles over texts
    - "loop ms": time of a step
    - "tokens per pass": tokens that a step adds to a sequence
    - "acceptance": accepted draft tokens divided by all draft tokens
    - "α counted": the same without the draft tokens after a rejected one
    - "speedup": throughput divided by that of the baseline in the same rounds,
      with a 95 % interval
    - "predicted", "error": speedup computed from α and the times of the parts of a
      step, and its difference from the measured speedup
    - "c": time to draft one token divided by the time of a baseline step
    - "thm 3.8": speedup that Leviathan et al. 2023 predict from α and c alone

    --plot shows time, acceptance and step time against g.

    Ctrl-C ends it with the results of the rounds so far.
    """
    if plot is not None:
        from outpace.bench.curves import backend

        backend(plot)  # fails before anything is measured
    check_output("--out", out)
    check_distinct(("--out", out), ("--plot", plot))
    drafts = list(dict.fromkeys(draft or ["lookup"]))
    if len({bare(one) for one in drafts}) < len(drafts):
        raise ValueError("--draft: two have the same name in different folders; name only one of them")
    prompt_set = None
    if pair is None:
        if "none" in drafts:
            raise ValueError("--draft: none is the baseline, which is always measured as g = 0; name a draft")
        check_models(target, drafts)
        prompt_set = read_prompts(prompt, data, limit, every)
    from outpace.bench.machine import machine
    from outpace.bench.results import Results
    from outpace.bench.sweep import Sweep
    from outpace.cli import synthetic_pair
    from outpace.cli.drafts import load_decoders, select_fitting
    from outpace.models.default import DEFAULT
    from outpace.sampling import SamplingParams

    with_defaults = num_draft_tokens is None or set_by_config(command_line, "num_draft_tokens")
    draft_lengths = select_draft_lengths(num_draft_tokens or (), max_new_tokens, with_defaults)
    base_sampling = sampling_of(
        logit_bias, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
    ) or SamplingParams()  # fmt: skip
    samplings = [replace(base_sampling, temperature=one) for one in temperature or [0.0]]
    if prompt_set is None:
        assert pair is not None
        synthetic_pair.refuse_with_pair(target=target, draft=draft, prompt=prompt, data=data)
        alpha = synthetic_pair.ALPHA if alpha is None else alpha
        decoders, prompts = synthetic_pair.load_pair(
            pair,
            alpha,
            rule,
            device,
            dtype,
            limit or synthetic_pair.NUM_PROMPTS,
            context or synthetic_pair.CONTEXT,
        )
    else:
        synthetic_pair.refuse_without_pair(alpha=alpha, context=context)
        baseline, decoders = load_decoders(
            target, drafts, device, dtype, rule=rule,
            trust_remote_code=trust_remote_code, revision=revision,
        )  # fmt: skip
        prompts = [one.ids for one in select_fitting(baseline, prompt_set.to(baseline.tokenizer))]
    measurement = Sweep(
        decoders, samplings, draft_lengths, prompts,
        max_new_tokens=max_new_tokens, batch=batch, repeats=repeats, seed=seed, ignore_eos=ignore_eos,
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
            "sampling": {
                k: v for k, v in asdict(base_sampling).items() if k not in ("temperature", "processors")
            },
        },
        "data": None if prompt_set is None else prompt_set.about,
        "prompts": len(prompts),
        "batch": batch,
        "rounds": 0,
        "of": measurement.total,
        "figures": [],
    }
    finish(measurement, Results(out, "sweep", about), out, plot)


def select_draft_lengths(values: Sequence[str], max_new_tokens: int, with_defaults: bool) -> list[str]:
    """Return the numbers of draft tokens and policies to measure.

    Args:
        values: Values of the flag.
        max_new_tokens: New tokens of a text. Default values that need longer texts are left out.
        with_defaults: Whether to include the default values.
    """
    from outpace.bench.runs import BASELINE
    from outpace.bench.sweep import DRAFT_LENGTHS, check_draft_lengths, least_tokens

    check_draft_lengths([BASELINE], max_new_tokens)
    draft_lengths = [str(int(one)) if one.isdecimal() else one for one in values]  # 05 is 5
    if with_defaults:
        too_long = [one for one in DRAFT_LENGTHS if least_tokens(one) > max_new_tokens]
        if too_long:
            note(
                f"num_draft_tokens {', '.join(too_long)}: left out, as texts of {max_new_tokens} tokens are "
                f"too short; --max-new-tokens {max(map(least_tokens, too_long))} is enough"
            )
        draft_lengths = [*(one for one in DRAFT_LENGTHS if one not in too_long), *draft_lengths]
    check_draft_lengths(draft_lengths, max_new_tokens)
    return draft_lengths


def finish(measurement: Sweep, results: Results, out: Path, plot: Path | None) -> None:
    """Measure, show and save; if interrupted, show and save the rounds so far."""
    from outpace.bench.forecast import figures
    from outpace.checks.errors import counted

    runs: list[Run] = []
    parts: TimedParts = {}
    stopped: BaseException | None = None
    ending = ""
    try:
        measure(measurement, runs, parts, results)
    except KeyboardInterrupt:
        stopped, ending = SystemExit(130), "interrupted"
    except Exception as error:
        stopped, ending = error, "failed"
    progress("")
    rounds = len(runs) // len(measurement.blocks[0])
    found = figures(runs, parts) if rounds else []
    if ending == "interrupted" and parts:
        save(results, found, parts, rounds)
    if stopped is None:
        if not found:
            raise ValueError(
                "max_new_tokens: all texts ended before anything could be timed; try --ignore-eos"
            )
        results.done()
    if found:
        show_tables(found)
        if plot is not None:
            from outpace.bench.sweep_plot import save_plot

            save_plot(found, plot)
            note(f"plot in {plot}")
    if stopped is None:
        if len(found) < len(measurement.cells):
            cells = counted(len(measurement.cells) - len(found), "cell")
            note(f"{cells} left out: all texts ended before anything could be timed")
        note(f"results in {out}")
        return
    if rounds:
        saved = "these are their results" + (f", also in {out}" if results.saved else "")
    else:
        saved = f"times of parts are in {out}" if results.saved else "nothing was saved"
    note(f"{ending} after {rounds} of {measurement.total} rounds: {saved}")
    raise stopped


def show_tables(figures: Sequence[SweepLine]) -> None:
    """Print two tables on stdout for each draft and sampling.

    One has times, as in Chen et al. 2023, Figure 1. The other has measured and predicted speedups, as in
    Leviathan et al. 2023, Table 4.
    """
    from outpace.bench.forecast import SPAN
    from outpace.bench.sweep_plot import kind_of, name_of
    from outpace.checks.errors import counted
    from outpace.cli import tables
    from outpace.report.columns import SWEEP_SPEEDS, SWEEP_TIMES

    console = screen(sys.stdout)
    for kind in dict.fromkeys(map(kind_of, figures)):
        lines, name = [asdict(one) for one in figures if kind_of(one) == kind], name_of(kind)
        titles = (
            f"{name}: ms of {SPAN} tokens, {counted(lines[0]['texts'], 'text')}",
            f"{name}: speedup over the baseline",
        )
        for title, shown in zip(titles, (SWEEP_TIMES, SWEEP_SPEEDS), strict=True):
            rows = [[cell(one) for cell in shown.values()] for one in lines]
            tables.show(console, title, tables.columns(list(shown), rows))


def save(results: Results, found: Sequence[SweepLine], parts: TimedParts, rounds: int) -> None:
    """Save the results so far."""
    timed = [
        {"draft": draft, "temperature": sampling.temperature, **asdict(one)}
        for (draft, sampling), one in parts.items()
    ]
    results.put(rounds=rounds, figures=[asdict(one) for one in found], parts=timed)


def measure(measurement: Sweep, runs: list[Run], parts: TimedParts, results: Results) -> None:
    """Time the parts of a step, then run all rounds, with a progress bar on a terminal.

    Results are saved after each round.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from outpace.bench.forecast import figures
    from outpace.bench.sweep import time_parts

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        line = bar.add_task("", total=measurement.total)

        def tell(message: str) -> None:
            if bar.disable:
                progress(message)
            bar.update(line, description=message)

        time_parts(measurement, parts, tell)
        save(results, [], parts, 0)
        for count, one in enumerate(measurement.rounds(tell), 1):
            runs += one
            save(results, figures(runs, parts), parts, count)
            bar.update(line, completed=count)

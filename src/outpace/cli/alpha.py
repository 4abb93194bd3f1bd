"""``outpace bench alpha``: acceptance rates, costs of the parts of a step, and whether speculation pays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.checks.files import check_out
from outpace.cli import checks
from outpace.cli.options import (
    MODELS,
    MOST_ROWS,
    PROMPTS,
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
    MinP,
    PresencePenalty,
    PromptTexts,
    RepetitionPenalty,
    Revision,
    Target,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    check_models,
    read_prompts,
    sampling_of,
)
from outpace.cli.show import note, progress

if TYPE_CHECKING:
    from outpace.bench.measure import Measurement

COSTS = "Costs"
LENIENCE = (1.0, 0.5, 0.3, 0.1)


def alpha(
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
    lenience: Annotated[
        list[float] | None,
        typer.Option(
            callback=checks.number("lenience"),
            help="Lenience values to evaluate; may be repeated. Default: 1, 0.5, 0.3, 0.1.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    prompt: PromptTexts = None,
    data: Data = None,
    limit: Limit = None,
    every: Every = 1,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            "-m",
            min=1,
            help="Most tokens to generate per prompt.",
            rich_help_panel=PROMPTS,
        ),
    ] = 64,
    within: Annotated[
        float | None,
        typer.Option(
            help="Half the width that α's intervals may have; if one is wider, the exit status is 1.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Confidence of the intervals.", rich_help_panel=PROMPTS)
    ] = 0.95,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    logit_bias: Bias = None,
    seed: AllSeeds = 0,
    num_draft_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Draft tokens per step in the runs that are counted.", rich_help_panel=COSTS
        ),
    ] = 5,
    passes: Annotated[
        list[int] | None,
        typer.Option(
            "--pass",
            min=1,
            help="Tokens of a timed pass; may be repeated. Default: 1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17.",
            rich_help_panel=COSTS,
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=MOST_ROWS,
            help="Batch sizes, B; may be repeated. Default: 1, 4, 8.",
            rich_help_panel=COSTS,
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Context length of a timed pass, in tokens.", rich_help_panel=COSTS)
    ] = 128,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Write results to this JSON file, updated after each part.",
            rich_help_panel=SHOW,
        ),
    ] = Path("alpha.json"),
) -> None:
    """Measure α and what it is worth, with your models and your prompts.

    The target writes texts by itself, and every drafter proposes at every token: α is the mean
    of Σ min(p, q). Real runs are counted beside it. Then passes, steps and verification are timed, and the
    length that is fastest by all that is named.

    Of a --config, target, draft, dtype, device and revision count; lengths are what is measured.

    Ctrl-C ends it with what there is, in --out, too. Exit status: 1 if α is known less well than --within
    asks.
    """
    names = list(dict.fromkeys(draft or ["lookup"]))
    values = list(dict.fromkeys(lenience or LENIENCE))
    check(target, names, within, confidence, out)
    questions = read_prompts(prompt, data, limit, every)
    sampling = sampling_of(
        logit_bias, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
    )  # fmt: skip
    from outpace.bench import cost
    from outpace.bench.machine import machine
    from outpace.bench.measure import Measurement, MeasurePlan
    from outpace.bench.results import Results
    from outpace.cli.bench import bare, command
    from outpace.cli.drafts import fitting, line_up
    from outpace.decoder import WithModel
    from outpace.models.hub import DEFAULT
    from outpace.sampling import from_generation_config

    plain, decoders = line_up(
        target, names, device, dtype, lenience=max(values), g=num_draft_tokens,
        trust_remote_code=trust_remote_code, revision=revision,
    )  # fmt: skip
    texts = fitting(plain, questions.to(plain.tokenizer))
    if sampling is None:
        sampling = from_generation_config(plain.scorer.generation_config)
    # A pass over a single token is what every other is compared with.
    lengths = sorted({1, *(passes or cost.LENGTHS)})
    plan = MeasurePlan(
        sampling, max_new_tokens, values, num_draft_tokens, lengths,
        sorted(set(batch or cost.BATCHES)), context, confidence, seed,
    )  # fmt: skip
    cost.check_room(plain.scorer, context, max(lengths))
    for one in decoders.values():
        if isinstance(one.drafter, WithModel):
            cost.check_room(one.drafter.scorer, context, cost.STEP_ROOM, "the draft's ")
    about = {
        "command": command(),
        "machine": machine(plain.scorer.device),
        "target": bare(target or DEFAULT),
        "models": plain.describe().splitlines()[:1],
        "sampling": {k: v for k, v in dataclasses.asdict(sampling).items() if k != "processors"},
        "data": questions.about,
        **{k: getattr(plan, k) for k in ("confidence", "g", "context", "seed")},
    }
    measurement = Measurement(plain, decoders, texts, plan, Results(out, "alpha", about), tell=progress)
    finish(measurement, within, out)


def check(
    target: str | None,
    names: list[str],
    within: float | None,
    confidence: float,
    out: Path,
) -> None:
    """Refuse flags that do not fit, before anything big is loaded.

    Raises:
        ValueError: A flag does not fit.
    """
    if within is not None and not 0 < within < 1:
        raise ValueError(f"--within: got {within:g}; it must lie between 0 and 1, as α does")
    if not 0 < confidence < 1:
        raise ValueError(f"--confidence: got {confidence:g}; it must lie between 0 and 1")
    check_out("--out", out)
    if "none" in names:
        raise ValueError("--draft: none drafts nothing, so there is nothing to measure; name a draft")
    check_models(target, names)


def finish(measurement: Measurement, within: float | None, out: Path) -> None:
    """Measure, and print the results, even if the measurement was interrupted."""
    from outpace.cli.measured import show

    content = measurement.results.content
    try:
        measurement.run()
    except (KeyboardInterrupt, Exception):
        progress("")
        if "drafts" in content:
            show(content)
            kept = f", and so has {out}" if measurement.results.kept else ""
            note(f"cut short: the tables have what there is{kept}")
        else:
            note("cut short: nothing was measured yet, and nothing was kept")
        raise
    progress("")
    show(content)
    note(f"all of it in {out}")
    if len(measurement.walked) < 2:
        note("α of a single prompt has no interval: give at least 2")
    wide = [] if within is None else measurement.wide(within)
    for line in wide:
        note(line)
    if wide:
        raise typer.Exit(1)

"""``outpace bench alpha``: acceptance rates, costs of the parts of a step, and whether speculation pays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.checks.files import check_output
from outpace.cli import checks
from outpace.cli.models import check_models
from outpace.cli.options import (
    MAX_SEQUENCES,
    MODELS,
    PROMPTS,
    AllSeeds,
    Bias,
    Config,
    Data,
    Device,
    DraftNames,
    Dtype,
    Every,
    FrequencyPenalty,
    Limit,
    MaxNewTokens,
    MinP,
    PresencePenalty,
    PromptTexts,
    RepetitionPenalty,
    ResultFile,
    Revision,
    Target,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
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
    draft: DraftNames = None,
    lenience: Annotated[
        list[float] | None,
        typer.Option(
            callback=checks.number("lenience"),
            help="Lenience values to evaluate; may be repeated. Below 1, rule token accepts more draft "
            "tokens, and the output distribution changes. Default: 1, 0.5, 0.3, 0.1.",
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
    max_new_tokens: MaxNewTokens = 64,
    within: Annotated[
        float | None,
        typer.Option(
            help="Precision of α, such as 0.03: if an interval is wider than ± this, the exit status is 1.",
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
            max=MAX_SEQUENCES,
            help="Batch sizes, B; may be repeated. Default: 1, 4, 8.",
            rich_help_panel=COSTS,
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Context length of a timed pass, in tokens.", rich_help_panel=COSTS)
    ] = 128,
    out: ResultFile = Path("alpha.json"),
) -> None:
    """Measure acceptance and costs with your models and prompts; predict the best number of draft tokens.

    The target generates texts without speculation. Each drafter proposes a token
    at every position. p is the target's distribution there, and q is the
    drafter's. α, the acceptance rate, is the mean of Σ min(p, q).

    Then accepted draft tokens of real runs are counted. Target passes, draft
    steps and verification are timed. The last lines name the g with the best
    predicted speedup. g is the number of draft tokens per step.

    From --config, it uses target, draft, dtype, device and revision, but not
    num_draft_tokens.

    Ctrl-C ends it with the results so far, which are also in --out. Exit status:
    1 if an interval of α is wider than ± --within.
    """
    names = list(dict.fromkeys(draft or ["lookup"]))
    values = list(dict.fromkeys(lenience or LENIENCE))
    check(target, names, within, confidence, out)
    prompts = read_prompts(prompt, data, limit, every)
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
    from outpace.cli.drafts import load_decoders, select_fitting
    from outpace.models.default import DEFAULT
    from outpace.sampling import from_generation_config

    baseline, decoders = load_decoders(
        target, names, device, dtype, lenience=max(values), num_draft_tokens=num_draft_tokens,
        trust_remote_code=trust_remote_code, revision=revision,
    )  # fmt: skip
    tokenized = select_fitting(baseline, prompts.to(baseline.tokenizer))
    if sampling is None:
        sampling = from_generation_config(baseline.scorer.generation_config)
    # Other passes are compared with one over a single token.
    pass_sizes = sorted({1, *(passes or cost.PASS_SIZES)})
    plan = MeasurePlan(
        sampling, max_new_tokens, values, num_draft_tokens, pass_sizes,
        sorted(set(batch or cost.BATCHES)), context, confidence, seed,
    )  # fmt: skip
    cost.check_context(baseline.scorer, context, max(pass_sizes))
    for decoder in decoders.values():
        if decoder.drafter is not None and decoder.drafter.scorer is not None:
            cost.check_context(decoder.drafter.scorer, context, cost.DRAFTING_TOKENS, "the draft's ")
    about = {
        "command": command(),
        "machine": machine(baseline.scorer.device),
        "target": bare(target or DEFAULT),
        "models": baseline.describe().splitlines()[:1],
        "sampling": {k: v for k, v in dataclasses.asdict(sampling).items() if k != "processors"},
        "data": prompts.about,
        **{k: getattr(plan, k) for k in ("confidence", "g", "context", "seed")},
    }
    measurement = Measurement(
        baseline, decoders, tokenized, plan, Results(out, "alpha", about), tell=progress
    )
    finish(measurement, within, out)


def check(
    target: str | None,
    names: list[str],
    within: float | None,
    confidence: float,
    out: Path,
) -> None:
    """Refuse wrong flags before PyTorch is imported.

    Raises:
        ValueError: A flag is wrong.
    """
    if within is not None and not 0 < within < 1:
        raise ValueError(f"--within: got {within:g}; it must lie between 0 and 1, as α does")
    if not 0 < confidence < 1:
        raise ValueError(f"--confidence: got {confidence:g}; it must lie between 0 and 1")
    check_output("--out", out)
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
            also = f", also in {out}" if measurement.results.saved else ""
            note(f"stopped early: these are the results so far{also}")
        else:
            note("stopped early: nothing was measured yet, and nothing was saved")
        raise
    progress("")
    show(content)
    note(f"results in {out}")
    if len(measurement.texts) < 2:
        note("α of a single prompt has no interval; give at least 2")
    wide = [] if within is None else measurement.wide(within)
    for line in wide:
        note(line)
    if wide:
        raise typer.Exit(1)

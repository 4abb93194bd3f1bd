"""``outpace tune``: measure drafters and numbers of draft tokens, and recommend the fastest."""

from __future__ import annotations

import dataclasses
import shlex
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
    SHOW,
    AllSeeds,
    Bias,
    Config,
    Data,
    Device,
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
    read_prompts,
    sampling_of,
)
from outpace.cli.show import note, progress

if TYPE_CHECKING:
    from outpace.cli.tuned import ModelNames
    from outpace.tune.tuning import Tuning

DRAFTS = ("lookup", "ngram", "none")
BATCHES = (1, 4, 8)


def tune(
    command_line: typer.Context,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[DRAFT]...", help="More drafters, as after --drafts.")
    ] = None,
    config: Config = None,
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--drafts",
            "--draft",
            "-d",
            metavar="lookup|ngram|ngram:FILE|MODEL|none",
            help="Drafters to compare. Give several after one flag (--drafts lookup MODEL), or repeat the "
            "flag. ngram is a table of the target's own texts. Default: lookup ngram none, and the draft of "
            "--config. The baseline is always measured.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    device: Device = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            callback=checks.dtype,
            help="float32, bfloat16, float16; may be repeated to compare. Default: what suits the device.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    budget: Annotated[
        float, typer.Option(help="Time limit in seconds, loading included.", rich_help_panel=PROMPTS)
    ] = 300.0,
    prompt: PromptTexts = None,
    data: Data = None,
    limit: Limit = None,
    every: Every = 1,
    # From 8: shorter texts are not enough to measure acceptance and time.
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-m", min=8, help="Largest number of tokens to generate per prompt.",
                     rich_help_panel=PROMPTS),
    ] = 64,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=MAX_SEQUENCES,
                     help="Batch sizes to examine; may be repeated. Default: 1, 4, 8.",
                     rich_help_panel=PROMPTS),
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    logit_bias: Bias = None,
    seed: AllSeeds = 0,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Write the configuration to this file.", rich_help_panel=SHOW),
    ] = Path("outpace.toml"),
    results: Annotated[
        Path | None,
        typer.Option(help="Write all results to this JSON file. Default: outpace-tune.json beside the "
                     "configuration.", rich_help_panel=SHOW),
    ] = None,
) -> None:  # fmt: skip
    """Find the fastest drafter and draft length, or say that speculation does not pay.

    The command times forward passes of the target, and measures the acceptance
    rate of each drafter on a few texts. Candidates that may pay then generate
    whole texts, in turn with the baseline, which does not speculate.

    The column "expected" is the speedup computed from acceptance and costs. The
    column "verified" is the measured speedup with its 95 % interval. A candidate
    is recommended only if its whole interval is above 1.

    From --config, it uses target, draft, dtype, device and revision. The draft is
    added to the drafters.

    Ctrl-C ends it with the results so far. Exit status: 1 if there was no time for
    a result; no configuration is written then.
    """
    from outpace.tune.budget import Budget

    time_budget = Budget(budget)
    results_file = results or out.parent / "outpace-tune.json"
    drafts = [*(draft or ()), *(more or ())]
    if not more and set_by_config(command_line, "draft"):
        drafts = [*DRAFTS, *drafts]
    names = [name for name in dict.fromkeys(drafts or DRAFTS) if name != "none"]
    dtypes: list[str | None] = list(dict.fromkeys(dtype or ())) or [None]
    check(target, names, out, results_file)
    questions = read_prompts(prompt, data, limit, every)
    check_devices(names, dtypes, device)
    sampling = sampling_of(
        logit_bias, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
    )  # fmt: skip
    from outpace.bench.machine import machine
    from outpace.bench.results import Results
    from outpace.cli.drafts import load_decoders, select_fitting
    from outpace.cli.tuned import ModelNames
    from outpace.models.default import DEFAULT
    from outpace.sampling import from_generation_config
    from outpace.tune.costs import DecoderSet
    from outpace.tune.tuning import TunePlan, Tuning

    loaded, decoder_sets = [name for name in names if name != "ngram"], []
    for one in dtypes:
        baseline, by_draft = load_decoders(
            target, loaded, device, one, trust_remote_code=trust_remote_code, revision=revision
        )
        decoder_sets.append(DecoderSet(str(baseline.scorer.dtype).removeprefix("torch."), baseline, by_draft))
    baseline = decoder_sets[0].baseline
    prompts = select_fitting(baseline, questions.to(baseline.tokenizer))
    sampling = sampling or from_generation_config(baseline.scorer.generation_config)
    about: dict[str, Any] = {
        "command": command(),
        "machine": machine(baseline.scorer.device),
        "target": bare(target or DEFAULT),
        "models": baseline.describe().splitlines()[:1],
        "sampling": {k: v for k, v in dataclasses.asdict(sampling).items() if k != "processors"},
        "data": questions.about,
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "budget_seconds": budget,
        "seed": seed,
    }
    plan = TunePlan(sampling, max_new_tokens, batch or BATCHES, seed)
    saved = Results(results_file, "tune", about)
    tuning = Tuning(decoder_sets, prompts, plan, time_budget, saved, progress, fit_ngram="ngram" in names)
    draft_names = dict(zip(decoder_sets[0].by_draft, loaded, strict=True))
    model_names = ModelNames(
        target or DEFAULT, draft_names, ngram_file(out), str(baseline.scorer.device), revision
    )
    finish(tuning, model_names, out, results_file)


def ngram_file(out: Path) -> Path:
    """Return the file of the n-gram table, beside the configuration that names it."""
    return out.with_suffix(".ngram.safetensors")


def check(target: str | None, names: list[str], out: Path, results: Path) -> None:
    """Refuse wrong flags before PyTorch is imported.

    Raises:
        ValueError: A flag is wrong.
    """
    for flag, path in (("--out", out), ("--results", results)):
        check_output(flag, path)
    check_distinct(("--out", out), ("--results", results))
    if "ngram" in names:
        check_output("--out", ngram_file(out))
        check_distinct(("the n-gram table", ngram_file(out)), ("--results", results))
    if "random" in names:
        raise ValueError("--drafts: random drafts never pay; `outpace bench alpha` measures them")
    if len({bare(name) for name in names}) < len(names):
        raise ValueError("--drafts: two have the same name in different folders; name only one of them")
    check_models(target, [name for name in names if name != "ngram"])


def check_devices(names: list[str], dtypes: list[str | None], device: str | None) -> None:
    """Refuse drafts, devices and dtypes that do not exist, before a model is loaded."""
    from outpace.loading import check_draft_name
    from outpace.models.hub import place_of, precision_of

    for name in names:
        if name != "ngram":
            check_draft_name(name)
    place = place_of(device)
    for one in dtypes:
        precision_of(one, place)
    if len(dtypes) > 1 and place.type == "cuda":
        raise ValueError("--dtype: on CUDA only one at a time; run the command once for each")


def finish(tuning: Tuning, names: ModelNames, out: Path, results: Path) -> None:
    """Measure, show and save; if interrupted, show and save the results so far."""
    from outpace.cli.tuned import save, show

    stopped: BaseException | None = None
    how = ""
    try:
        tuning.run()
    except KeyboardInterrupt:
        stopped, how = SystemExit(130), "interrupted"
    except Exception as error:
        stopped, how = error, "failed"
    progress("")
    if stopped is not None and not tuning.costs.passes:
        note(f"{how}: nothing was measured yet, and nothing was saved")
        raise stopped
    findings = tuning.findings
    if stopped is not None:
        findings.unmeasured_reason = (
            f"it {'was ' if how == 'interrupted' else ''}{how} before whole texts were measured"
        )
    decided = findings.undecided_reason() is None
    writes_config = decided and (stopped is None or not findings.recommendation.candidate.is_baseline)
    try:
        save(tuning, names, out if writes_config else None)
    except Exception as error:
        stopped, how, writes_config = stopped or error, how or "failed", False
    show(tuning.results.content)
    spent, budget = tuning.budget.spent, tuning.budget.seconds
    if writes_config:
        note(f"configuration in {out}: outpace generate --config {shlex.quote(str(out))}")
    no_config = "" if writes_config else ", and no configuration was written"
    if stopped is not None:
        also = f", also in {results}" if tuning.results.saved else ""
        note(f"{how} after {spent:.0f} s: these are the results so far{also}{no_config}")
        raise stopped
    if not decided:
        note(f"results in {results}, after {spent:.0f} of {budget:g} s{no_config}")
        raise typer.Exit(1)
    tuning.results.done()
    note(f"results in {results}, after {spent:.0f} of {budget:g} s")

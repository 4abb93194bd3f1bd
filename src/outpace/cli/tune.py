"""``outpace tune``: choose a draft and num_draft_tokens, or no speculation, by measuring."""

from __future__ import annotations

import dataclasses
import shlex
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
    check_models,
    configured,
    read_prompts,
    sampling_of,
)
from outpace.cli.show import note, progress

if TYPE_CHECKING:
    from outpace.cli.tuned import Names
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
            help="What may draft: --drafts A B lookup, or repeat it. ngram is a table of what the target "
            "itself writes. Default: lookup ngram none, and the draft of --config. The baseline is always "
            "measured.",
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
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-m", min=8, help="Most tokens to generate per prompt.",
                     rich_help_panel=PROMPTS),
    ] = 64,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=MOST_ROWS, help="Batch sizes to examine; may be repeated. Default: 1, 4, 8.",
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
    """Find what to run: measure drafts and lengths, name the fastest, or say that none pays.

    Passes are timed, drafters propose at every token of a few
    texts of the target, and what may pay by that then writes whole texts in
    turn with plain decoding. expected is the speed by acceptance and costs,
    verified the one that was measured, with an interval that holds it in 95 of
    100 cases. Nothing is recommended that is not surely faster.

    Of a --config, target, draft, dtype, device and revision count; the draft is
    one more to measure.

    Ctrl-C ends it with what there is. Exit status: 1 if there was no time to
    find anything out; no configuration is written then.
    """
    from outpace.tune.budget import Budget

    time = Budget(budget)
    kept = results or out.parent / "outpace-tune.json"
    given = [*(draft or ()), *(more or ())]
    if not more and configured(command_line, "draft"):
        given = [*DRAFTS, *given]
    names = [one for one in dict.fromkeys(given or DRAFTS) if one != "none"]
    kinds: list[str | None] = list(dict.fromkeys(dtype or ())) or [None]
    check(target, names, out, kept)
    questions = read_prompts(prompt, data, limit, every)
    check_places(names, kinds, device)
    sampling = sampling_of(
        logit_bias, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
    )  # fmt: skip
    from outpace.bench.machine import machine
    from outpace.bench.results import Results
    from outpace.cli.drafts import fitting, line_up
    from outpace.cli.tuned import Names
    from outpace.models.hub import DEFAULT
    from outpace.sampling import from_generation_config
    from outpace.tune.costs import PrecisionCosts
    from outpace.tune.tuning import TunePlan, Tuning

    loaded, sides = [name for name in names if name != "ngram"], []
    for kind in kinds:
        plain, decoders = line_up(
            target, loaded, device, kind, trust_remote_code=trust_remote_code, revision=revision
        )
        sides.append(PrecisionCosts(str(plain.scorer.dtype).removeprefix("torch."), plain, decoders))
    plain = sides[0].plain
    prompts = fitting(plain, questions.to(plain.tokenizer))
    sampling = sampling or from_generation_config(plain.scorer.generation_config)
    about: dict[str, Any] = {
        "command": command(),
        "machine": machine(plain.scorer.device),
        "target": bare(target or DEFAULT),
        "models": plain.describe().splitlines()[:1],
        "sampling": {k: v for k, v in dataclasses.asdict(sampling).items() if k != "processors"},
        "data": questions.about,
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "budget_seconds": budget,
        "seed": seed,
    }
    plan = TunePlan(sampling, max_new_tokens, batch or BATCHES, seed)
    found = Results(kept, "tune", about)
    tuning = Tuning(sides, prompts, plan, time, found, progress, fit="ngram" in names)
    called = dict(zip(sides[0].drafts, loaded, strict=True))
    named = Names(target or DEFAULT, called, table_of(out), str(plain.scorer.device), revision)
    finish(tuning, named, out, kept)


def table_of(out: Path) -> Path:
    """Return the file of an n-gram table, beside the configuration that names it."""
    return out.with_suffix(".ngram.safetensors")


def check(target: str | None, names: list[str], out: Path, results: Path) -> None:
    """Refuse flags that do not fit, before PyTorch is imported.

    Raises:
        ValueError: A flag does not fit.
    """
    for flag, path in (("--out", out), ("--results", results)):
        check_out(flag, path)
    check_apart(("--out", out), ("--results", results))
    if "ngram" in names:
        check_out("--out", table_of(out))
        check_apart(("the n-gram table", table_of(out)), ("--results", results))
    if "random" in names:
        raise ValueError("--drafts: random drafts are never worth running; `outpace bench alpha` has them")
    if len({bare(name) for name in names}) < len(names):
        raise ValueError("--drafts: two have the same name, but for their folders")
    check_models(target, [name for name in names if name != "ngram"])


def check_places(names: list[str], dtypes: list[str | None], device: str | None) -> None:
    """Refuse drafts, devices and dtypes that are not there, before anything big is loaded."""
    from outpace.loading import check_draft_name
    from outpace.models.hub import place_of, precision_of

    for name in names:
        if name != "ngram":
            check_draft_name(name)
    place = place_of(device)
    for one in dtypes:
        precision_of(one, place)
    if len(dtypes) > 1 and place.type == "cuda":
        raise ValueError("--dtype: on CUDA one at a time; run it once for each")


def finish(tuning: Tuning, names: Names, out: Path, results: Path) -> None:
    """Measure, show and save; if interrupted, show and save the results so far."""
    from outpace.cli.tuned import keep, show

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
        note(f"{how}: nothing was measured yet, and nothing is kept")
        raise stopped
    findings = tuning.findings
    if stopped is not None:
        findings.ended = f"it {'was ' if how == 'interrupted' else ''}{how} before whole texts were measured"
    known = findings.unknown() is None
    wanted = known and (stopped is None or not findings.choice.way.plain)
    try:
        keep(tuning, names, out if wanted else None)
    except Exception as error:
        stopped, how, wanted = stopped or error, how or "failed", False
    show(tuning.results.content)
    spent, budget = tuning.budget.spent, tuning.budget.seconds
    if wanted:
        note(f"configuration in {out}: outpace generate --config {shlex.quote(str(out))}")
    nothing = "" if wanted else ", and no configuration was written"
    if stopped is not None:
        kept = f", also in {results}" if tuning.results.kept else ""
        note(f"{how} after {spent:.0f} s: this is what there was{kept}{nothing}")
        raise stopped
    if not known:
        note(f"all there is in {results}, after {spent:.0f} of {budget:g} s{nothing}")
        raise typer.Exit(1)
    tuning.results.done()
    note(f"all of it in {results}, after {spent:.0f} of {budget:g} s")

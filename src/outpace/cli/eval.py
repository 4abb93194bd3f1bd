"""``outpace eval``: quality and speed on a task, with every runner side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace import __version__
from outpace.checks.errors import suggestion
from outpace.cli import checks
from outpace.cli.eval_run import evaluate, table_file
from outpace.cli.models import check_models
from outpace.cli.options import (
    PROMPTS,
    SAMPLING,
    SHOW,
    AllSeeds,
    Config,
    Device,
    DraftName,
    Dtype,
    Every,
    Limit,
    NumDraftTokens,
    Revision,
    RuleName,
    Target,
    TopK,
    TopP,
    TrustRemoteCode,
    check_text,
)
from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.bench.data import Data
    from outpace.decoder import Decoder
    from outpace.tasks.evaluate import Evaluation
    from outpace.tasks.kinds import EvalTask
    from outpace.tasks.runners import RunSettings

TASK = "Task"
WHISPER = "openai/whisper-base"  # the target of asr, unless one is named
Kind = StrEnum("Kind", ["asr", "summarize", "translate", "code", "specbench", "dialog"])


def eval(
    task: Annotated[Kind, typer.Argument(help="The task.")],
    data: Annotated[
        str,
        typer.Option(
            help="JSON lines: a file, a folder with manifest.jsonl; or a hub data set, NAME[:CONFIG[:SPLIT]]",
            rich_help_panel=PROMPTS,
        ),
    ],
    target: Target = None,
    draft: DraftName = "lookup",
    rule: RuleName = "token",
    num_draft_tokens: NumDraftTokens = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    config: Config = None,
    runners: Annotated[
        str,
        typer.Option(
            help="Methods to run, one column each: baseline (without speculation), assisted (Transformers' "
            "assisted generation), exact (the rule of --rule), sigmoid (Wagner's approximation).",
            rich_help_panel=TASK,
        ),
    ] = "baseline,assisted,exact,sigmoid",
    limit: Limit = None,
    every: Every = 1,
    prompt_template: Annotated[
        str | None,
        typer.Option(
            help="Template of the prompts; {source} is replaced by the row's text. Default: the task's.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    languages: Annotated[
        str, typer.Option(help="Languages of translate, as from-to.", rich_help_panel=TASK)
    ] = "en-de",
    language: Annotated[
        str | None, typer.Option(help="Language of asr. Default: detected.", rich_help_panel=TASK)
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Programs per row, for pass@k of code.", rich_help_panel=TASK)
    ] = 1,
    scale: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="S of the runner sigmoid, which uses rule sigmoid(-S,S). Default: 1000 for asr, else 10000.",
            rich_help_panel=TASK,
        ),
    ] = None,
    # Unlike in other commands, the default depends on the task.
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-m",
            min=1,
            help="Largest number of tokens to generate per row. Default: the task's.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            callback=checks.number("temperature"),
            help="0 is greedy.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: AllSeeds = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="JSON lines; a stopped run is resumed. Default: eval-TASK.jsonl.",
            rich_help_panel=SHOW,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start a new run, even if the file holds one.", rich_help_panel=SHOW),
    ] = False,
) -> None:
    """Run a task with every decoding method, and print quality and speed side by side.

    Exit status: 0 if all rows were evaluated, even if generated programs failed
    their tests or had to be stopped. 1 if some rows could not be evaluated; lines
    on stderr name them. 2 if a setting, a file or a model is invalid. 130 after
    Ctrl-C.

    The same command resumes a run that was stopped.
    """
    from outpace.bench.data import file_of, read
    from outpace.cli.bench import bare
    from outpace.tasks.kinds import task_of

    names = runner_names(runners, draft, temperature)
    check_flags(task, prompt_template, language, samples, max_new_tokens)
    codes = tuple(languages.split("-"))
    if len(codes) != 2 or not all(codes):
        raise ValueError(f"--languages: got {languages!r}; it must be like en-de")
    chosen = task_of(str(task), codes)
    chosen = replace(chosen, scale=chosen.scale if scale is None else scale)
    if task is Kind.asr:
        target = target or WHISPER
    if num_draft_tokens is None and temperature > 0 and draft != "none":
        num_draft_tokens = (
            "heuristic"  # auto depends on measured time, so a resumed run would give other texts
        )
    check_models(target, draft, rule, num_draft_tokens=num_draft_tokens)
    rows = read(
        data,
        speech=task is Kind.asr,
        languages=codes if task is Kind.translate else None,
        limit=limit,
        every=every,
    )
    rows = check_rows(rows, chosen)
    packages(str(task))
    path = out or Path(f"eval-{task}.jsonl")
    check_files(path, file_of(data))
    check_draft_and_device(draft, device)
    settings = run_settings(
        chosen, prompt_template, language, samples, max_new_tokens, temperature, top_k, top_p
    )
    header = {
        "task": str(task),
        "target": target and bare(target),
        "draft": bare(draft),
        "settings": {
            "max_new_tokens": None if task is Kind.asr else settings.max_new_tokens,
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "samples": samples, "seed": seed,
            "prompt": prompt_template, "language": language, "languages": languages, "scale": chosen.scale,
        },
        "every": every,
        "data": {
            "name": Path(data).name if rows.local else data, "sha256": rows.digest, "rows": len(rows.items)
        },
    }  # fmt: skip
    flags = {
        "target": path_digest(target), "draft": path_digest(draft), "rule": rule,
        "num_draft_tokens": num_draft_tokens, "device": device, "dtype": dtype, "revision": revision,
        "trust_remote_code": trust_remote_code, "outpace": __version__,
    }  # fmt: skip

    def load() -> Evaluation:
        decoder, processor = load_models(
            task, target, draft, device, dtype, rule, num_draft_tokens, trust_remote_code, revision
        )
        return build_evaluation(decoder, processor, settings, names, seed)

    evaluate(path, fresh, header, flags, rows, chosen, names, load)


def runner_names(text: str, draft: str, temperature: float) -> list[str]:
    """Return the names in --runners.

    Raises:
        ValueError: A name is unknown, or none of the runners is possible.
    """
    from outpace.tasks.kinds import RUNNERS, runner_problem

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or any(name not in RUNNERS for name in names):
        unknown = next((name for name in names if name not in RUNNERS), "")
        hint = suggestion(unknown, RUNNERS)
        raise ValueError(f"--runners: got {text!r}; there are {', '.join(RUNNERS)}{hint}")
    problems = [runner_problem(name, draft != "none", temperature == 0) for name in names]
    if all(problems):
        raise ValueError(f"--runners: none of {', '.join(names)} is possible: {problems[0]}")
    return names


def check_flags(
    task: Kind, prompt_template: str | None, language: str | None, samples: int, max_new_tokens: int | None
) -> None:
    """Refuse flags that do not belong to a task."""
    if samples > 1 and task is not Kind.code:
        raise ValueError("--samples: several samples of a row are for code")
    check_text("--prompt-template", prompt_template)
    if prompt_template is not None and "{source}" not in prompt_template:
        raise ValueError("--prompt-template: it must say {source} where the row's text goes")
    if task is Kind.asr and (prompt_template is not None or max_new_tokens is not None):
        name = "--prompt-template" if prompt_template is not None else "--max-new-tokens"
        raise ValueError(f"{name}: not for asr, where Whisper's own settings hold")
    if language is not None:
        if task is not Kind.asr:
            raise ValueError("--language: only for asr; translate has --languages")
        from outpace.tasks.transcribe import language_code

        language_code(language)


def check_rows(rows: Data, task: EvalTask) -> Data:
    """Return the rows, each with its problem for the task; refuse data without any usable row."""
    items = [
        replace(item, problem=task.row_problem(item)) if item.problem is None else item for item in rows.items
    ]
    rows = replace(rows, items=items)
    rows.check()
    return rows


def packages(task: str) -> None:
    """Refuse a task whose measures need packages that are not installed."""
    from outpace.checks.errors import import_extra
    from outpace.tasks import sandbox

    if task == "code":
        sandbox.check()
    for package in {
        "asr": ("jiwer", "soundfile", "soxr"), "summarize": ("rouge_score",), "translate": ("sacrebleu",)
    }.get(task, ()):  # fmt: skip
        import_extra(package, "tasks")


def check_files(path: Path, data: Path) -> None:
    """Refuse files that cannot be written, and the file of --data; make their folder."""
    from outpace.checks.files import check_output

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: {path.parent}: no such folder can be made ({error.strerror})") from None
    for one in (path, table_file(path)):
        if one.resolve() == data.resolve():
            raise ValueError(f"--out: {one} is the file of --data; name another file")
        check_output("--out", one)


def check_draft_and_device(draft: str, device: str | None) -> None:
    """Refuse a draft that cannot be loaded, and a device that is not there; this imports PyTorch."""
    from outpace.loading import check_draft_name
    from outpace.models.hub import place_of

    check_draft_name(draft)
    place_of(device)


def run_settings(
    task: EvalTask,
    prompt_template: str | None,
    language: str | None,
    samples: int,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> RunSettings:
    """Return the settings that all runners share; refuse numbers that do not fit."""
    from outpace.checks.arguments import number
    from outpace.sampling import SamplingParams
    from outpace.tasks.runners import RunSettings

    number("--scale", task.scale, "a finite number >= 1", lambda s: 1 <= s < inf)
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k or 0, top_p=1.0 if top_p is None else top_p
    )
    tokens = max_new_tokens or task.max_new_tokens
    return RunSettings(task, sampling, tokens, samples, prompt_template, language)


def path_digest(name: str | None) -> str | None:
    """Return a name; for a file or folder a digest of its path, which is private."""
    path = Path((name or "").removeprefix("ngram:")).expanduser()
    if not name or not path.exists():
        return name
    return hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def load_models(
    task: Kind,
    target: str | None,
    draft: str,
    device: str | None,
    dtype: str | None,
    rule: str,
    num_draft_tokens: str | None,
    trust_remote_code: bool,
    revision: str | None,
) -> tuple[Decoder, Any]:
    """Return the decoder, and for speech the target's processor."""
    from outpace.cli.models import ModelFlags, open_decoder, parse_policy

    source: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    if task is not Kind.asr:
        flags = ModelFlags(
            target=target, draft=draft, device=device, dtype=dtype, rule=rule,
            num_draft_tokens=num_draft_tokens, **source,
        )  # fmt: skip
        return open_decoder(flags), None
    from outpace.tasks.transcribe import Transcriber

    policy = parse_policy(num_draft_tokens)
    options = source if policy is None else {"num_draft_tokens": policy, **source}
    transcriber = Transcriber.load(
        target or WHISPER, draft, device=device, dtype=dtype, tell=note, rule=rule, **options
    )
    return transcriber.decoder, transcriber.processor


def build_evaluation(
    decoder: Decoder, processor: Any, settings: RunSettings, runners: Sequence[str], seed: int
) -> Evaluation:
    """Return the evaluation, and note runners that are impossible.

    Raises:
        ValueError: No runner is possible.
    """
    from outpace.tasks.evaluate import Evaluation, judged_by_log_probability

    with_log_probability = judged_by_log_probability(settings.task) and not decoder.scorer.has_encoder
    settings = replace(settings, with_log_probability=with_log_probability)
    evaluation = Evaluation(decoder, processor, settings, runners, seed)
    for name, problem in evaluation.missing.items():
        note(f"no column {name}: {problem}")
    if not evaluation.runners:
        raise ValueError(f"--runners: none of {', '.join(runners)} is possible")
    return evaluation

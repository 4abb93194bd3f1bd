"""Flags that several commands share, and what they mean."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.bench.prompts import Questions
    from outpace.decode import Decoder
    from outpace.length import Length
    from outpace.sampling import Sampling

MODELS, PROMPTS, SAMPLING, SHOW = "Models", "Prompts", "Sampling", "Output"
CONFIGURED = "outpace.configured"  # where a context keeps a configuration's file

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="MODEL",
        help="Hub id, folder or GGUF file. Default: SmolLM2-135M-Instruct, fetched once.",
        rich_help_panel=MODELS,
    ),
]


def _drafted(context: typer.Context, draft: str) -> str:
    """Without a draft, a configuration's length has nothing to say: it was found for another one."""
    source = context.get_parameter_source("draft")
    if draft == "none" and context.default_map and source is not None and source.name == "COMMANDLINE":
        context.default_map = {name: one for name, one in context.default_map.items() if name != "length"}
    return draft


Drafted = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        callback=_drafted,
        metavar="lookup|ngram:FILE|MODEL|none",
        help="Who guesses: copy from the context, a saved n-gram table, a smaller model, nobody.",
        rich_help_panel=MODELS,
    ),
]
RuleName = Annotated[
    str,
    typer.Option(
        "--rule",
        metavar="token|block|match|sigmoid(A,B)",
        help="How guesses are judged; all but sigmoid are exact.",
        rich_help_panel=MODELS,
    ),
]
LengthName = Annotated[
    str | None,
    typer.Option(
        "--length",
        metavar="G|auto|heuristic[:START]",
        help="Tokens to guess per pass: a fixed number, what is fastest by the clock, or by what was kept so "
        "far. Default: auto.",
        rich_help_panel=MODELS,
    ),
]
Lenience = Annotated[
    float,
    typer.Option(help="Below 1 keeps more guesses of rule token, and is not exact.", rich_help_panel=MODELS),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1. Default: CUDA where there is one.", rich_help_panel=MODELS),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16. Default: what suits the device.", rich_help_panel=MODELS),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with a model, on this machine. Only for models you trust.",
        rich_help_panel=MODELS,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="COMMIT|TAG|BRANCH",
        help="Version of the target on the hub. Default: main.",
        rich_help_panel=MODELS,
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-m", min=1, help="Of a text.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 is greedy. Without any sampling flag the model's own settings hold.", rich_help_panel=SAMPLING
    ),
]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float | None, typer.Option(help="Keep tokens up to this probability.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option(help="Keep tokens this many times as likely as the likeliest.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1, tokens of prompt and text are less likely.", rich_help_panel=SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="Taken off a token's logit for each time it was written.", rich_help_panel=SAMPLING),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(help="Taken off a token's logit once it was written.", rich_help_panel=SAMPLING),
]
Bias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=NUMBER",
        help="Add to a token's logit; -inf forbids it. May be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text, greedily, with --rule match, or with a --length other than "
        "auto, which goes by the clock.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this string. May be repeated.", rich_help_panel=SAMPLING),
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", help="Write about this; repeat it. Default: a dozen of our own.", rich_help_panel=PROMPTS
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Prompts as `outpace eval` reads them: a file of JSON lines, or a hub data set.",
        rich_help_panel=PROMPTS,
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first prompts.", rich_help_panel=PROMPTS)]
Every = Annotated[
    int, typer.Option(min=1, help="Only each so many-th, before --limit.", rich_help_panel=PROMPTS)
]
NoColor = Annotated[bool, typer.Option("--no-color", help="Marks instead of colours.", rich_help_panel=SHOW)]
Marks = Annotated[
    bool, typer.Option("--marks", help="Marks instead of colours, in a pipe too.", rich_help_panel=SHOW)
]


def _configured(context: typer.Context, path: Path | None) -> Path | None:
    """What the file says takes the place of defaults; a flag has its own say."""
    if path is not None:
        from outpace.tune.config import flags

        context.default_map = {**(context.default_map or {}), **flags(path)}
        context.meta[CONFIGURED] = path, context
    return path


def blamed(meta: Mapping[str, Any], why: str) -> str:
    """What is wrong, with the configuration's name if it is a value of that."""
    if CONFIGURED not in meta:
        return why
    from outpace.tune.config import FLAGS

    path, context = meta[CONFIGURED]
    for name in FLAGS:
        source = context.get_parameter_source(name)
        starts = f"{name}:", f"--{name}:", f"{context.params.get(name)}:"
        if source is not None and source.name == "DEFAULT_MAP" and why.startswith(starts):
            return f"config: {path}: {why}"
    return why


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_configured,
        help="A file of `outpace tune`: what it names is the default of these flags.",
        rich_help_panel=MODELS,
    ),
]


def sampling_of(logit_bias: list[str] | None, **fields: Any) -> Sampling | None:
    """A Sampling of the flags that were given; None if none was."""
    from outpace.sampling import Sampling

    given = {name: value for name, value in fields.items() if value is not None}
    if logit_bias:
        given["logit_bias"] = dict(_bias(one) for one in logit_bias)
    return Sampling(**given) if given else None


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise ValueError(f"--logit-bias: got {text!r}; it must be like 42=-1.5 or 42=-inf") from None


def read_prompts(prompt: list[str] | None, data: str | None, limit: int | None, every: int) -> Questions:
    """What the flags name, before anything big is loaded; what cannot be used of it is said."""
    from outpace.bench.prompts import questions

    if prompt and data is not None:
        raise ValueError("--prompt: given together with --data; give one or the other")
    if prompt and not all(one.strip() for one in prompt):
        raise ValueError("--prompt: it is empty; a model needs something to go on from")
    found = questions(prompt or (), data, limit, every)
    if found.left_out:
        note(f"{found.name}: {len(found.left_out)} of {found.rows} rows left out: {found.left_out[0]}")
    return found


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8") from None


def check_table(draft: str) -> None:
    """A name that only `outpace tune` knows what to do with."""
    if draft == "ngram" and not Path(draft).exists():
        raise ValueError(
            "--draft: ngram needs a table, ngram:FILE, which NGramDrafter.save writes; "
            "`outpace tune` counts one by itself"
        )


def _check_rule(rule: str, lenience: float, draft: str, length: str | None) -> None:
    from outpace.verify import check
    from outpace.verify.rules import parse

    check.lenience(lenience, parse(rule))
    if draft == "none" and length not in (None, "0", "auto"):
        raise ValueError("--length: nothing is guessed with --draft none")
    if draft == "none" and lenience < 1:
        raise ValueError("--lenience: nothing is guessed with --draft none")


def open_decoder(
    target: str | None,
    draft: str,
    device: str | None,
    dtype: str | None,
    rule: str,
    lenience: float,
    length: str | None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Decoder:
    """Load the models that the flags name; refuse values that do not fit before anything big is loaded."""
    from outpace.pair import load

    _check_rule(rule, lenience, draft, length)
    check_table(draft)
    loading: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if revision is not None:
        loading["revision"] = revision
    decoder = load(
        target,
        draft,
        device=device,
        dtype=dtype,
        rule=rule,
        lenience=lenience,
        length=length_of(length),
        tell=note,
        **loading,
    )
    # What was made so far stays until the end: `main` had it not looked through for garbage, nor is it now.
    gc.freeze()
    gc.enable()
    return decoder


def length_of(text: str | None) -> Length | None:
    """The policy that a flag names."""
    if text in (None, "auto"):
        return None
    from outpace.length import Fixed, Heuristic

    if text.isdecimal():
        return Fixed(int(text))
    found = re.fullmatch(r"heuristic(?::(\d+))?", text)
    if found is None:
        raise ValueError(f"--length: got {text!r}; it must be a number, auto, heuristic, or heuristic:START")
    start = int(found[1] or 5)
    return Heuristic(start, max(20, start))

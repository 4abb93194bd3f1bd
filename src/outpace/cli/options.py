"""Flags that several commands share, and the objects that are made from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import checks
from outpace.cli.checks import check_text as check_text
from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.bench.prompts import PromptSet
    from outpace.sampling import SamplingParams

MODELS, PROMPTS, SAMPLING, SHOW = "Models", "Prompts", "Sampling", "Output"
MAX_SEQUENCES = 4096  # of a batch; a larger number is a mistake that would fill the memory
CONFIG_META = "outpace.config"  # key of the configuration file in `Context.meta`

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


def drop_num_draft_tokens(context: typer.Context, draft: str) -> str:
    """Drop a configuration's num_draft_tokens if the command line names another draft.

    The number was measured with the configuration's draft.
    """
    values = context.default_map or {}
    if _source(context, "draft") == "COMMANDLINE" and values.get("draft") != draft:
        context.default_map = {name: one for name, one in values.items() if name != "num_draft_tokens"}
    return draft


DraftName = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        callback=drop_num_draft_tokens,
        metavar="lookup|ngram:FILE|MODEL|none",
        help="The drafter: lookup (prompt lookup), ngram:FILE (a saved table), a smaller model, or none.",
        rich_help_panel=MODELS,
    ),
]
DraftNames = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        "-d",
        metavar="lookup|ngram:FILE|MODEL|random",
        help="Drafters to measure; may be repeated. random proposes random tokens. Default: the draft of "
        "--config, or lookup.",
        rich_help_panel=MODELS,
    ),
]
RuleName = Annotated[
    str,
    typer.Option(
        "--rule",
        callback=checks.rule,
        metavar="token|block|match|sigmoid(A,B)",
        help="Verification rule. All but sigmoid leave the output distribution unchanged. sigmoid(A,B) "
        "replaces the probability of a token with logit z by the sigmoid of (z-A)/(B-A).",
        rich_help_panel=MODELS,
    ),
]
NumDraftTokens = Annotated[
    str | None,
    typer.Option(
        "--num-draft-tokens",
        callback=checks.num_draft_tokens,
        metavar="G|auto|heuristic[:START]",
        help="Draft tokens per step. G: always G. auto: the number with the best expected throughput, by "
        "measured times and acceptance. heuristic: starts at START (5), rises if all are accepted, and falls "
        "after a rejection. Default: auto.",
        rich_help_panel=MODELS,
    ),
]
Lenience = Annotated[
    float,
    typer.Option(
        callback=checks.number("lenience"),
        help="Below 1, rule token accepts more draft tokens, and the output distribution changes.",
        rich_help_panel=MODELS,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        callback=checks.device,
        help="cpu, cuda, cuda:1. Default: CUDA if the machine has it.",
        rich_help_panel=MODELS,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=checks.dtype,
        help="float32, bfloat16, float16. The default depends on the device.",
        rich_help_panel=MODELS,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with a model, on this machine. Only for models you trust.",
        rich_help_panel=MODELS,
    ),
]


def _drop_revision(context: typer.Context, revision: str | None) -> str | None:
    """Drop a configuration's revision if the command line names another target.

    The revision is one of the configuration's target.
    """
    other_target = set_by_config(context, "revision") and _source(context, "target") == "COMMANDLINE"
    return None if other_target else revision


Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        callback=_drop_revision,
        metavar="COMMIT|TAG|BRANCH",
        help="Version of the target on the hub. Default: main.",
        rich_help_panel=MODELS,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        "-m",
        min=1,
        help="Largest number of tokens to generate per prompt.",
        rich_help_panel=SAMPLING,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        callback=checks.number("temperature"),
        help="0 is greedy. Without any sampling flag, the model's generation config applies.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        callback=checks.number("top_k"), help="Keep the k likeliest tokens.", rich_help_panel=SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        callback=checks.number("top_p"),
        help="Keep the likeliest tokens whose total probability reaches this.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        callback=checks.number("min_p"),
        help="Drop tokens less likely than this fraction of the largest probability.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        callback=checks.number("repetition_penalty"),
        help="Above 1, tokens of the prompt and the output become less likely.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        callback=checks.number("frequency_penalty"),
        help="Subtracted from a token's logit for each time it was generated.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        callback=checks.number("presence_penalty"),
        help="Subtracted from a token's logit if it was generated.",
        rich_help_panel=SAMPLING,
    ),
]
Bias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        callback=checks.bias,
        metavar="ID=NUMBER",
        help="Add to a token's logit; -inf forbids it. May be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        callback=checks.number("seed"),
        help="Seed of sampling. The same seed gives the same output with --rule match, or if "
        "--num-draft-tokens is not auto.",
        rich_help_panel=SAMPLING,
    ),
]
AllSeeds = Annotated[
    int,
    typer.Option(
        callback=checks.number("first seed"), help="Seed of all random numbers.", rich_help_panel=SAMPLING
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        callback=checks.stop, help="End before this string. May be repeated.", rich_help_panel=SAMPLING
    ),
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", help="A prompt. May be repeated. Default: a dozen built-in ones.", rich_help_panel=PROMPTS
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Prompts as `outpace eval` reads them: a file of JSON lines, or a hub data set.",
        rich_help_panel=PROMPTS,
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use only the first N prompts.", rich_help_panel=PROMPTS)
]
Every = Annotated[
    int, typer.Option(min=1, help="Take every N-th row, before --limit.", rich_help_panel=PROMPTS)
]
NoColor = Annotated[
    bool,
    typer.Option(
        "--no-color",
        help="On a terminal, colours show which tokens are accepted draft tokens. Show brackets instead.",
        rich_help_panel=SHOW,
    ),
]
Marks = Annotated[
    bool,
    typer.Option(
        "--marks",
        help="Show brackets instead of colours, also if stdout is not a terminal. Without this flag, such "
        "output has neither.",
        rich_help_panel=SHOW,
    ),
]


def _apply_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a configuration file as defaults; flags on the command line override them."""
    if path is not None:
        from outpace.tune.config import flags

        found, known = flags(path), {one.name: one for one in context.command.params}
        if "rule" not in known and found.get("rule", "token") != "token":
            raise ValueError(
                f"config: {path}: rule: got {found['rule']!r}; `{context.command_path}` runs rule token "
                "alone, so leave the key out"
            )
        several = {name for name, one in known.items() if getattr(one, "multiple", False)}
        if getattr(getattr(known.get("num_draft_tokens"), "type", None), "name", "") == "integer":
            found.pop("num_draft_tokens", None)  # a measuring command has its own default
        if "draft" in several and found.get("draft") == "none":
            del found["draft"]  # a measuring command has its own default
        values = {
            name: [value] if name in several else value for name, value in found.items() if name in known
        }
        context.default_map = {**(context.default_map or {}), **values}
        context.meta[CONFIG_META] = path, context
    return path


def set_by_config(context: typer.Context, name: str) -> bool:
    """Return whether a flag's value comes from the file that --config names."""
    return _source(context, name) == "DEFAULT_MAP"


def _source(context: typer.Context, name: str) -> str | None:
    source = context.get_parameter_source(name)
    return None if source is None else source.name


def with_config_path(meta: Mapping[str, Any], why: str) -> str:
    """Return an error message, with the path of the configuration if one of its values is wrong."""
    if CONFIG_META not in meta:
        return why
    from outpace.tune.config import FLAGS

    path, context = meta[CONFIG_META]
    for name in FLAGS:
        value = context.params.get(name)
        values = value if isinstance(value, list) else [value]
        flag = f"--{name.replace('_', '-')}"
        starts = f"{name}:", f"{flag}:", *(f"{one}:" for one in values)
        if set_by_config(context, name) and why.startswith(starts):
            return f"config: {path}: {why}"
    return why


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_apply_config,
        help="A file that `outpace tune` wrote. Its values are the defaults of flags with the same names.",
        rich_help_panel=MODELS,
    ),
]


def sampling_of(logit_bias: list[str] | None, **fields: Any) -> SamplingParams | None:
    """Return the sampling parameters of the flags that are set; None if none is."""
    from outpace.sampling import SamplingParams

    values = {name: value for name, value in fields.items() if value is not None}
    if logit_bias:
        values["logit_bias"] = dict(checks.logit_bias(one) for one in logit_bias)
    return SamplingParams(**values) if values else None


def read_prompts(prompt: list[str] | None, data: str | None, limit: int | None, every: int) -> PromptSet:
    """Return the prompts that the flags name, and report rows that are left out.

    Raises:
        ValueError: The flags exclude each other, or a prompt is empty or not text.
    """
    from outpace.bench.prompts import prompt_set

    if prompt and data is not None:
        raise ValueError("--prompt: given together with --data; give one or the other")
    if prompt and not all(one.strip() for one in prompt):
        raise ValueError("--prompt: it is empty; a model needs something to go on from")
    for one in prompt or ():
        check_text("--prompt", one)
    found = prompt_set(prompt or (), data, limit, every)
    if found.left_out:
        note(f"{found.name}: {len(found.left_out)} of {found.rows} rows left out: {found.left_out[0]}")
    return found


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ValueError: The file cannot be read, or is not text in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; it must be a text file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read ({error.strerror})") from None

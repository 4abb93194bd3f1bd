"""Flags that several commands share, and the objects that are made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import checks
from outpace.cli.checks import check_text as check_text
from outpace.cli.config import apply_config, drop_num_draft_tokens, drop_revision
from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.bench.prompts import PromptSet
    from outpace.sampling import SamplingParams

MODELS, PROMPTS, SAMPLING, SHOW = "Models", "Prompts", "Sampling", "Output"
DEVICE_HELP = "auto, cpu, cuda, cuda:1. auto, the default, is CUDA if the machine has it."
MAX_SEQUENCES = 4096  # of a batch; a larger number is a mistake that would fill the memory

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
        help="Verification rule. All but sigmoid leave the output distribution unchanged. For a token "
        "with logit z, sigmoid(A,B) uses the sigmoid of (z-A)/(B-A) instead of its probability.",
        rich_help_panel=MODELS,
    ),
]
DefaultRule = Annotated[
    str | None,
    typer.Option(
        "--rule",
        callback=checks.rule,
        metavar="token|block|match|sigmoid(A,B)",
        help="Verification rule. All but sigmoid leave the output distribution unchanged. Default: match "
        "with --seed, so that the output repeats, and token without.",
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
        help=DEVICE_HELP,
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
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        callback=drop_revision,
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
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        callback=checks.number("seed"),
        help="Seed of sampling. The same seed gives the same output, unless --rule names another rule than "
        "match.",
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
System = Annotated[str | None, typer.Option(help="The system message of the chat template.")]
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
    int | None,
    typer.Option(min=1, help="Use only the first N prompts, or rows of --data.", rich_help_panel=PROMPTS),
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
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text.", rich_help_panel=SHOW)
]
ResultFile = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="Write results to this JSON file. It is updated while the command runs.",
        rich_help_panel=SHOW,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Plot the results to this file (.svg, .png, .pdf). Needs matplotlib.", rich_help_panel=SHOW
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=apply_config,
        help="A file that `outpace tune` wrote. Its values are the defaults of flags with the same names.",
        rich_help_panel=MODELS,
    ),
]

# `bench kernel`, `bench profile` and `bench engine` measure a grid, so these flags are lists of numbers.
VocabSizes = Annotated[
    list[int] | None, typer.Option("--vocab", min=2, help="Vocabulary sizes; may be repeated.")
]
DraftLengths = Annotated[
    list[int] | None,
    typer.Option("--num-draft-tokens", min=1, help="Draft tokens per step, g; may be repeated."),
]
BatchSizes = Annotated[
    list[int] | None,
    typer.Option("--batch", min=1, max=MAX_SEQUENCES, help="Batch sizes, B; may be repeated."),
]
# Not in the panel of models, because `bench kernel` and `bench profile` load none.
BenchDevice = Annotated[str | None, typer.Option("--device", callback=checks.device, help=DEVICE_HELP)]
# Its default does not depend on the device, so that results of several machines have the same dtype.
BenchDtype = Annotated[
    str, typer.Option("--dtype", callback=checks.dtype, help="float32, bfloat16, float16.")
]
# Without it, these commands only print the results.
BenchResultFile = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write results to this JSON file.", rich_help_panel=SHOW)
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

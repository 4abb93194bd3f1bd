"""``outpace generate``: text as it is generated, coloured by the origin of each token."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.checks.files import check_output
from outpace.cli.batch import BATCH_SIZE, check_flags, generate_batch
from outpace.cli.models import ModelFlags, open_decoder, with_model_flags
from outpace.cli.options import (
    MAX_SEQUENCES,
    SAMPLING,
    SHOW,
    AsJson,
    Bias,
    FrequencyPenalty,
    IgnoreEos,
    Marks,
    MaxNewTokens,
    MinP,
    NoColor,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    check_text,
    read_text,
    sampling_of,
)
from outpace.cli.show import Painter, as_json, note, policy_lines, stats_line

if TYPE_CHECKING:
    from outpace.decoder import Decoder
    from outpace.engine.sequence import Step
    from outpace.engine.stats import Stats


BATCH = "Batch"


@with_model_flags
def generate(
    models: ModelFlags,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. Without it, or with -, stdin is read.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template.")
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    logit_bias: Bias = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    n: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_SEQUENCES,
            help="Number of sequences to generate for the prompt.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also time decoding without speculation and Transformers, and print the ratios.",
            rich_help_panel=SHOW,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Also print the time of steps by their number of draft tokens, and what the draft-length "
            "policy has learned.",
            rich_help_panel=SHOW,
        ),
    ] = False,
    as_json_: AsJson = False,
    no_color: NoColor = False,
    marks: Marks = False,
    svg: Annotated[
        Path | None, typer.Option(help="Also write the coloured text to this SVG file.", rich_help_panel=SHOW)
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help="Generate from a file of JSON lines: prompts, objects with a prompt or messages, or "
            "requests of the OpenAI batch format. Other flags are the defaults of its lines.",
            rich_help_panel=BATCH,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write a JSON line for each request of --input as it finishes. If the file exists, requests "
            "that have a result are skipped.",
            rich_help_panel=BATCH,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SEQUENCES,
            help=f"Requests of --input that are generated at a time. Default: {BATCH_SIZE}.",
            rich_help_panel=BATCH,
        ),
    ] = None,
) -> None:
    """Generate text, and show which tokens are accepted draft tokens.

    The text goes to stdout. Statistics, the meaning of the colours and the result
    of --compare go to stderr. With --input, the requests of a file are generated
    together, and their results go to the file --output. The exit status is 1 if
    some of them failed.
    """
    if as_json_ and (marks or no_color):
        raise ValueError("--json: text in JSON has no marks or colours; leave out --marks and --no-color")
    if as_json_ and verbose:
        raise ValueError("--json: JSON output has all statistics; leave out --verbose")
    if raw and system is not None:
        raise ValueError("--raw: a raw prompt has no system message; leave out --system")
    if svg is not None:
        if as_json_:
            raise ValueError("--svg: JSON output has no picture; leave out --json")
        check_output("--svg", svg)
    unused = {  # with --input
        "prompt": prompt is not None, "--file": file is not None, "--n": n > 1, "--compare": compare,
        "--verbose": verbose, "--json": as_json_, "--svg": svg is not None, "--marks": marks,
        "--no-color": no_color,
    }  # fmt: skip
    files = check_flags(input, output, batch_size, unused)
    models.check()
    check_text("--system", system)
    text = "" if files is not None else read_prompt(prompt, file)
    sampling = sampling_of(
        logit_bias,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
    )
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "stop": stop,
    }
    if files is not None:
        from outpace.cli.batch_request import Defaults

        generate_batch(models, *files, batch_size or BATCH_SIZE, Defaults(sampling, options, system, raw))
        return
    decoder = open_decoder(models)
    if compare:
        from outpace.cli.compare import check_comparable

        check_comparable(decoder)
    messages = [*system_messages(system), {"role": "user", "content": text}]
    ids = encode(decoder, messages, text if raw else None)
    steps = decoder.stream(ids, sampling, n=n, **options)
    if as_json_:
        rows, interrupted = collect(steps, n)
        report = {"prompt": text, "prompt_tokens": len(ids), "settings": decoder.describe().splitlines()}
        report["outputs"] = rows
        report["policy"] = decoder.policy.describe()
        if compare and not interrupted:
            from outpace.cli.compare import compare as measure

            report["comparison"] = [vars(one) for one in measure(decoder, ids, sampling, options)]
        print(json.dumps(report, indent=2, ensure_ascii=False))
        if interrupted:
            raise SystemExit(130)
        return
    painter = Painter(sys.stdout, no_color=no_color, marks=marks)
    if legend := painter.legend():
        note(legend)
    shown = show(steps, painter, n)
    line = shown.line(decoder.scorer.context)
    note(line)
    if verbose:
        for each in policy_lines(shown.measured, decoder.policy):
            note(each)
    if svg is not None:
        from outpace.cli.show import write_svg

        write_svg(painter.history, line, svg)
        note(f"picture in {svg}")
    if shown.interrupted:
        raise SystemExit(130)
    if compare:
        from outpace.cli.compare import compare as measure
        from outpace.cli.compare import table

        table(measure(decoder, ids, sampling, options))


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the argument, a file or stdin.

    Raises:
        ValueError: There is more than one prompt, or it is empty or not text.
    """
    if prompt is not None and file is not None:
        raise ValueError("--file: given together with a prompt; give one or the other")
    if file is not None:
        text = read_text(file)
    elif prompt in (None, "-"):
        if sys.stdin.isatty():
            note("Type the prompt; Ctrl-D ends it.")
        text = sys.stdin.read()
    else:
        text = prompt or ""
    text = text.removesuffix("\n")
    check_text("prompt", text)
    if not text.strip():
        raise ValueError("prompt: it is empty; a model needs something to go on from")
    return text


def encode(decoder: Decoder, messages: list[dict[str, str]], raw: str | None) -> list[int]:
    """Return the token ids of messages, or of a raw prompt without the chat template."""
    tokenizer = decoder.tokenizer
    if raw is not None or not getattr(tokenizer, "chat_template", None):
        if raw is None and len(messages) > 1:
            raise ValueError("--system: this model has no chat template")
        return decoder.encode(messages[-1]["content"] if raw is None else raw)
    from outpace.engine.text import chat_ids

    return decoder.encode(chat_ids(tokenizer, messages))


@dataclass(frozen=True)
class Shown:
    """Result of printing a request's sequences.

    Attributes:
        stats: Statistics of all sequences.
        measured: Statistics of the sequences that have ended, with the seconds of their steps.
        interrupted: Whether Ctrl-C ended them.
        context_full: Whether the model's context was full before --max-new-tokens.
    """

    stats: Stats
    measured: Stats
    interrupted: bool
    context_full: bool

    def line(self, context: int) -> str:
        """Return the statistics line, with the reason if a sequence is shorter than requested."""
        parts = [stats_line(self.stats)]
        if self.context_full:
            parts.append(f"the model's context of {context} tokens is full")
        if self.interrupted:
            parts.append("interrupted")
        return " | ".join(parts)


def show(steps: Iterable[Step], painter: Painter, n: int) -> Shown:
    """Print the sequences one after the other, the first unfinished one as it is generated."""
    from outpace.engine.stats import Stats

    stats, measured, started = Stats(), Stats(), time.perf_counter()
    waiting: dict[int, list[Step]] = {row: [] for row in range(n)}
    finished: set[int] = set()
    current, interrupted, full = 0, False, False
    if n > 1:
        note(f"1 of {n}")
    try:
        for step in steps:
            stats.new_tokens += len(step.token_ids)
            stats.target_passes += 1
            stats.count(step.num_draft_tokens, step.num_accepted)
            waiting[step.index].append(step)
            if step.output is not None:
                finished.add(step.index)
                full |= step.output.context_full
                measured += step.output.stats
            while current < n:
                for one in waiting[current]:
                    painter.step(one)
                waiting[current] = []
                if current not in finished:
                    break
                painter.end()
                current += 1
                if current < n:
                    note(f"{current + 1} of {n}")
    except KeyboardInterrupt:
        interrupted = True
        painter.end()
        for row in range(current + 1, n):
            note(f"{row + 1} of {n}")
            for one in waiting[row]:
                painter.step(one)
            painter.end()
    stats.other_seconds = time.perf_counter() - started
    return Shown(stats, measured, interrupted, full)


def collect(steps: Iterable[Step], n: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the text, token ids and statistics of each sequence, and whether Ctrl-C ended them."""
    rows: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "finish_reason": "interrupted", "context_full": False} for _ in range(n)
    ]
    try:
        for step in steps:
            row = rows[step.index]
            row["text"] += step.text or ""
            row["token_ids"] += step.token_ids
            if step.output is not None:
                row["finish_reason"] = step.output.finish_reason
                row["context_full"] = step.output.context_full
                row["stats"] = as_json(step.output.stats)
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def system_messages(system: str | None) -> list[dict[str, str]]:
    """Return the messages that a conversation starts with."""
    return [] if system is None else [{"role": "system", "content": system}]

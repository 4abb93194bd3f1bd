"""``outpace chat``: a conversation whose earlier turns stay in the KV cache."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from outpace.cli.generate import encode, show
from outpace.cli.options import (
    Bias,
    Config,
    Device,
    Drafted,
    Dtype,
    FrequencyPenalty,
    Lenience,
    Marks,
    MaxNewTokens,
    MinP,
    NoColor,
    NumDraftTokens,
    PresencePenalty,
    RepetitionPenalty,
    Revision,
    RuleName,
    Seed,
    Stop,
    Target,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    check_models,
    check_text,
    open_decoder,
    sampling_of,
)
from outpace.cli.show import Painter, note


def chat(
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    config: Config = None,
    target: Target = None,
    draft: Drafted = "lookup",
    rule: RuleName = "token",
    lenience: Lenience = 1.0,
    num_draft_tokens: NumDraftTokens = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    max_new_tokens: MaxNewTokens = 512,
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
    no_color: NoColor = False,
    marks: Marks = False,
) -> None:
    """Talk with a model. /new begins again, /exit or Ctrl-D ends; Ctrl-C cuts an answer short."""
    check_models(target, draft, rule, lenience, num_draft_tokens)
    check_text("--system", system)
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
    decoder = open_decoder(
        target,
        draft,
        device,
        dtype,
        rule,
        lenience,
        num_draft_tokens,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    if not getattr(decoder.tokenizer, "chat_template", None):
        raise ValueError(f"{target}: this model has no chat template; use outpace generate --raw")
    painter = Painter(sys.stdout, no_color=no_color, marks=marks)
    if legend := painter.legend():
        note(legend)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    while (said := _ask()) is not None:
        if said == "/new":
            messages = list(beginning)
            continue
        if not said:
            continue
        if said.startswith("/"):
            note(f"{said}: known are /new and /exit")
            continue
        try:
            check_text("prompt", said)
        except ValueError as error:
            note(f"{error}; type it again")
            continue
        messages.append({"role": "user", "content": said})
        try:
            ids = encode(decoder, messages, None)
        except ValueError as error:
            note(f"{error}; /new begins again")
            messages.pop()
            continue
        painter.history.clear()
        with closing(
            decoder.stream(ids, sampling, max_new_tokens=max_new_tokens, seed=seed, stop=stop)
        ) as steps:
            shown = show(steps, painter, 1)
        answer = "".join(text for text, _ in painter.history).removesuffix("\n")
        messages.append({"role": "assistant", "content": answer})
        note(shown.line(decoder.scorer.context) + ("; /new begins again" if shown.context_full else ""))


def _ask() -> str | None:
    """Return the user's next line; None at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None
    return None if not line or line.strip() == "/exit" else line.strip()

"""``outpace chat``: a conversation whose earlier turns stay in the KV cache."""

from __future__ import annotations

import sys
from contextlib import closing

from outpace.cli.generate import encode, show, system_messages
from outpace.cli.models import ModelFlags, open_decoder, with_model_flags
from outpace.cli.options import (
    Bias,
    FrequencyPenalty,
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
    sampling_of,
)
from outpace.cli.show import Painter, note


@with_model_flags
def chat(
    models: ModelFlags,
    system: System = None,
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
    """Talk with a model. /new starts again, /exit or Ctrl-D ends; Ctrl-C cuts an answer short."""
    models.check()
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
    decoder = open_decoder(models)
    if not getattr(decoder.tokenizer, "chat_template", None):
        raise ValueError(f"{models.target}: this model has no chat template; use outpace generate --raw")
    painter = Painter(sys.stdout, no_color=no_color, marks=marks)
    if legend := painter.legend():
        note(legend)
    messages = system_messages(system)
    while (line := _read_line()) is not None:
        if line == "/new":
            messages = system_messages(system)
            continue
        if not line:
            continue
        if line.startswith("/"):
            note(f"{line}: known are /new and /exit")
            continue
        try:
            check_text("prompt", line)
        except ValueError as error:
            note(f"{error}; type it again")
            continue
        messages.append({"role": "user", "content": line})
        try:
            ids = encode(decoder, messages, None)
        except ValueError as error:
            note(f"{error}; /new starts again")
            messages.pop()
            continue
        painter.history.clear()
        with closing(
            decoder.stream(ids, sampling, max_new_tokens=max_new_tokens, seed=seed, stop=stop)
        ) as steps:
            shown = show(steps, painter, 1)
        answer = "".join(text for text, _ in painter.history).removesuffix("\n")
        messages.append({"role": "assistant", "content": answer})
        note(shown.line(decoder.scorer.context) + ("; /new starts again" if shown.context_full else ""))


def _read_line() -> str | None:
    """Return the user's next line; None at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None
    return None if not line or line.strip() == "/exit" else line.strip()

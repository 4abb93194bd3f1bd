"""The runners of a comparison: each decodes the same prompts with the same settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outpace.bench.data import Item
from outpace.decoder import Decoder, WithModel
from outpace.engine.stats import Stats
from outpace.engine.text import chat_ids
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.sampling import SamplingParams
from outpace.tasks.kinds import Task


@dataclass
class Generated:
    """A runner's output for one row; each sample holds all turns.

    Attributes:
        texts: Text of each sample.
        tokens: Token ids of each sample.
        stats: Statistics of all samples.
        seconds: Wall-clock seconds.
        log_probability: Log-probability of the first sample's tokens under the target at temperature 1, if
            ``RunSettings.likely`` asks for it.
    """

    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    log_probability: float = 0.0


@dataclass(frozen=True)
class RunSettings:
    """The settings that all runners share.

    Attributes:
        task: The task.
        sampling: Sampling parameters.
        max_new_tokens: Maximum number of new tokens of an answer.
        samples: Number of samples of each row.
        prompt: Prompt instead of the task's own; ``{source}`` stands for the row's text.
        language: Language of speech; None detects it.
        likely: Whether to compute the log-probability of answers.
    """

    task: Task
    sampling: SamplingParams
    max_new_tokens: int
    samples: int = 1
    prompt: str | None = None
    language: str | None = None
    likely: bool = False


class Runner(Protocol):
    """A runner, which decodes the rows of a task."""

    def write(self, item: Item, seed: int) -> Generated:
        """Decode one row and return texts, tokens, statistics and seconds."""


class OutpaceRunner:
    """A runner for a ``Decoder``.

    Args:
        decoder: The decoder, with or without a drafter.
        wanted: Settings that all runners share.
    """

    def __init__(self, decoder: Decoder, wanted: RunSettings) -> None:
        self.decoder, self.wanted = decoder, wanted

    def write(self, item: Item, seed: int) -> Generated:
        """See ``Runner.write``."""
        return conversation(self.decoder, self.wanted, item, self._answer, seed)

    def _answer(self, prompt: Any, seed: int) -> tuple[list[tuple[str, list[int]]], Stats]:
        forget(self.decoder)
        wanted = self.wanted
        outs = self.decoder.generate(
            prompt,
            wanted.sampling,
            n=wanted.samples,
            seed=seed,
            max_new_tokens=wanted.max_new_tokens,
            stop=stops(self.decoder, wanted) or None,
        )
        for out in outs:
            if out.error is not None:
                raise out.error
        return [(out.text or "", out.token_ids) for out in outs], sum((out.stats for out in outs), Stats())


def forget(decoder: Decoder) -> None:
    """Clear the caches of target and draft, so that each prompt is prefilled anew.

    Otherwise an earlier row, or another runner, could have left a prompt in them.
    """
    decoder.scorer.forget()
    if isinstance(decoder.drafter, WithModel):
        decoder.drafter.scorer.forget()


def conversation(
    decoder: Decoder,
    wanted: RunSettings,
    item: Item,
    answer: Callable[[Any, int], tuple[list[tuple[str, list[int]]], Stats]],
    seed: int,
) -> Generated:
    """Answer turn after turn, each with all turns before it in the prompt.

    Each turn continues from the first sample of the turn before it.

    Args:
        decoder: Decoder whose tokenizer and chat template are used.
        wanted: Settings that all runners share.
        item: The row with its turns.
        answer: Function of a prompt and a seed. It returns text and tokens of each sample, and statistics.
        seed: Seed of the first turn; later turns take the seeds that follow.
    """
    written, messages = Generated(), []
    for number, turn in enumerate(item.turns):
        messages.append({"role": "user", "content": turn})
        prompt = prompt_of(decoder, wanted, messages)
        begun = time.perf_counter()
        answers, stats = answer(prompt, seed + number)
        written.seconds += time.perf_counter() - begun
        written.stats += stats
        if wanted.likely:
            written.log_probability += log_probability(decoder, prompt, answers[0][1])
        for sample, (text, tokens) in enumerate(answers):
            if number == 0:
                written.texts.append(text)
                written.tokens.append(list(tokens))
            else:
                written.texts[sample] += f"\n\n{text}"
                written.tokens[sample] += tokens
        messages.append({"role": "assistant", "content": answers[0][0]})
    return written


@torch.inference_mode()
def log_probability(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the target's log-probability of tokens after a prompt, at temperature 1."""
    model: Any = decoder.scorer.base
    if not tokens:
        return 0.0
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1]
    own = logits.float().log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return float(own.sum())


def prompt_of(decoder: Decoder, wanted: RunSettings, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation.

    Raises:
        ValueError: The prompt does not fit the encoder, or the context together with the new tokens.
    """
    tokenizer, task = decoder.tokenizer, wanted.task
    if isinstance(decoder.scorer, Seq2SeqScorer):
        family = decoder.scorer.base.config.model_type
        form = wanted.prompt or task.encoder.get(family, task.encoder.get("", "{source}"))
        ids = list(tokenizer(form.replace("{source}", messages[-1]["content"])).input_ids)
        longest = getattr(decoder.scorer.base.config, "max_position_embeddings", None) or len(ids)
        if len(ids) > longest:
            raise ValueError(f"the prompt has {len(ids)} tokens, and the encoder reads {longest}")
        return ids
    if getattr(tokenizer, "chat_template", None):
        form = wanted.prompt or task.chat
        first = {"role": "user", "content": form.replace("{source}", messages[0]["content"])}
        ids = chat_ids(tokenizer, [first, *messages[1:]])
    else:
        said = "\n\n".join(one["content"] for one in messages)
        ids = list(tokenizer((wanted.prompt or task.bare).replace("{source}", said)).input_ids)
    room = decoder.scorer.context - wanted.max_new_tokens
    if len(ids) > room:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; with {wanted.max_new_tokens} new ones that is more than the "
            f"context of {decoder.scorer.context}"
        )
    return ids


def stops(decoder: Decoder, wanted: RunSettings) -> tuple[str, ...]:
    """Return the strings that end an answer.

    A model with an encoder or a chat template stops by itself. Any other goes on writing and must be stopped.
    """
    answering = isinstance(decoder.scorer, Seq2SeqScorer) or getattr(decoder.tokenizer, "chat_template", None)
    return () if answering else wanted.task.stop

"""The sides of a comparison: who writes, and what it took. The same prompts and settings for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outpace.decode import Decoder, WithModel
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.sampling import Sampling
from outpace.stats import Stats
from outpace.tasks.items import Item
from outpace.tasks.kinds import Task
from outpace.text import chat_ids


@dataclass
class Written:
    """What a side wrote about a row: samples, each of all turns together."""

    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    log_probability: float = 0.0  # of the first sample's tokens, by the target at temperature 1, if wanted


@dataclass(frozen=True)
class Wanted:
    """How everyone writes."""

    task: Task
    sampling: Sampling
    max_new_tokens: int
    samples: int = 1
    prompt: str | None = None  # instead of the task's own
    language: str | None = None  # of speech
    likely: bool = False  # say how likely answers are


class Side(Protocol):
    def write(self, item: Item, seed: int) -> Written: ...


class Ours:
    """A Decoder."""

    def __init__(self, decoder: Decoder, wanted: Wanted) -> None:
        self.decoder, self.wanted = decoder, wanted

    def write(self, item: Item, seed: int) -> Written:
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
        return [(out.text or "", out.tokens) for out in outs], sum((out.stats for out in outs), Stats())


def forget(decoder: Decoder) -> None:
    """What an earlier row, or another side, left in caches: a prompt is computed anew each time."""
    decoder.scorer.forget()
    if isinstance(decoder.drafter, WithModel):
        decoder.drafter.scorer.forget()


def conversation(
    decoder: Decoder,
    wanted: Wanted,
    item: Item,
    answer: Callable[[Any, int], tuple[list[tuple[str, list[int]]], Stats]],
    seed: int,
) -> Written:
    """Turn after turn, each with all before it; the first sample of a turn is what is gone on from."""
    written, messages = Written(), []
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
    """Of tokens after a prompt, as the target sees it."""
    model: Any = decoder.scorer.base
    if not tokens:
        return 0.0
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1]
    own = logits.float().log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return float(own.sum())


def prompt_of(decoder: Decoder, wanted: Wanted, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation."""
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


def stops(decoder: Decoder, wanted: Wanted) -> tuple[str, ...]:
    """Strings that end an answer: one who goes on writing has to be stopped, one who answers stops."""
    answering = isinstance(decoder.scorer, Seq2SeqScorer) or getattr(decoder.tokenizer, "chat_template", None)
    return () if answering else wanted.task.stop

"""The runners of a comparison: each decodes the same prompts with the same settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outpace.bench.data import Item
from outpace.decoder import Decoder
from outpace.engine.stats import Stats
from outpace.engine.text import chat_ids
from outpace.sampling import SamplingParams
from outpace.tasks.kinds import EvalTask


@dataclass
class Generated:
    """A runner's output for one row; each sample holds all turns.

    Attributes:
        texts: Text of each sample.
        token_ids: Token ids of each sample.
        stats: Statistics of all samples.
        seconds: Wall-clock seconds.
        log_probability: Log-probability of the first sample's tokens under the target at temperature 1, if
            ``RunSettings.with_log_probability`` asks for it.
    """

    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
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
        with_log_probability: Whether to compute the target's log-probability of the first sample.
    """

    task: EvalTask
    sampling: SamplingParams
    max_new_tokens: int
    samples: int = 1
    prompt: str | None = None
    language: str | None = None
    with_log_probability: bool = False


class Runner(Protocol):
    """A runner, which decodes the rows of a task."""

    def generate(self, item: Item, seed: int) -> Generated:
        """Decode one row and return texts, tokens, statistics and seconds."""


class OutpaceRunner:
    """A runner for a ``Decoder``.

    Args:
        decoder: The decoder, with or without a drafter.
        settings: Settings that all runners share.
    """

    def __init__(self, decoder: Decoder, settings: RunSettings) -> None:
        self.decoder, self.settings = decoder, settings

    def generate(self, item: Item, seed: int) -> Generated:
        return answer_turns(self.decoder, self.settings, item, self._answer, seed)

    def _answer(self, prompt: Any, seed: int) -> tuple[list[tuple[str, list[int]]], Stats]:
        clear_caches(self.decoder)
        settings = self.settings
        outs = self.decoder.generate(
            prompt,
            settings.sampling,
            n=settings.samples,
            seed=seed,
            max_new_tokens=settings.max_new_tokens,
            stop=stop_strings(self.decoder, settings) or None,
        )
        for out in outs:
            if out.error is not None:
                raise out.error
        return [(out.text or "", out.token_ids) for out in outs], sum((out.stats for out in outs), Stats())


def clear_caches(decoder: Decoder) -> None:
    """Clear the caches of target and draft, so that each prompt is prefilled anew.

    Otherwise an earlier row, or another runner, could have left a prompt in them.
    """
    decoder.scorer.forget()
    if decoder.drafter is not None and decoder.drafter.scorer is not None:
        decoder.drafter.scorer.forget()


def answer_turns(
    decoder: Decoder,
    settings: RunSettings,
    item: Item,
    answer: Callable[[Any, int], tuple[list[tuple[str, list[int]]], Stats]],
    seed: int,
) -> Generated:
    """Answer turn after turn, each with all turns before it in the prompt.

    Each turn continues from the first sample of the turn before it.

    Args:
        decoder: Decoder whose tokenizer and chat template are used.
        settings: Settings that all runners share.
        item: The row with its turns.
        answer: Function of a prompt and a seed. It returns text and tokens of each sample, and statistics.
        seed: Seed of the first turn; later turns take the seeds that follow.
    """
    generated, messages = Generated(), []
    for number, turn in enumerate(item.turns):
        messages.append({"role": "user", "content": turn})
        prompt = prompt_ids(decoder, settings, messages)
        started_at = time.perf_counter()
        answers, stats = answer(prompt, seed + number)
        generated.seconds += time.perf_counter() - started_at
        generated.stats += stats
        if settings.with_log_probability:
            generated.log_probability += log_probability(decoder, prompt, answers[0][1])
        for sample, (text, token_ids) in enumerate(answers):
            if number == 0:
                generated.texts.append(text)
                generated.token_ids.append(list(token_ids))
            else:
                generated.texts[sample] += f"\n\n{text}"
                generated.token_ids[sample] += token_ids
        messages.append({"role": "assistant", "content": answers[0][0]})
    return generated


@torch.inference_mode()
def log_probability(decoder: Decoder, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the target's log-probability of tokens after a prompt, at temperature 1."""
    model: Any = decoder.scorer.base
    if not token_ids:
        return 0.0
    ids = torch.tensor([[*prompt, *token_ids]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(token_ids) + 1).logits[0, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return float(logprobs.sum())


def prompt_ids(decoder: Decoder, settings: RunSettings, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation.

    Raises:
        ValueError: The prompt does not fit the encoder, or the context together with the new tokens.
    """
    tokenizer, task = decoder.tokenizer, settings.task
    if decoder.scorer.has_encoder:
        family = decoder.scorer.base.config.model_type
        template = settings.prompt or task.encoder.get(family, task.encoder.get("", "{source}"))
        ids = list(tokenizer(template.replace("{source}", messages[-1]["content"])).input_ids)
        max_tokens = getattr(decoder.scorer.base.config, "max_position_embeddings", None) or len(ids)
        if len(ids) > max_tokens:
            raise ValueError(f"the prompt has {len(ids)} tokens; the encoder takes at most {max_tokens}")
        return ids
    if getattr(tokenizer, "chat_template", None):
        template = settings.prompt or task.chat
        first = {"role": "user", "content": template.replace("{source}", messages[0]["content"])}
        ids = chat_ids(tokenizer, [first, *messages[1:]])
    else:
        text = "\n\n".join(message["content"] for message in messages)
        ids = list(tokenizer((settings.prompt or task.bare).replace("{source}", text)).input_ids)
    max_prompt_tokens = decoder.scorer.context - settings.max_new_tokens
    if len(ids) > max_prompt_tokens:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; with {settings.max_new_tokens} new ones that is more than "
            f"the context of {decoder.scorer.context}"
        )
    return ids


def stop_strings(decoder: Decoder, settings: RunSettings) -> tuple[str, ...]:
    """Return the strings that end an answer.

    A model with an encoder or a chat template ends its answers by itself. Others need stop strings.
    """
    has_encoder = decoder.scorer.has_encoder
    return () if has_encoder or getattr(decoder.tokenizer, "chat_template", None) else settings.task.stop

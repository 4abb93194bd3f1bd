"""The sides of a comparison: who writes, and what it took. The same prompts and settings for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outpace.decode import Decoder, WithModel
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.draft.text import TextDrafter
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.sampling import Sampling
from outpace.stats import Stats
from outpace.tasks.items import Item
from outpace.tasks.kinds import Task

GUESSES = 10  # of Transformers' prompt lookup


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


class Theirs:
    """Transformers' assisted generation, with its own verification."""

    def __init__(self, decoder: Decoder, wanted: Wanted) -> None:
        self.decoder, self.wanted = decoder, wanted
        self.assistant = assistant(decoder)
        self.stops = stops(decoder, wanted)

    def write(self, item: Item, seed: int) -> Written:
        return conversation(self.decoder, self.wanted, item, self._answer, seed)

    def _answer(self, prompt: Any, seed: int) -> tuple[list[tuple[str, list[int]]], Stats]:
        tokenizer, wanted = self.decoder.tokenizer, self.wanted
        model: Any = self.decoder.scorer.base
        ids = torch.tensor([prompt], device=model.device)
        settings = {**self.assistant, **drawing(wanted.sampling), "max_new_tokens": wanted.max_new_tokens}
        written, stats = [], Stats()
        skipped = 1 if isinstance(self.decoder.scorer, Seq2SeqScorer) else len(prompt)

        def ended(rows: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            said = (tokenizer.decode(row[skipped:]) for row in rows)
            return torch.tensor([any(stop in one for stop in self.stops) for one in said], device=rows.device)

        if self.stops:  # with stop_strings, assisted generation does not find the tokenizer
            settings["stopping_criteria"] = [ended]
        torch.manual_seed(seed)
        for _ in range(wanted.samples):
            with bare(model, self.assistant.get("assistant_model")), watched(stats):
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            text, tokens = until(self.stops, tokenizer, out[0, skipped:].tolist())
            stats.new_tokens += len(tokens)
            written.append((text, tokens))
        return written, stats


def until(stops: Sequence[str], tokenizer: Any, tokens: list[int]) -> tuple[str, list[int]]:
    """The text before the first of these strings, and the tokens that it takes to write it."""
    for n in range(1, len(tokens) + 1) if stops else ():
        text = tokenizer.decode(tokens[:n], skip_special_tokens=True)
        ends = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        if ends:
            return text[: min(ends)], tokens[:n]
    return tokenizer.decode(tokens, skip_special_tokens=True), tokens


@contextmanager
def bare(*models: Any) -> Iterator[None]:
    """Models with nothing of their own settings but their tokens and how far they guess as assistants:
    penalties, beams and least lengths would come into `generate` from there. What assistants learn of
    their guesses is forgotten, too."""
    from transformers import GenerationConfig

    kept = (
        "bos_token_id", "eos_token_id", "decoder_start_token_id", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    )  # fmt: skip
    before = [(model, model.generation_config) for model in models if model is not None]
    for model, own in before:
        named = {name: getattr(own, name) for name in kept if getattr(own, name, None) is not None}
        model.generation_config = GenerationConfig(pad_token_id=0, **named)
    try:
        yield
    finally:
        for model, own in before:
            model.generation_config = own


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
        try:
            ids = tokenizer.apply_chat_template(
                [first, *messages[1:]], add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the model's chat template refuses it ({error})") from error
    else:
        said = "\n\n".join(one["content"] for one in messages)
        ids = list(tokenizer((wanted.prompt or task.bare).replace("{source}", said)).input_ids)
    room = decoder.scorer.context - wanted.max_new_tokens
    if len(ids) > room:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; with {wanted.max_new_tokens} new ones that is more than the "
            f"context of {decoder.scorer.context}"
        )
    return list(ids)


def stops(decoder: Decoder, wanted: Wanted) -> tuple[str, ...]:
    """Strings that end an answer: one who goes on writing has to be stopped, one who answers stops."""
    answering = isinstance(decoder.scorer, Seq2SeqScorer) or getattr(decoder.tokenizer, "chat_template", None)
    return () if answering else wanted.task.stop


def assistant(decoder: Decoder) -> dict[str, Any]:
    """The drafter as arguments of Transformers' `generate`."""
    drafter = decoder.drafter
    if isinstance(drafter, LookupDrafter):
        return {"prompt_lookup_num_tokens": GUESSES}
    if (
        isinstance(decoder.scorer, Seq2SeqScorer)
        and isinstance(drafter, ModelDrafter)
        and not isinstance(drafter.scorer, Seq2SeqScorer)
    ):
        raise ValueError("Transformers takes no drafts of a model without an encoder for one with")
    if isinstance(drafter, ModelDrafter):
        return {"assistant_model": drafter.scorer.base}
    if isinstance(drafter, TextDrafter):
        both = {"tokenizer": drafter.target.tokenizer, "assistant_tokenizer": drafter.draft.tokenizer}
        return {"assistant_model": drafter.scorer.base, **both}
    raise ValueError(f"Transformers has nothing like {type(drafter).__name__}")


def drawing(sampling: Sampling) -> dict[str, Any]:
    """A sampling as arguments of Transformers' `generate`, whatever the model's own settings are."""
    if sampling.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


@contextmanager
def watched(stats: Stats) -> Iterator[None]:
    """Count what Transformers' assisted generation guesses and keeps. On a CPU, time its verification, which
    it has for sampled texts alone; on CUDA that would need waits that it does not have."""
    from transformers.generation import candidate_generator

    from outpace.integrations.assisted import generation

    guessed = depth = 0

    def outermost(own: Any, after: Callable[..., None]) -> Any:
        """A method that says what came of it, unless another of these called it."""

        def method(self: Any, input_ids: Any, *rest: Any, **more: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                found = own(self, input_ids, *rest, **more)
            finally:
                depth -= 1
            if not depth:
                after(found, input_ids, *rest, **more)
            return found

        return method

    def guess(found: Any, input_ids: Any, *rest: Any, **more: Any) -> None:
        nonlocal guessed
        guessed = found[0].shape[1] - input_ids.shape[1]

    def learn(found: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        stats.target_calls += 1
        stats.count(guessed, min(int(num_matches), guessed))

    def verify(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        found = verification(*given, **named)
        if found[0].device.type == "cpu":
            stats.verify_seconds += time.perf_counter() - begun
        return found

    verification = generation._speculative_sampling
    before: list[tuple[Any, str, Any]] = []
    for kind in vars(candidate_generator).values():
        for name, after in (("get_candidates", guess), ("update_candidate_strategy", learn)):
            if isinstance(kind, type) and name in vars(kind):
                before.append((kind, name, vars(kind)[name]))
                setattr(kind, name, outermost(vars(kind)[name], after))
    generation._speculative_sampling = verify
    try:
        yield
    finally:
        for kind, name, own in before:
            setattr(kind, name, own)
        generation._speculative_sampling = verification

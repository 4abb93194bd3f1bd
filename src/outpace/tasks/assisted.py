"""A runner for Transformers' assisted generation, under the same settings as our own runners."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outpace.bench.data import Item
from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.draft.text import TextDrafter
from outpace.engine.stats import Stats
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.sampling import SamplingParams
from outpace.tasks.probe import wait
from outpace.tasks.runners import Generated, RunSettings, conversation, stops

LOOKUP_TOKENS = 10  # draft tokens per step of its prompt lookup


class AssistedRunner:
    """Transformers' assisted generation, with its own verification.

    Args:
        decoder: Decoder whose target and drafter are used.
        wanted: Settings that all runners share.
    """

    waits = False  # whether to synchronize the device around verification, to time it

    def __init__(self, decoder: Decoder, wanted: RunSettings) -> None:
        self.decoder, self.wanted = decoder, wanted
        self.assistant = assistant(decoder)
        self.stops = stops(decoder, wanted)

    def write(self, item: Item, seed: int) -> Generated:
        """See ``Side.write``."""
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
            with bare(model, self.assistant.get("assistant_model")), watched(stats, self.waits):
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            text, tokens = until(self.stops, tokenizer, out[0, skipped:].tolist())
            stats.new_tokens += len(tokens)
            written.append((text, tokens))
        return written, stats


def until(stops: Sequence[str], tokenizer: Any, tokens: list[int]) -> tuple[str, list[int]]:
    """Return the text before the first stop string, and the tokens up to that stop string.

    A text without any stop string is returned whole.

    Args:
        stops: Strings that end the text.
        tokenizer: Tokenizer of the tokens.
        tokens: Generated token ids.
    """
    for n in range(1, len(tokens) + 1) if stops else ():
        text = tokenizer.decode(tokens[:n], skip_special_tokens=True)
        ends = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        if ends:
            return text[: min(ends)], tokens[:n]
    return tokenizer.decode(tokens, skip_special_tokens=True), tokens


@contextmanager
def bare(*models: Any) -> Iterator[None]:
    """Replace the generation configs of models, as long as the context is open.

    Only special tokens and the settings of the draft length stay. ``generate`` would otherwise take
    penalties, beams and minimum lengths from there. Draft lengths that assistants adapt meanwhile are dropped
    at the end.
    """
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


def assistant(decoder: Decoder) -> dict[str, Any]:
    """Return the drafter as arguments of Transformers' ``generate``.

    Raises:
        ValueError: Transformers has no such drafter.
    """
    drafter = decoder.drafter
    if isinstance(drafter, LookupDrafter):
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
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


def drawing(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as arguments of Transformers' ``generate``.

    All of them are set, so that the model's own settings do not count.
    """
    if sampling.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


@contextmanager
def watched(stats: Stats, waits: bool = False) -> Iterator[None]:
    """Count the draft tokens of Transformers' assisted generation, and time its verification.

    Transformers verifies with a function of its own only when it samples, so greedy texts have no times.

    Args:
        stats: Receives the draft tokens, the accepted ones, the target passes and ``verify_seconds``.
        waits: Whether to synchronize the device around verification. Times on a GPU are right only then.
    """
    from transformers.generation import candidate_generator

    from outpace.integrations.assisted import generation

    proposed = depth = 0

    def outermost(own: Any, after: Callable[..., None]) -> Any:
        """Wrap a method to call ``after`` with its result, unless another wrapped method called it."""

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

    def proposal(found: Any, input_ids: Any, *rest: Any, **more: Any) -> None:
        nonlocal proposed
        proposed = found[0].shape[1] - input_ids.shape[1]

    def learn(found: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        stats.target_passes += 1
        stats.count(proposed, min(int(num_matches), proposed))

    def verify(*given: Any, **named: Any) -> Any:
        if waits:
            wait(given[0].device)
        begun = time.perf_counter()
        found = verification(*given, **named)
        if waits:
            wait(given[0].device)
        stats.verify_seconds += time.perf_counter() - begun
        return found

    verification = generation._speculative_sampling
    before: list[tuple[Any, str, Any]] = []
    for kind in vars(candidate_generator).values():
        for name, after in (("get_candidates", proposal), ("update_candidate_strategy", learn)):
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

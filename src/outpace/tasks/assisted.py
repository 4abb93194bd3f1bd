"""A runner for Transformers' assisted generation, with the same settings as the runners of outpace."""

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
from outpace.sampling import SamplingParams
from outpace.tasks.profiling import synchronize
from outpace.tasks.runners import Generated, RunSettings, answer_turns, stop_strings

LOOKUP_TOKENS = 10  # draft tokens per step of Transformers' prompt lookup


class AssistedRunner:
    """Transformers' assisted generation, with its own verification.

    Args:
        decoder: Decoder whose target and drafter are used.
        settings: Settings that all runners share.
    """

    synchronized = False  # whether to synchronize the device around verification, to time it

    def __init__(self, decoder: Decoder, settings: RunSettings) -> None:
        self.decoder, self.settings = decoder, settings
        self.assistant = assistant_arguments(decoder)
        self.stops = stop_strings(decoder, settings)

    def generate(self, item: Item, seed: int) -> Generated:
        return answer_turns(self.decoder, self.settings, item, self._answer, seed)

    def _answer(self, prompt: Any, seed: int) -> tuple[list[tuple[str, list[int]]], Stats]:
        tokenizer, settings = self.decoder.tokenizer, self.settings
        model: Any = self.decoder.scorer.base
        ids = torch.tensor([prompt], device=model.device)
        arguments = {
            **self.assistant,
            **sampling_arguments(settings.sampling),
            "max_new_tokens": settings.max_new_tokens,
        }
        answers, stats = [], Stats()
        prompt_length = 1 if self.decoder.scorer.has_encoder else len(prompt)

        def stop_found(rows: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            texts = (tokenizer.decode(row[prompt_length:]) for row in rows)
            found = [any(stop in text for stop in self.stops) for text in texts]
            return torch.tensor(found, device=rows.device)

        if self.stops:  # with stop_strings, assisted generation does not find the tokenizer
            arguments["stopping_criteria"] = [stop_found]
        torch.manual_seed(seed)
        for _ in range(settings.samples):
            with (
                neutral_generation_configs(model, self.assistant.get("assistant_model")),
                recorded(stats, self.synchronized),
            ):
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
            text, token_ids = cut_at_stop(self.stops, tokenizer, out[0, prompt_length:].tolist())
            stats.new_tokens += len(token_ids)
            answers.append((text, token_ids))
        return answers, stats


def cut_at_stop(stops: Sequence[str], tokenizer: Any, token_ids: list[int]) -> tuple[str, list[int]]:
    """Return the text before the first stop string, and the tokens up to and with that stop string.

    A text without any stop string is returned whole.

    Args:
        stops: Strings that end the text.
        tokenizer: Tokenizer of the tokens.
        token_ids: Generated token ids.
    """
    for n in range(1, len(token_ids) + 1) if stops else ():
        text = tokenizer.decode(token_ids[:n], skip_special_tokens=True)
        ends = [position for position in (text.find(stop) for stop in stops) if position >= 0]
        if ends:
            return text[: min(ends)], token_ids[:n]
    return tokenizer.decode(token_ids, skip_special_tokens=True), token_ids


@contextmanager
def neutral_generation_configs(*models: Any) -> Iterator[None]:
    """Replace the generation configs of models inside a ``with`` block.

    Only special tokens and the settings for the number of draft tokens remain. Otherwise ``generate`` would
    apply the models' own penalties, beams and minimum lengths. Assistants adapt their number of draft tokens
    in the config; this change is dropped at the end.
    """
    from transformers import GenerationConfig

    preserved = (
        "bos_token_id", "eos_token_id", "decoder_start_token_id", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    )  # fmt: skip
    configs = [(model, model.generation_config) for model in models if model is not None]
    for model, config in configs:
        fields = {
            name: getattr(config, name) for name in preserved if getattr(config, name, None) is not None
        }
        model.generation_config = GenerationConfig(pad_token_id=0, **fields)
    try:
        yield
    finally:
        for model, config in configs:
            model.generation_config = config


def assistant_arguments(decoder: Decoder) -> dict[str, Any]:
    """Return the drafter as arguments of Transformers' ``generate``.

    Raises:
        ValueError: Transformers has no such drafter.
    """
    drafter = decoder.drafter
    if isinstance(drafter, LookupDrafter):
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if decoder.scorer.has_encoder and isinstance(drafter, ModelDrafter) and not drafter.scorer.has_encoder:
        raise ValueError("Transformers needs a draft model with an encoder, like the target")
    if isinstance(drafter, ModelDrafter):
        return {"assistant_model": drafter.scorer.base}
    if isinstance(drafter, TextDrafter):
        tokenizers = {"tokenizer": drafter.target.tokenizer, "assistant_tokenizer": drafter.draft.tokenizer}
        return {"assistant_model": drafter.scorer.base, **tokenizers}
    raise ValueError(f"Transformers has no counterpart of {type(drafter).__name__}")


def sampling_arguments(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as arguments of Transformers' ``generate``.

    All of them are set, so that the model's own settings have no effect.
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
def recorded(stats: Stats, synchronized: bool = False) -> Iterator[None]:
    """Count the draft tokens of Transformers' assisted generation, and time its verification.

    Transformers calls its verification function only when it samples, so greedy texts have no times.

    Args:
        stats: Receives the draft tokens, the accepted ones, the target passes and ``verify_seconds``.
        synchronized: Whether to synchronize the device around verification. A GPU's times need this.
    """
    from transformers.generation import candidate_generator

    from outpace.integrations.assisted import generation

    num_draft_tokens = depth = 0

    def with_callback(original: Any, callback: Callable[..., None]) -> Any:
        """Wrap a method to call ``callback`` with its result, unless another wrapped method called it."""

        def method(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = original(self, input_ids, *args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                callback(result, input_ids, *args, **kwargs)
            return result

        return method

    def on_proposal(result: Any, input_ids: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal num_draft_tokens
        num_draft_tokens = result[0].shape[1] - input_ids.shape[1]

    def on_update(result: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        stats.target_passes += 1
        stats.count(num_draft_tokens, min(int(num_matches), num_draft_tokens))

    def verify(*args: Any, **kwargs: Any) -> Any:
        if synchronized:
            synchronize(args[0].device)
        started_at = time.perf_counter()
        result = verification(*args, **kwargs)
        if synchronized:
            synchronize(args[0].device)
        stats.verify_seconds += time.perf_counter() - started_at
        return result

    verification = generation._speculative_sampling
    originals: list[tuple[Any, str, Any]] = []
    for kind in vars(candidate_generator).values():
        for name, callback in (("get_candidates", on_proposal), ("update_candidate_strategy", on_update)):
            if isinstance(kind, type) and name in vars(kind):
                originals.append((kind, name, vars(kind)[name]))
                setattr(kind, name, with_callback(vars(kind)[name], callback))
    generation._speculative_sampling = verify
    try:
        yield
    finally:
        for kind, name, original in originals:
            setattr(kind, name, original)
        generation._speculative_sampling = verification

"""A fair comparison: same prompt, settings and process, without speculation and through Transformers."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.cli.show import progress, screen

if TYPE_CHECKING:
    from outpace.decoder import Decoder
    from outpace.sampling import SamplingParams

ROUNDS = 3
WARM_UP_TOKENS = 4


@dataclass
class Comparison:
    """The throughput of one runner.

    Attributes:
        name: Name of the runner.
        tokens_per_second: Median throughput.
        over_baseline: Throughput relative to decoding without speculation.
        over_transformers: Throughput relative to Transformers' ``generate``.
        text: For greedy texts, whether it is the text of decoding without speculation.
        runs: Throughput of each run.
    """

    name: str
    tokens_per_second: float = 0.0
    over_baseline: float = 0.0
    over_transformers: float = 0.0
    text: str = "sampled"
    runs: list[float] = field(default_factory=list)


def check_comparable(decoder: Decoder) -> None:
    """Refuse a decoder that cannot be compared with Transformers."""
    if decoder.scorer.has_encoder:
        raise ValueError("--compare: models with an encoder cannot be compared yet; leave out --compare")


def compare(
    decoder: Decoder, ids: list[int], sampling: SamplingParams | None, options: dict[str, Any]
) -> list[Comparison]:
    """Time every runner on the prompt.

    Runners take turns, each as often early as late. Caches are cleared between runs.

    Args:
        decoder: The decoder.
        ids: Token ids of the prompt.
        sampling: Sampling parameters; None takes the model's own.
        options: Further options of ``generate``.
    """
    from outpace.sampling import from_generation_config

    sampling = sampling or from_generation_config(decoder.scorer.generation_config)
    runners = _runners(decoder, ids, sampling, options)
    times = {name: Comparison(name) for name in runners}
    texts: dict[str, list[int]] = {}
    for run in runners.values():
        run(min(WARM_UP_TOKENS, options["max_new_tokens"]))
    order = list(runners)
    for turn in range(ROUNDS):
        for i, name in enumerate(order if turn % 2 == 0 else reversed(order)):
            progress(f"comparing: {turn * len(order) + i + 1} of {ROUNDS * len(order)} runs")
            started_at = time.perf_counter()
            texts[name] = runners[name](options["max_new_tokens"])
            times[name].runs.append(len(texts[name]) / (time.perf_counter() - started_at))
    progress("")
    baseline, transformers = times[BASELINE], times[TRANSFORMERS]
    for comparison in times.values():
        comparison.tokens_per_second = statistics.median(comparison.runs)
    for comparison in times.values():
        comparison.over_baseline = comparison.tokens_per_second / baseline.tokens_per_second
        comparison.over_transformers = comparison.tokens_per_second / transformers.tokens_per_second
        if sampling.greedy:
            comparison.text = _sameness(decoder, ids, texts[BASELINE], texts[comparison.name])
    return list(times.values())


BASELINE, TRANSFORMERS = "outpace, baseline", "Transformers generate"


def _runners(
    decoder: Decoder, ids: list[int], sampling: SamplingParams, options: dict[str, Any]
) -> dict[str, Callable[[int], list[int]]]:
    """Return a function for each runner, by name: a number of new tokens in, tokens out."""
    import torch

    from outpace.decoder import Decoder as DecoderClass
    from outpace.draft.lookup import LookupDrafter
    from outpace.draft.model import ModelDrafter
    from outpace.draft.text import TextDrafter

    model, drafter = decoder.scorer.model, decoder.drafter
    baseline = DecoderClass(decoder.scorer, None, decoder.tokenizer)
    prompt = torch.tensor([ids], device=decoder.scorer.device)
    settings = _for_transformers(decoder, sampling, options, len(ids))

    def outpace_runner(chosen: Decoder) -> Callable[[int], list[int]]:
        def run(tokens: int) -> list[int]:
            chosen.scorer.forget()
            if chosen.drafter is not None and chosen.drafter.scorer is not None:
                chosen.drafter.scorer.forget()
            out = chosen.generate(ids, sampling, **options | {"max_new_tokens": tokens})
            return list(out.token_ids)

        return run

    def transformers_runner(**extra: Any) -> Callable[[int], list[int]]:
        def run(tokens: int) -> list[int]:
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                **settings | extra,
            )
            return list(out[0, len(ids) :].tolist())

        return run

    runners = {BASELINE: outpace_runner(baseline), TRANSFORMERS: transformers_runner()}
    if drafter is not None:
        runners = {f"outpace, {type(drafter).__name__}": outpace_runner(decoder)} | runners
    if isinstance(drafter, LookupDrafter):
        runners["Transformers prompt lookup"] = transformers_runner(prompt_lookup_num_tokens=10)
    if isinstance(drafter, ModelDrafter):
        runners["Transformers assisted"] = transformers_runner(assistant_model=drafter.scorer.model)
    if isinstance(drafter, TextDrafter):
        both = {"tokenizer": decoder.tokenizer, "assistant_tokenizer": drafter.draft.tokenizer}
        runners["Transformers assisted"] = transformers_runner(assistant_model=drafter.scorer.model, **both)
    return runners


def _for_transformers(
    decoder: Decoder, sampling: SamplingParams, options: dict[str, Any], prompt: int
) -> dict[str, Any]:
    """Return the same settings as arguments of ``model.generate``."""
    import copy

    import torch

    from outpace.sampling import Prefix, SamplingParams, adjust

    config = copy.deepcopy(decoder.scorer.generation_config)
    config.do_sample = not sampling.greedy
    for name in ("temperature", "top_k", "top_p", "min_p"):
        setattr(config, name, None if sampling.greedy else getattr(sampling, name) or None)
    config.repetition_penalty = sampling.repetition_penalty
    config.pad_token_id = 0
    if options["ignore_eos"]:
        config.eos_token_id = None
    settings: dict[str, Any] = {"generation_config": config}
    if options["stop"]:
        settings |= {"stop_strings": options["stop"], "tokenizer": decoder.tokenizer}
    rest = SamplingParams(
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
    )
    if not rest.neutral:  # Transformers has no such arguments

        def penalize(tokens: Any, scores: Any) -> Any:
            rows = torch.full((len(tokens),), prompt, device=tokens.device)
            return adjust(scores, rest, Prefix(tokens, None, rows))

        settings["logits_processor"] = [penalize]
    return settings


def _sameness(decoder: Decoder, ids: list[int], baseline: list[int], other: list[int]) -> str:
    """Return whether a greedy text is the same, up to ties.

    In 16 bits the two likeliest tokens are often equal up to rounding, and forward passes of other shapes
    round differently.
    """
    import torch

    from outpace.auditing.audit import near_tie

    if other == baseline:
        return "same"
    pairs = zip(baseline, other, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return "same, other length"
    with torch.inference_mode():
        input_ids = torch.tensor([[*ids, *baseline[:position]]], device=decoder.scorer.device)
        logits = decoder.scorer.model(input_ids=input_ids, use_cache=False).logits[0, -1].float()
    tie = near_tie(logits, baseline[position], other[position], decoder.scorer.dtype)
    return f"same up to a tie at {position + 1}" if tie else f"DIFFERS at {position + 1}"


def table(comparisons: list[Comparison]) -> None:
    """Print the comparison as a table on stderr."""
    from rich.table import Table

    printed = Table("", "tokens/s", "x baseline", "x Transformers", "text")
    for column in printed.columns[1:]:
        column.justify = "right"
    for comparison in comparisons:
        printed.add_row(
            comparison.name,
            f"{comparison.tokens_per_second:.1f}",
            f"{comparison.over_baseline:.2f}",
            f"{comparison.over_transformers:.2f}",
            comparison.text,
        )
    screen(sys.stderr).print(printed, f"Medians of {ROUNDS} runs each, prompt included.")

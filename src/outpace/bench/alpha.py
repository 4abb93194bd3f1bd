"""Acceptance rate α of real models: Σ min(p, q) at every token of texts that the target generated.

p is the distribution that the target sampled the token from. q is the distribution from which a drafter
samples one draft token at the same position. If the drafter does not sample, q is a point mass. So every kind
of drafter is measured in the same way, and all of them on the same texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.bench.estimate import Floats
from outpace.bench.prompts import Prompt
from outpace.checks.arguments import on_device, to_device
from outpace.decoder import Decoder
from outpace.draft.base import Draft, State
from outpace.models.source import Source
from outpace.sampling import SamplingParams, warp

ROWS = 4  # texts per batch; the logits of all their tokens stay in memory


@dataclass(frozen=True)
class TargetText:
    """A text that the target generated.

    Attributes:
        start: Token ids of the prompt, or the first tokens of a decoder with an encoder.
        token_ids: New token ids.
        scores: Adjusted logits ``[tokens, V]``; for greedy sampling, those before the argmax.
        prompt: The prompt.
        source: Encoder input, if there is an encoder.
    """

    start: list[int]
    token_ids: list[int]
    scores: Tensor
    prompt: Prompt
    source: Source | None = None


@dataclass(frozen=True)
class TextAcceptance:
    """Acceptance rates β at each token of a text.

    Attributes:
        prompt: The prompt.
        new_tokens: Number of new tokens.
        beta: β ``[tokens]`` by draft and lenience; NaN where the drafter had no draft token.
    """

    prompt: Prompt
    new_tokens: int
    beta: Mapping[str, Mapping[float, Floats]]


def measure(
    target: Decoder,
    drafts: Mapping[str, Decoder],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    lenience: Sequence[float] = (1.0,),
    seed: int = 0,
) -> Iterator[TextAcceptance]:
    """Generate texts without speculation, and measure β of each drafter at every token.

    Texts that fail are left out, with a warning.

    Args:
        target: Decoder without a drafter.
        drafts: Decoders with a drafter each, by name.
        prompts: Prompts of the texts.
        sampling: Sampling of all texts.
        max_new_tokens: New tokens per text.
        lenience: Values of l to measure at, besides 1.
        seed: Seed of the first text.

    Yields:
        β of each text.

    Raises:
        ValueError: ``sampling`` has processors, or a lenience lies outside (0, 1].
    """
    if sampling.processors:
        raise ValueError("sampling: it has processors, whose state this measurement cannot follow")
    for one in lenience:
        if not 0 < one <= 1:
            raise ValueError(f"lenience: got {one!r}; it must be in (0, 1]")
    values = sorted({1.0, *lenience}, reverse=True)
    for first in range(0, len(prompts), ROWS):
        some = prompts[first : first + ROWS]
        texts = target_texts(
            target, some, sampling, max_new_tokens, range(seed + first, seed + first + len(some))
        )
        beta = {
            name: acceptance_along(decoder, texts, sampling, values, name) for name, decoder in drafts.items()
        }
        for i, text in enumerate(texts):
            yield TextAcceptance(
                text.prompt, len(text.token_ids), {name: found[i] for name, found in beta.items()}
            )


def target_texts(
    target: Decoder,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    max_new_tokens: int,
    seeds: Sequence[int],
) -> list[TargetText]:
    """Return the texts that the target generates, without those that fail."""
    inputs: list[Any] = [one.ids for one in prompts]
    sources: list[Source | None] = [None] * len(prompts)
    if target.scorer.has_encoder:
        inputs = sources = [target.scorer.source(one) for one in inputs]
    outs = target.generate(inputs, sampling, max_new_tokens=max_new_tokens, seed=list(seeds), scores=True)
    return [
        TargetText(
            one.ids if source is None else list(source.start or []),
            out.token_ids,
            out.scores,
            one,
            source,
        )
        for one, source, out in zip(prompts, sources, outs, strict=True)
        if out.error is None and out.scores is not None
    ]


@torch.inference_mode()
def acceptance_along(
    decoder: Decoder,
    texts: Sequence[TargetText],
    sampling: SamplingParams,
    lenience: Sequence[float],
    name: str = "",
) -> list[dict[float, Floats]]:
    """Return β ``[tokens]`` for each text and lenience.

    Args:
        decoder: Decoder with the drafter to measure.
        texts: Texts of the target.
        sampling: Sampling of the texts.
        lenience: Values of l.
        name: Name of the draft in errors.

    Raises:
        ValueError: The decoder has no drafter, or a β lies outside [0, 1].
    """
    drafter = decoder.drafter
    if drafter is None:
        raise ValueError(f"draft: {name or 'none'} drafts nothing, so there is nothing to measure")
    found = [{one: np.full(len(text.token_ids), np.nan) for one in lenience} for text in texts]
    slots = range(len(texts))
    for scorer in decoder.encoders():
        if scorer is not decoder.scorer:
            sources = [text.source for text in texts if text.source is not None]
            scorer.encode_sources(slots, sources, max(len(text.start) for text in texts))
    try:
        for i in range(max((len(text.token_ids) for text in texts), default=0)):
            rows = [row for row in slots if i < len(texts[row].token_ids)]
            active = [texts[row] for row in rows]
            state = _state(decoder, rows, active, i, sampling)
            draft = drafter.propose(state, 1)
            next_tokens = torch.tensor([text.token_ids[i] for text in active])
            drafter.commit(torch.zeros_like(next_tokens), next_tokens)
            if draft.tokens.shape[1] == 0:
                continue
            scores = torch.stack([text.scores[i] for text in active])
            proposed = draft.lengths or [draft.tokens.shape[1]] * len(rows)
            for one in lenience:
                values = acceptance_probability(scores, draft, sampling, one).tolist()
                for row, length, value in zip(rows, proposed, values, strict=True):
                    if length:
                        found[row][one][i] = _checked(value, name, i)
    finally:
        drafter.reset(list(slots))
    return found


def acceptance_probability(
    scores: Tensor, draft: Draft, sampling: SamplingParams, lenience: float = 1.0
) -> Tensor:
    """Return the probability ``[R]`` that the first draft token of each row is accepted: Σ min(q, p/l).

    For greedy rows, draft tokens x with p(x) >= l·max p are accepted, with p before the argmax.

    Args:
        scores: The target's adjusted logits ``[R, V]``.
        draft: Draft tokens with their logits.
        sampling: Sampling of the target.
        lenience: The value l.
    """
    if draft.logits is None:
        q = torch.zeros_like(scores).scatter_(1, to_device(draft.tokens[:, :1], scores.device), 1.0)
    else:
        logits = draft.logits[:, :1].float()
        draft_sampling = None if draft.precomputed is None else draft.precomputed.sampling
        q = (logits if draft_sampling is None else warp(logits, draft_sampling))[:, 0].softmax(-1)
    if not sampling.greedy:
        limit = scores.softmax(-1) / lenience
    elif lenience == 1:  # only the first of equal logits
        limit = torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
    else:
        limit = (scores >= scores.amax(-1, keepdim=True) + math.log(lenience)).to(scores.dtype)
    return torch.minimum(q, limit).sum(-1)


def _state(
    decoder: Decoder, rows: Sequence[int], texts: Sequence[TargetText], at: int, sampling: SamplingParams
) -> State:
    """Return the drafter's state before token ``at`` of each text."""
    return State(
        rows,
        [[*text.start, *text.token_ids[:at]] for text in texts],
        [len(text.start) for text in texts],
        [sampling] * len(rows),
        on_device([0] * len(rows), torch.int64, decoder.scorer.device),
        [1] * len(rows),
        decoder.scorer.vocab_size,
        decoder.scorer.device,
        sources=[text.source for text in texts],
    )


def _checked(value: float, name: str, at: int) -> float:
    if not -1e-3 <= value <= 1 + 1e-3:  # NaN, too
        raise ValueError(
            f"draft: {name or 'it'} has an acceptance rate of {value:g} at token {at}, outside [0, 1]; its "
            "logits must be those of a distribution"
        )
    return min(max(value, 0.0), 1.0)

"""α of real models: Σ min(p, q) at every token of texts that the target wrote by itself.

p is what the target drew the token from; q what a drafter, asked for one guess at the same place, draws from,
or a point mass where it chooses. So every kind of drafter is measured alike, and all of them on the same
texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.arguments import on_device
from outpace.bench.estimate import Floats
from outpace.bench.prompts import Asked
from outpace.decode import Decoder
from outpace.draft.base import Draft, State
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.models.source import Source
from outpace.sampling import Sampling, warp

ROWS = 4  # texts at a time: the target's logits of all their tokens are held


@dataclass(frozen=True)
class Text:
    """What the target wrote."""

    start: list[int]
    tokens: list[int]
    scores: Tensor  # [tokens, V], adjusted; of greedy ones, what the argmax was taken of
    asked: Asked
    source: Source | None = None


@dataclass(frozen=True)
class Walked:
    """β at each of a text's tokens, by draft and lenience; NaN where the draft had no guess."""

    asked: Asked
    tokens: int
    beta: Mapping[str, Mapping[float, Floats]]


def measure(
    target: Decoder,
    drafts: Mapping[str, Decoder],
    prompts: Sequence[Asked],
    sampling: Sampling,
    *,
    tokens: int,
    lenience: Sequence[float] = (1.0,),
    seed: int = 0,
) -> Iterator[Walked]:
    """Let the target, which decodes plainly, write so many tokens after each prompt, and ask the decoders'
    drafters at each. Texts that fail are left out, with a warning."""
    if sampling.processors:
        raise ValueError("sampling: has processors, whose state cannot be followed here")
    for one in lenience:
        if not 0 < one <= 1:
            raise ValueError(f"lenience: got {one!r}; it must be in (0, 1]")
    values = sorted({1.0, *lenience}, reverse=True)
    for first in range(0, len(prompts), ROWS):
        some = prompts[first : first + ROWS]
        texts = written(target, some, sampling, tokens, range(seed + first, seed + first + len(some)))
        beta = {name: walk(decoder, texts, sampling, values, name) for name, decoder in drafts.items()}
        for i, text in enumerate(texts):
            yield Walked(text.asked, len(text.tokens), {name: found[i] for name, found in beta.items()})


def written(
    target: Decoder, prompts: Sequence[Asked], sampling: Sampling, tokens: int, seeds: Sequence[int]
) -> list[Text]:
    given: list[Any] = [one.ids for one in prompts]
    sources: list[Source | None] = [None] * len(prompts)
    if isinstance(target.scorer, Seq2SeqScorer):
        given = sources = [target.scorer.source(one) for one in given]
    outs = target.generate(given, sampling, max_new_tokens=tokens, seed=list(seeds), scores=True)
    return [
        Text(
            one.ids if source is None else list(source.start or []),
            out.tokens,
            out.scores,
            one,
            source,
        )
        for one, source, out in zip(prompts, sources, outs, strict=True)
        if out.error is None and out.scores is not None
    ]


@torch.inference_mode()
def walk(
    decoder: Decoder, texts: Sequence[Text], sampling: Sampling, lenience: Sequence[float], name: str = ""
) -> list[dict[float, Floats]]:
    """Of each text and lenience, β `[tokens]`."""
    drafter = decoder.drafter
    if drafter is None:
        raise ValueError(f"draft: {name or 'none'} guesses nothing, so there is nothing to measure")
    found = [{one: np.full(len(text.tokens), np.nan) for one in lenience} for text in texts]
    slots = range(len(texts))
    for scorer in decoder.encoders():
        if scorer is not decoder.scorer:
            sources = [text.source for text in texts if text.source is not None]
            scorer.take_in(slots, sources, max(len(text.start) for text in texts))
    try:
        for i in range(max((len(text.tokens) for text in texts), default=0)):
            rows = [row for row in slots if i < len(texts[row].tokens)]
            there = [texts[row] for row in rows]
            state = _state(decoder, rows, there, i, sampling)
            draft = drafter.propose(state, 1)
            nexts = torch.tensor([text.tokens[i] for text in there])
            drafter.commit(torch.zeros_like(nexts), nexts)
            if draft.tokens.shape[1] == 0:
                continue
            scores = torch.stack([text.scores[i] for text in there])
            guessed = draft.lengths or [draft.tokens.shape[1]] * len(rows)
            for one in lenience:
                values = kept(scores, draft, sampling, one).tolist()
                for row, length, value in zip(rows, guessed, values, strict=True):
                    if length:
                        found[row][one][i] = _checked(value, name, i)
    finally:
        drafter.reset(list(slots))
    return found


def kept(scores: Tensor, draft: Draft, sampling: Sampling, lenience: float = 1.0) -> Tensor:
    """The probability `[R]` that the first guess of each row is kept, by the target's adjusted logits
    `[R, V]`: Σ min(q, p/l). For greedy rows the guesses with p(x) >= l·max p are, with p before the argmax.
    """
    if draft.logits is None:
        q = torch.zeros_like(scores).scatter_(1, draft.tokens[:, :1], 1.0)
    else:
        logits = draft.logits[:, :1].float()
        told = None if draft.told is None else draft.told.sampling
        q = (logits if told is None else warp(logits, told))[:, 0].softmax(-1)
    if not sampling.greedy:
        limit = scores.softmax(-1) / lenience
    elif lenience == 1:  # of equal logits, the first alone
        limit = torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
    else:
        limit = (scores >= scores.amax(-1, keepdim=True) + math.log(lenience)).to(scores.dtype)
    return torch.minimum(q, limit).sum(-1)


def _state(
    decoder: Decoder, rows: Sequence[int], texts: Sequence[Text], at: int, sampling: Sampling
) -> State:
    """Before token `at` of each text."""
    return State(
        rows,
        [[*text.start, *text.tokens[:at]] for text in texts],
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
            f"draft: {name or 'it'} has an acceptance of {value:g} at token {at}, outside [0, 1]: what it "
            "states as its logits is no distribution"
        )
    return min(max(value, 0.0), 1.0)

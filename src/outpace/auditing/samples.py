"""Samples of a decoder, counted by outcome, and the exact probabilities of the outcomes."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.auditing.pearson import Floats, Ints
from outpace.decoder import Decoder
from outpace.engine.request import seed_of
from outpace.engine.stats import Stats
from outpace.sampling import SamplingParams

# Tokens by which batches of samples may be longer, in turn. A step drafts no token that would be the last one
# or beyond, so a sample with a higher limit has longer drafts. `stop_when` ends it as early as the others.
# The longer ones come first: they cost more, and a large fault ends the audit early.
LONGER = 0, 2, 0, 1, *[0] * 12
ROUNDING = 2.0  # times the distance between two ways to compute probabilities in 16 bits
RAISED = 100.0  # added to the logits of allowed tokens, so that no other is ever sampled
CANDIDATES = 8  # tokens among which a set without rare sequences is chosen


class Sampler:
    """Samples of every prompt, counted by outcome."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[list[int]],
        tokens: int,
        top: int,
        temperature: float,
        batch_size: int,
        seed: int,
    ) -> None:
        self._decoder, self._prompts, self._tokens = decoder, prompts, tokens
        self._batch_size, self._seed, self._temperature = batch_size, seed, temperature
        self._drawn = 0  # samples of all prompts
        self._longer = [itertools.cycle(LONGER) for _ in prompts]
        self.stats = [Stats() for _ in prompts]
        self.exact: list[dict[tuple[int, ...], float]] = []
        self._samplings, self._allowed = list[SamplingParams](), list[list[int]]()
        model = decoder.scorer.model
        for prompt in prompts:
            allowed = balanced(model, prompt, top, temperature)
            self._allowed.append(allowed)
            self.exact.append(distribution(model, prompt, tokens, allowed, temperature))
            raised = dict.fromkeys(allowed, RAISED * max(1.0, temperature))
            self._samplings.append(SamplingParams(temperature=temperature, logit_bias=raised))

    def rounding(self) -> Floats:
        """Return Σ(q − p)²/p per prompt that rounding may bring about; 0 in 32 bits."""
        if self._decoder.scorer.dtype.itemsize > 2:
            return np.zeros(len(self._prompts))
        found = []
        for prompt, allowed, exact in zip(self._prompts, self._allowed, self.exact, strict=True):
            other = distribution(
                self._decoder.scorer.model, prompt, self._tokens, allowed, self._temperature, cached=True
            )
            away = sum((other[outcome] - p) ** 2 / p for outcome, p in exact.items() if p)
            found.append(ROUNDING**2 * away)
        return np.array(found)

    def draw(self, i: int, n: int, told: Callable[[int], None]) -> Ints:
        """Return how often each outcome of prompt i came in n new samples; the last count is of others."""
        places = {outcome: place for place, outcome in enumerate(self.exact[i])}
        counts = np.zeros(len(places) + 1, dtype=np.int64)
        for first in range(0, n, self._batch_size):
            size = min(self._batch_size, n - first)
            outs = self._decoder.generate(
                self._prompts[i],
                self._samplings[i],
                n=size,
                max_new_tokens=self._tokens + next(self._longer[i]),
                stop_when=lambda row: len(row.new_tokens) >= self._tokens,
                ignore_eos=True,
                seed=seed_of(self._seed, 0, self._drawn, 1),  # no two samples of an audit share their noise
            )
            for out in outs:
                counts[places.get(tuple(out.token_ids), -1)] += 1
            self.stats[i] += sum((out.stats for out in outs), Stats())
            self._drawn += size
            told(size)
        return counts


@torch.inference_mode()
def balanced(model: Any, prompt: Sequence[int], top: int, temperature: float = 1.0) -> list[int]:
    """Return ``top`` tokens of which no sequence is rare after the prompt.

    They are tokens of the prompt, if it has enough: prompt lookup can propose no others. Among the likeliest
    of them the result is the set whose first two tokens have the largest entropy.
    """
    device = model.get_input_embeddings().weight.device
    text = torch.tensor([list(prompt)], device=device)
    logits = model(input_ids=text, use_cache=False).logits[0, -1].double() / temperature
    own, order = set(prompt), logits.argsort(descending=True).tolist()
    found = [token for token in order if token in own]
    if len(found) < top:
        found += [token for token in order if token not in own]
    candidates = torch.tensor(found[: max(CANDIDATES, top)], device=device)
    longer = torch.cat((text.expand(len(candidates), -1), candidates[:, None]), dim=1)
    after = model(input_ids=longer, use_cache=False).logits[:, -1, candidates].double() / temperature

    def entropy(some: tuple[int, ...]) -> float:
        first, second = (
            logits[candidates[list(some)]].softmax(0),
            after[list(some)][:, list(some)].softmax(-1),
        )
        joint = first[:, None] * second
        return float(-torch.xlogy(joint, joint).sum())

    best = max(itertools.combinations(range(len(candidates)), top), key=entropy)
    return candidates[list(best)].tolist()


@torch.inference_mode()
def distribution(
    model: Any,
    prompt: Sequence[int],
    tokens: int,
    allowed: Sequence[int],
    temperature: float = 1.0,
    cached: bool = False,
) -> dict[tuple[int, ...], float]:
    """Return the exact probability of every sequence of ``tokens`` allowed tokens.

    The forward passes take whole texts. With ``cached`` they take the tokens after the prompt, one text at a
    time.
    """
    following = _cached(model, prompt) if cached else _uncached(model, prompt)
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        scores = following([*level])[:, list(allowed)].double() / temperature
        level = {
            (*prefix, token): mass * chance
            for (prefix, mass), row in zip(level.items(), scores.softmax(-1).tolist(), strict=True)
            for token, chance in zip(allowed, row, strict=True)
        }
    return level


Following = Callable[[Sequence[tuple[int, ...]]], Tensor]
"""A function that returns the logits ``[n, V]`` after the prompt and each of n texts of equal length."""


def _uncached(model: Any, prompt: Sequence[int]) -> Following:
    device = model.get_input_embeddings().weight.device
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def following(texts: Sequence[tuple[int, ...]]) -> Tensor:
        ids = torch.tensor([[*prompt, *text] for text in texts], device=device)
        parts = torch.split(ids, 64)
        return torch.cat([model(input_ids=part, use_cache=False, **last).logits[:, -1] for part in parts])

    return following


def _cached(model: Any, prompt: Sequence[int]) -> Following:
    device = model.get_input_embeddings().weight.device
    begun = model(input_ids=torch.tensor([list(prompt)], device=device), use_cache=True)

    def following(texts: Sequence[tuple[int, ...]]) -> Tensor:
        found: list[Tensor] = [] if texts != [()] else [begun.logits[0, -1]]
        for text in filter(None, texts):
            ids, cache = torch.tensor([text], device=device), copy.deepcopy(begun.past_key_values)
            found.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1])
        return torch.stack(found)

    return following

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
from outpace.models.scorer import Scorer
from outpace.sampling import SamplingParams

# Batches of samples take turns with these additions to `max_new_tokens`. A step never drafts the last token,
# so a higher limit gives longer drafts. `stop_when` ends all samples at the same length.
# High limits come early, because a large fault ends the audit early.
EXTRA_TOKENS = 0, 2, 0, 1, *[0] * 12
ROUNDING_FACTOR = 2.0  # tolerance, as a multiple of the distance between two computations in 16 bits
ALLOWED_BIAS = 100.0  # logit bias of allowed tokens, so that no other token is sampled
CANDIDATES = 8  # tokens from which `balanced` chooses


class Sampler:
    """Sampler of every prompt that counts samples by outcome."""

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
        self._sampled = 0  # samples of all prompts
        self._extra_tokens = [itertools.cycle(EXTRA_TOKENS) for _ in prompts]
        self.stats = [Stats() for _ in prompts]
        self.exact: list[dict[tuple[int, ...], float]] = []
        self._samplings, self._allowed = list[SamplingParams](), list[list[int]]()
        model = decoder.scorer.model
        for prompt in prompts:
            allowed = balanced(model, prompt, top, temperature)
            self._allowed.append(allowed)
            self.exact.append(distribution(model, prompt, tokens, allowed, temperature))
            bias = dict.fromkeys(allowed, ALLOWED_BIAS * max(1.0, temperature))
            self._samplings.append(SamplingParams(temperature=temperature, logit_bias=bias))

    @torch.inference_mode()
    def rounding(self) -> Floats:
        """Return Σ(q − p)²/p per prompt that rounding may cause; 0 in 32 bits.

        It is measured with the model's own forward passes over a KV cache, and with the decoder's forward
        passes without speculation, whose kernels may round otherwise.
        """
        scorer = self._decoder.scorer
        if scorer.dtype.itemsize > 2:
            return np.zeros(len(self._prompts))
        divergences = []
        for prompt, allowed, exact in zip(self._prompts, self._allowed, self.exact, strict=True):
            others = [
                probabilities(next_logits, self._tokens, allowed, self._temperature)
                for next_logits in (_cached(scorer.model, prompt), _scored(scorer, prompt))
            ]
            divergence = max(
                sum((other[outcome] - p) ** 2 / p for outcome, p in exact.items() if p) for other in others
            )
            divergences.append(ROUNDING_FACTOR**2 * divergence)
        return np.array(divergences)

    def sample(self, i: int, n: int, on_batch: Callable[[int], None]) -> Ints:
        """Take n new samples of prompt i, and return the count of each outcome.

        The last count is that of impossible outcomes. ``on_batch`` is called with the size of each batch.
        """
        index_of = {outcome: index for index, outcome in enumerate(self.exact[i])}
        counts = np.zeros(len(index_of) + 1, dtype=np.int64)
        for first in range(0, n, self._batch_size):
            size = min(self._batch_size, n - first)
            outs = self._decoder.generate(
                self._prompts[i],
                self._samplings[i],
                n=size,
                max_new_tokens=self._tokens + next(self._extra_tokens[i]),
                stop_when=lambda row: len(row.new_tokens) >= self._tokens,
                ignore_eos=True,
                seed=seed_of(self._seed, self._sampled),  # no two samples of an audit share their noise
            )
            for out in outs:
                counts[index_of.get(tuple(out.token_ids), -1)] += 1
            self.stats[i] += sum((out.stats for out in outs), Stats())
            self._sampled += size
            on_batch(size)
        return counts


@torch.inference_mode()
def balanced(model: Any, prompt: Sequence[int], top: int, temperature: float = 1.0) -> list[int]:
    """Return ``top`` tokens whose sequences are all fairly likely after the prompt.

    They are tokens of the prompt, if it has enough, because prompt lookup can propose no others. Among the
    likeliest of them, the result is the set with the largest entropy of the first two sampled tokens.
    """
    device = model.get_input_embeddings().weight.device
    text = torch.tensor([list(prompt)], device=device)
    logits = model(input_ids=text, use_cache=False).logits[0, -1].double() / temperature
    in_prompt, order = set(prompt), logits.argsort(descending=True).tolist()
    ranked = [token for token in order if token in in_prompt]
    if len(ranked) < top:
        ranked += [token for token in order if token not in in_prompt]
    candidates = torch.tensor(ranked[: max(CANDIDATES, top)], device=device)
    longer = torch.cat((text.expand(len(candidates), -1), candidates[:, None]), dim=1)
    after = model(input_ids=longer, use_cache=False).logits[:, -1, candidates].double() / temperature

    def entropy(subset: tuple[int, ...]) -> float:
        chosen = list(subset)
        first, second = logits[candidates[chosen]].softmax(0), after[chosen][:, chosen].softmax(-1)
        joint = first[:, None] * second
        return float(-torch.xlogy(joint, joint).sum())

    best = max(itertools.combinations(range(len(candidates)), top), key=entropy)
    return candidates[list(best)].tolist()


NextLogits = Callable[[Sequence[tuple[int, ...]]], Tensor]
"""Function that returns the logits ``[n, V]`` after the prompt and each of n equally long continuations."""


@torch.inference_mode()
def distribution(
    model: Any, prompt: Sequence[int], tokens: int, allowed: Sequence[int], temperature: float = 1.0,
    cached: bool = False,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """Return the exact probability of every sequence of ``tokens`` allowed tokens.

    Each forward pass processes whole sequences. With ``cached`` it processes the tokens after the prompt, one
    sequence at a time.
    """
    next_logits = _cached(model, prompt) if cached else _uncached(model, prompt)
    return probabilities(next_logits, tokens, allowed, temperature)


@torch.inference_mode()
def probabilities(
    next_logits: NextLogits, tokens: int, allowed: Sequence[int], temperature: float
) -> dict[tuple[int, ...], float]:
    """Return the probability of every sequence of ``tokens`` allowed tokens, from their logits."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        logits = next_logits([*found])[:, list(allowed)].double() / temperature
        found = {
            (*prefix, token): p_prefix * p_token
            for (prefix, p_prefix), row in zip(found.items(), logits.softmax(-1).tolist(), strict=True)
            for token, p_token in zip(allowed, row, strict=True)
        }
    return found


def forward_passes(scorer: Scorer, prompt: Sequence[int]) -> tuple[NextLogits, NextLogits]:
    """Return the forward passes of the model without a KV cache, and those of the scorer."""
    return _uncached(scorer.model, prompt), _scored(scorer, prompt)


def _uncached(model: Any, prompt: Sequence[int]) -> NextLogits:
    device = model.get_input_embeddings().weight.device
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def next_logits(continuations: Sequence[tuple[int, ...]]) -> Tensor:
        ids = torch.tensor([[*prompt, *tokens] for tokens in continuations], device=device)
        parts = torch.split(ids, 64)
        return torch.cat([model(input_ids=part, use_cache=False, **last).logits[:, -1] for part in parts])

    return next_logits


def _cached(model: Any, prompt: Sequence[int]) -> NextLogits:
    device = model.get_input_embeddings().weight.device
    prefilled = model(input_ids=torch.tensor([list(prompt)], device=device), use_cache=True)

    def next_logits(continuations: Sequence[tuple[int, ...]]) -> Tensor:
        logits: list[Tensor] = [] if continuations != [()] else [prefilled.logits[0, -1]]
        for tokens in filter(None, continuations):
            ids, cache = torch.tensor([tokens], device=device), copy.deepcopy(prefilled.past_key_values)
            logits.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1])
        return torch.stack(logits)

    return next_logits


def _scored(scorer: Scorer, prompt: Sequence[int]) -> NextLogits:
    def next_logits(continuations: Sequence[tuple[int, ...]]) -> Tensor:
        rows = []
        for tokens in continuations:
            rows.append(scorer.prefill([0], [[*prompt, *tokens]])[0])
            scorer.reset([0])
        return torch.stack(rows)

    return next_logits

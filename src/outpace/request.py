"""What a caller asks for, checked, as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from outpace.arguments import integer, kind, signed
from outpace.models.causal import CausalScorer
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.models.source import Source
from outpace.rows import Row
from outpace.sampling import Processor, Sampling, from_generation_config, per_row
from outpace.text import Text

MAX_NEW_TOKENS = 256  # where neither the caller nor the model says
Prompt = str | Sequence[int] | Tensor | Source
Prompts = list[str] | list[list[int]] | list[Tensor] | list[Source] | list[Prompt]


class Options(TypedDict, total=False):
    """What `generate` and `stream` take by name: see there. The last nine are the fields of `Sampling`."""

    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_tokens: Sequence[int]
    ignore_eos: bool
    seed: int | Sequence[int] | None
    logprobs: bool | int
    scores: bool
    logits: bool
    stop_when: Callable[[Row], bool] | None
    batch_size: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    processors: Sequence[Processor]


@dataclass(frozen=True)
class Reader:
    """Knows of a decoder what a request has to fit."""

    scorer: CausalScorer
    tokenizer: Any
    draft_sampling: Sampling | None

    def rows(
        self,
        prompt: Prompt | Prompts,
        sampling: Sampling | Sequence[Sampling] | None,
        n: int | None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int | Sequence[int] | None = None,
        logprobs: bool | int = False,
        scores: bool = False,
        logits: bool = False,
        stop_when: Callable[[Row], bool] | None = None,
        batch_size: int | None = None,
        **fields: Any,
    ) -> tuple[list[Row], bool]:
        """The rows that a call asks for, and whether it named a single prompt."""
        single = not _is_batch(prompt)
        each: Any = [prompt] if single else prompt
        read = [self._read(one) for one in each]
        prompts = [tokens for tokens, _ in read]
        unknown = set(fields) - {one.name for one in dataclasses.fields(Sampling)}
        if unknown:
            raise TypeError(f"{unknown.pop()}: no such argument")
        if sampling is not None and fields:
            raise ValueError(f"sampling: given together with {', '.join(fields)}; give one or the other")
        if sampling is None:
            sampling = Sampling(**fields) if fields else from_generation_config(self.scorer.generation_config)
        samplings = per_row(sampling, len(prompts))
        if max_new_tokens is None:
            max_new_tokens = getattr(self.scorer.generation_config, "max_new_tokens", None) or MAX_NEW_TOKENS
        integer("max_new_tokens", max_new_tokens, "an int >= 1", lambda m: m >= 1)
        if n is not None:
            integer("n", n, "an int >= 1", lambda n: n >= 1)
        if batch_size is not None:
            integer("batch_size", batch_size, "an int >= 1", lambda b: b >= 1)
        if not isinstance(logprobs, bool):
            fits = f"True, False, or an int in 0..{self.scorer.vocab_size}"
            integer("logprobs", logprobs, fits, lambda k: 0 <= k <= self.scorer.vocab_size)
        stops: list[Any] = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else list(stop)
        stops = [] if stop is None else stops
        if not all(isinstance(one, str) and one for one in stops):
            raise ValueError(f"stop: got {stop!r}; it must be a string that is not empty, or several")
        if stops and self.tokenizer is None:
            raise ValueError(
                "stop: stop strings need a tokenizer; pass tokenizer= to Decoder, or stop_tokens="
            )
        if isinstance(stop_tokens, int):
            stop_tokens = [stop_tokens]
        V = self.scorer.vocab_size
        for token in stop_tokens:
            integer("stop_tokens", token, f"token ids in 0..{V - 1}", lambda t: 0 <= t < V)
        ends = set(stop_tokens) | (set() if ignore_eos else self.scorer.end_of_text)
        special = set(getattr(self.tokenizer, "all_special_tokens", ())) & set(stops)
        ends |= {self.tokenizer.convert_tokens_to_ids(one) for one in special}  # text does not show those
        rows: list[Row] = []
        for i, tokens in enumerate(prompts):
            one = samplings[i if len(samplings) > 1 else 0]
            for sample in range(n or 1):
                rows.append(
                    Row(
                        len(rows),
                        list(tokens),
                        len(tokens),
                        one.fork() if one.processors else one,
                        self.draft_sampling and self.draft_sampling.fork(),
                        seed_of(seed, i, sample, len(prompts)),
                        max_new_tokens,
                        frozenset(ends),
                        None if self.tokenizer is None else Text(self.tokenizer, stops),
                        None if logprobs is False else int(logprobs) if logprobs is not True else 0,
                        stop_when,
                        [] if scores else None,
                        [] if logits else None,
                        read[i][1],
                    )
                )
        return rows, single

    def _read(self, prompt: Prompt) -> tuple[list[int], Source | None]:
        """What the decoder goes on from, and what it writes about."""
        if not isinstance(self.scorer, Seq2SeqScorer):
            return self.encode(prompt), None
        source = self.scorer.source(self._ids(prompt) if isinstance(prompt, str) else prompt)
        return self._fitting(source.start or []), source

    def _ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "prompt: got a string, and the Decoder has no tokenizer; pass tokenizer=, or ids"
            )
        return list(self.tokenizer(text).input_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt that this decoder can go on from."""
        if isinstance(prompt, str):
            tokens = self._ids(prompt)
        else:
            values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if not isinstance(values, list | tuple) or not all(isinstance(one, int) for one in values):
                raise TypeError(
                    f"prompt: got {kind(prompt)[:80]}; it must be a string, a list of token ids, "
                    "a 1-D tensor, or a list of those"
                )
            tokens = list(values)
        return self._fitting(tokens)

    def _fitting(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise ValueError("prompt: it is empty; a model needs at least one token to go on from")
        if len(tokens) >= self.scorer.context:
            raise ValueError(
                f"prompt: got {len(tokens)} tokens; the model's context holds {self.scorer.context}, "
                "new ones included"
            )
        V = self.scorer.vocab_size
        if min(tokens) < 0 or max(tokens) >= V:
            raise ValueError(f"prompt: got ids {min(tokens)}..{max(tokens)}; the model knows 0..{V - 1}")
        return tokens


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and not isinstance(prompt[0], int)


def seed_of(seed: int | Sequence[int] | None, prompt: int, sample: int, prompts: int) -> int:
    """The seed of a prompt's sample: the first has the seed itself."""
    if seed is None:
        return int(torch.randint(-(2**63), 2**63 - 1, ()))
    if isinstance(seed, Sequence) and len(seed) != prompts:
        raise ValueError(f"seed: got {len(seed)} for {prompts} prompts; give one int, or one per prompt")
    one = seed[prompt] if isinstance(seed, Sequence) else seed
    one = one.item() if hasattr(one, "item") else one  # NumPy's and PyTorch's numbers
    fits = "an int in -2**63..2**64-1, or one per prompt"
    integer("seed", one, fits, lambda s: -(2**63) <= s < 2**64)
    return signed((one + sample * 0x9E3779B97F4A7C15) % 2**64)

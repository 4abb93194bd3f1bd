"""Requests: the checked arguments of a call, as sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy.typing as npt
import torch
from torch import Tensor

from outpace.checks.arguments import boolean, integer, kind, signed, unknown
from outpace.engine import prompts
from outpace.engine.sequence import SequenceState
from outpace.engine.text import Detokenizer
from outpace.models.scorer import Scorer
from outpace.models.source import Source
from outpace.sampling import Processor, SamplingParams, from_generation_config, per_row

MAX_NEW_TOKENS = 256  # default, if neither the caller nor the generation config sets it
Messages = list[dict[str, Any]]
"""A conversation: ``[{"role": "user", "content": "Hello"}]``."""
Prompt = str | Sequence[int] | Messages | Source
Prompts = list[str] | list[list[int]] | list[Messages] | list[Tensor] | list[Source] | list[Prompt]
Arrays = Tensor | npt.NDArray[Any] | Mapping[str, Any]
"""A prompt, or several, by shape: ``[n]`` and ``[1, n]`` are one, ``[B, n]`` is B."""


class Options(TypedDict, total=False):
    """Keyword arguments of ``Decoder.generate`` and ``Decoder.stream``, documented there.

    The last nine are the fields of ``SamplingParams``.
    """

    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_tokens: int | Sequence[int] | None
    ignore_eos: bool
    seed: int | Sequence[int] | None
    logprobs: bool | int
    scores: bool
    logits: bool
    stop_when: Callable[[SequenceState], bool] | None
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
    """Reader of requests: it checks the arguments of a call and returns its sequences.

    Attributes:
        scorer: The target.
        tokenizer: The target's tokenizer, or None.
        draft_sampling: The drafter's sampling parameters. None: the target's.
        match: Whether sequences have rule ``match``. None: those with a seed have it.
    """

    scorer: Scorer
    tokenizer: Any
    draft_sampling: SamplingParams | None
    match: bool | None = None

    def sequences(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int | None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_tokens: int | Sequence[int] | None = (),
        ignore_eos: bool = False,
        seed: int | Sequence[int] | None = None,
        logprobs: bool | int = False,
        scores: bool = False,
        logits: bool = False,
        stop_when: Callable[[SequenceState], bool] | None = None,
        batch_size: int | None = None,
        **fields: Any,
    ) -> tuple[list[SequenceState], bool]:
        """Return the sequences of a call, and whether the call passed a single prompt.

        The arguments are those of ``Decoder.generate``. A single prompt that cannot be read raises its error.
        In a list, its sequences have ``finish_reason`` "error" instead.
        """
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        for name in fields:
            if name not in names:
                raise unknown(name, [*Options.__annotations__, "n", "sampling"])
        if sampling is not None and fields:
            raise ValueError(f"sampling: got it together with {', '.join(fields)}; pass one or the other")
        items, single = prompts.split(prompt)
        if sampling is None:
            sampling = (
                SamplingParams(**fields) if fields else from_generation_config(self.scorer.generation_config)
            )
        samplings = per_row(sampling, len(items))
        if max_new_tokens is None:
            max_new_tokens = getattr(self.scorer.generation_config, "max_new_tokens", None) or MAX_NEW_TOKENS
        integer("max_new_tokens", max_new_tokens, "an int >= 1", lambda m: m >= 1)
        if n is not None:
            integer("n", n, "an int >= 1", lambda n: n >= 1)
        if batch_size is not None:
            integer("batch_size", batch_size, "an int >= 1", lambda b: b >= 1)
        for name, value in (("ignore_eos", ignore_eos), ("scores", scores), ("logits", logits)):
            boolean(name, value)
        if not isinstance(logprobs, bool):
            expected = f"True, False, or an int in 0..{self.scorer.vocab_size}"
            integer("logprobs", logprobs, expected, lambda k: 0 <= k <= self.scorer.vocab_size)
        if stop_when is not None and not callable(stop_when):
            raise TypeError(
                f"stop_when: got {kind(stop_when)[:80]}; it must be a function of a SequenceState"
            )
        stops = self._stops(stop)
        end_ids = set(self._stop_tokens(stop_tokens)) | (set() if ignore_eos else self.scorer.end_of_text)
        special = set(getattr(self.tokenizer, "all_special_tokens", ())) & set(stops)
        end_ids |= {self.tokenizer.convert_tokens_to_ids(token) for token in special}  # not part of the text
        sequences: list[SequenceState] = []
        for i, item in enumerate(items):
            tokens, source, error = list[int](), None, None
            try:
                tokens, source = self._read(item)
            except Exception as raised:  # a tokenizer may raise anything
                if single:
                    raise
                error = raised
            own = samplings[i if len(samplings) > 1 else 0]
            if error is None and (error := self._unsupported(own)) is not None and single:
                raise error
            for sample in range(n or 1):
                sequences.append(
                    SequenceState(
                        len(sequences),
                        list(tokens),
                        len(tokens),
                        own.fork() if own.processors else own,
                        self.draft_sampling and self.draft_sampling.fork(),
                        seed_of(seed, i, sample, len(items)),
                        seed is not None if self.match is None else self.match,
                        max_new_tokens,
                        frozenset(end_ids),
                        None if self.tokenizer is None else Detokenizer(self.tokenizer, stops),
                        None if logprobs is False else int(logprobs) if logprobs is not True else 0,
                        stop_when,
                        [] if scores else None,
                        [] if logits else None,
                        source,
                        finish_reason=None if error is None else "error",
                        error=error,
                    )
                )
        return sequences, single

    def _unsupported(self, sampling: SamplingParams) -> Exception | None:
        """Return the error of sampling parameters that do not fit the model, or None if they fit."""
        V = self.scorer.vocab_size
        beyond = [token for token in sampling.logit_bias or () if token >= V]
        return (
            ValueError(f"logit_bias: got token ids {beyond}; they must be in 0..{V - 1}") if beyond else None
        )

    def _stops(self, stop: Any) -> list[str]:
        """Return the stop strings."""
        stops = one_or_several(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"stop: got {stop!r}; it must be a non-empty string, or a list of them")
        if stops and self.tokenizer is None:
            raise ValueError(
                "stop: got a string, and the Decoder has no tokenizer; pass tokenizer= to Decoder, or use "
                "stop_tokens="
            )
        return stops

    def _stop_tokens(self, tokens: Any) -> list[int]:
        """Return the token ids that end a sequence, in addition to the model's own."""
        ids = one_or_several(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
        V = self.scorer.vocab_size
        for token in ids:
            integer("stop_tokens", token, f"token ids in 0..{V - 1}", lambda t: 0 <= t < V)
        return ids

    def _read(self, prompt: Any) -> tuple[list[int], Source | None]:
        """Return the tokens that decoding starts from, and the encoder's input; None without an encoder."""
        prompt = prompts.single_prompt(prompt)
        if not self.scorer.has_encoder:
            return self._checked(prompts.token_ids(prompt, self.tokenizer)), None
        source = self._source(prompt)
        return self._checked(source.start or []), source

    def _source(self, prompt: Any) -> Source:
        """Return the encoder's input."""
        if isinstance(prompt, Source) or prompts.is_features(prompt):
            return self.scorer.source(prompt)
        if self.scorer.takes_speech:
            raise TypeError(
                f"prompt: got {kind(prompt)[:80]}; it must be features of speech [bins, frames], as the "
                "model's feature extractor returns them"
            )
        return self.scorer.source(prompts.token_ids(prompt, self.tokenizer))

    def encode(self, prompt: Prompt | Arrays | Prompts) -> list[int] | list[list[int]]:
        """Return the token ids of a prompt, or of each prompt of a list."""
        items, single = prompts.split(prompt)
        ids = [self._encode_one(item) for item in items]
        return ids[0] if single else ids

    def _encode_one(self, prompt: Any) -> list[int]:
        tokens, source = self._read(prompt)
        if source is None:
            return tokens
        if source.ids is None:
            raise TypeError("prompt: got features of speech; it must be text or token ids")
        return source.ids

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise ValueError("prompt: it is empty; it must have at least one token")
        if len(tokens) >= self.scorer.context:
            raise ValueError(
                f"prompt: got {len(tokens)} tokens; it must be less than the model's context of "
                f"{self.scorer.context} tokens"
            )
        V = self.scorer.vocab_size
        if min(tokens) < 0 or max(tokens) >= V:
            raise ValueError(f"prompt: got ids {min(tokens)}..{max(tokens)}; they must be in 0..{V - 1}")
        return tokens


def one_or_several(values: Any) -> list[Any]:
    """Return the values of an argument that is None, a value, or several values."""
    if values is None:
        return []
    several = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    return list(values) if several else [values]


def seed_of(seed: int | Sequence[int] | None, prompt: int, sample: int, prompts: int) -> int:
    """Return the seed of one sample of a prompt; the first sample uses the given seed unchanged.

    Args:
        seed: One seed, or one per prompt. None: a random seed.
        prompt: Index of the prompt.
        sample: Index of the sample.
        prompts: Number of prompts.
    """
    if seed is None:
        return int(torch.randint(-(2**63), 2**63 - 1, ()))
    seed = seed.tolist() if hasattr(seed, "tolist") else seed  # arrays of NumPy and PyTorch
    if isinstance(seed, Sequence) and len(seed) != prompts:
        raise ValueError(
            f"seed: got {len(seed)} for {prompts} prompts; it must be one int, or one per prompt"
        )
    own = seed[prompt] if isinstance(seed, Sequence) else seed
    own = own.item() if hasattr(own, "item") else own
    expected = "an int in -2**63..2**64-1, or one per prompt"
    integer("seed", own, expected, lambda s: -(2**63) <= s < 2**64)
    return signed((own + sample * 0x9E3779B97F4A7C15) % 2**64)

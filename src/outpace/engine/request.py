"""Requests: the checked arguments of a call, as sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from outpace.checks.arguments import boolean, integer, kind, signed, unknown
from outpace.engine import prompts
from outpace.engine.sequence import PromptLogprobs, SequenceState
from outpace.engine.text import Detokenizer
from outpace.models.scorer import Scorer
from outpace.models.source import Source
from outpace.sampling import Processor, SamplingParams, from_generation_config, per_row

T = TypeVar("T")
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

    max_new_tokens: int | Sequence[int | None] | None
    stop: str | Sequence[str] | Sequence[Sequence[str] | None] | None
    stop_tokens: int | Sequence[int] | None
    ignore_eos: bool
    seed: int | Sequence[int | None] | None
    logprobs: bool | int | Sequence[bool | int]
    prompt_logprobs: bool | int | Sequence[bool | int]
    scores: bool
    logits: bool
    stop_when: Callable[[SequenceState], bool] | None
    batch_size: int | None
    num_draft_tokens: int | str | Sequence[int | str | None] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    processors: Sequence[Processor]
    allowed_token_ids: Collection[int] | None


@dataclass(frozen=True)
class Reader:
    """Reader of requests: it checks the arguments of a call and returns its sequences.

    Attributes:
        scorer: The target.
        tokenizer: The target's tokenizer, or None.
        draft_sampling: The drafter's sampling parameters. None: the target's.
        match: Whether sequences have rule ``match``. None: those with a seed have it.
        most_draft_tokens: Largest number of draft tokens that a request may set. None: no drafter.
    """

    scorer: Scorer
    tokenizer: Any
    draft_sampling: SamplingParams | None
    match: bool | None = None
    most_draft_tokens: int | None = None

    def sequences(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int | None,
        *,
        max_new_tokens: int | Sequence[int | None] | None = None,
        stop: str | Sequence[str] | Sequence[Sequence[str] | None] | None = None,
        stop_tokens: int | Sequence[int] | None = (),
        ignore_eos: bool = False,
        seed: int | Sequence[int | None] | None = None,
        logprobs: bool | int | Sequence[bool | int] = False,
        prompt_logprobs: bool | int | Sequence[bool | int] = False,
        scores: bool = False,
        logits: bool = False,
        stop_when: Callable[[SequenceState], bool] | None = None,
        batch_size: int | None = None,
        num_draft_tokens: int | str | Sequence[int | str | None] | None = None,
        **fields: Any,
    ) -> tuple[list[SequenceState], bool]:
        """Return the sequences of a call, and whether the call passed a single prompt.

        The arguments are those of ``Decoder.generate``. A single prompt that cannot be read, or that has a
        wrong argument, raises its error. In a list, its sequences have ``finish_reason`` "error" instead.
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
        if n is not None:
            integer("n", n, "an int >= 1", lambda n: n >= 1)
        if batch_size is not None:
            integer("batch_size", batch_size, "an int >= 1", lambda b: b >= 1)
        for name, value in (("ignore_eos", ignore_eos), ("scores", scores), ("logits", logits)):
            boolean(name, value)
        if stop_when is not None and not callable(stop_when):
            raise TypeError(
                f"stop_when: got {kind(stop_when)[:80]}; it must be a function of a SequenceState"
            )
        count = len(items)
        lengths = per_prompt("max_new_tokens", max_new_tokens, count, self._max_new_tokens, "one int")
        read_stops = self._own_stops if has_stops_per_prompt(stop) else self._stops
        stops = per_prompt("stop", stop, count, read_stops, "one set of strings", has_stops_per_prompt(stop))
        tops = per_prompt("logprobs", logprobs, count, self._logprobs)
        prompt_tops = per_prompt("prompt_logprobs", prompt_logprobs, count, self._prompt_logprobs)
        seeds = per_prompt("seed", seed, count, checked_seed, "one int")
        drafts = per_prompt("num_draft_tokens", num_draft_tokens, count, self._num_draft_tokens)
        end_ids = frozenset(self._stop_tokens(stop_tokens))
        end_ids |= frozenset() if ignore_eos else self.scorer.end_of_text
        special = set(getattr(self.tokenizer, "all_special_tokens", ()))
        sequences: list[SequenceState] = []
        for i, item in enumerate(items):
            tokens, source, error = list[int](), None, None
            most, own_stops, top, prompt_top, seed_given, g = 1, tuple[str, ...](), None, None, None, None
            own_sampling = samplings[i if len(samplings) > 1 else 0]
            try:
                most, own_stops, top = lengths(i), stops(i), tops(i)
                prompt_top, seed_given, g = prompt_tops(i), seeds(i), drafts(i)
                tokens, source = self._read(item)
                self.check_supported(own_sampling)
            except Exception as raised:  # a tokenizer may raise anything
                if single:
                    raise
                error = raised
            ends = special.intersection(own_stops)  # stop strings that are no part of the text
            own_end_ids = end_ids | {self.tokenizer.convert_tokens_to_ids(token) for token in ends}
            scored = None if prompt_top is None else PromptLogprobs(prompt_top)
            for sample in range(n or 1):
                sequences.append(
                    SequenceState(
                        len(sequences),
                        list(tokens),
                        len(tokens),
                        own_sampling.fork() if own_sampling.processors else own_sampling,
                        self.draft_sampling and self.draft_sampling.fork(),
                        seed_of(seed_given, sample),
                        seed_given is not None if self.match is None else self.match,
                        most,
                        own_end_ids,
                        None if self.tokenizer is None else Detokenizer(self.tokenizer, own_stops),
                        top,
                        stop_when,
                        [] if scores else None,
                        [] if logits else None,
                        source,
                        scored,
                        g,
                        finish_reason=None if error is None else "error",
                        error=error,
                    )
                )
        return sequences, single

    # Arguments that each prompt may have of its own

    def _max_new_tokens(self, most: Any) -> int:
        if most is None:
            most = getattr(self.scorer.generation_config, "max_new_tokens", None) or MAX_NEW_TOKENS
        integer("max_new_tokens", most, "an int >= 1", lambda m: m >= 1)
        return int(most)

    def _stops(self, stop: Any) -> tuple[str, ...]:
        """Return the stop strings."""
        stops = tuple(one_or_several(stop))
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"stop: got {stop!r}; it must be a non-empty string, or a list of them")
        if stops and self.tokenizer is None:
            raise ValueError(
                "stop: got a string, and the Decoder has no tokenizer; pass tokenizer= to Decoder, or use "
                "stop_tokens="
            )
        return stops

    def _own_stops(self, stop: Any) -> tuple[str, ...]:
        """Return the stop strings of one prompt, from a list with one entry per prompt."""
        if stop is not None and not isinstance(stop, list | tuple):
            raise ValueError(
                f"stop: got {stop!r} in a list with one entry per prompt; it must be None or a list of "
                "strings"
            )
        return self._stops(stop)

    def _logprobs(self, top: Any) -> int | None:
        return self._top("logprobs", top)

    def _prompt_logprobs(self, top: Any) -> int | None:
        most = self._top("prompt_logprobs", top)
        if most is not None and self.scorer.has_encoder:
            raise ValueError(
                f"prompt_logprobs: got {top!r}; {type(self.scorer.base).__name__} has an encoder, whose "
                "input has no log-probabilities; leave it out"
            )
        return most

    def _num_draft_tokens(self, g: Any) -> int | None:
        """Return the number of draft tokens of each step; None if the draft-length policy chooses it."""
        if g in (None, "auto"):
            return None
        most = 0 if self.most_draft_tokens is None else self.most_draft_tokens
        expected = f'"auto", or an int in 0..{most}'
        if self.most_draft_tokens is None:
            expected = '"auto" or 0, because this Decoder has no draft'
        integer("num_draft_tokens", g, expected, lambda g: 0 <= g <= most)
        return int(g)

    def _top(self, name: str, top: Any) -> int | None:
        """Return how many of the likeliest tokens get log-probabilities; None without log-probabilities."""
        if isinstance(top, bool):
            return 0 if top else None
        most = self.scorer.vocab_size
        integer(name, top, f"True, False, or an int in 0..{most}", lambda k: 0 <= k <= most)
        return int(top)

    def check_supported(self, sampling: SamplingParams) -> None:
        """Raise if sampling parameters do not fit the model."""
        sampling.check_vocabulary(self.scorer.vocab_size)

    # Arguments that all prompts share

    def _stop_tokens(self, tokens: Any) -> list[int]:
        """Return the token ids that end a sequence, in addition to the model's own."""
        ids = one_or_several(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
        V = self.scorer.vocab_size
        for token in ids:
            integer("stop_tokens", token, f"token ids in 0..{V - 1}", lambda t: 0 <= t < V)
        return ids

    # Prompts

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


def per_prompt(
    name: str,
    value: Any,
    prompts: int,
    read: Callable[[Any], T],
    fits: str = "one value",
    several: bool | None = None,
) -> Callable[[int], T]:
    """Return a function of a prompt's index that returns the prompt's value of an argument.

    A wrong value for all prompts raises at once. A wrong value for one prompt raises when it is read.

    Args:
        name: Name of the argument.
        value: One value for all prompts, or a list of one per prompt.
        prompts: Number of prompts.
        read: Checks a value, and returns it in the form that sequences have.
        fits: Words for a value for all prompts.
        several: Whether ``value`` is a list of one per prompt. None: if it is a list or an array.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy and PyTorch
    if several is None:
        several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not several:
        shared = read(value)
        return lambda prompt: shared
    if len(value) != prompts:
        raise ValueError(
            f"{name}: got {len(value)} for {prompts} prompts; it must be {fits}, or one per prompt"
        )
    return lambda prompt: read(value[prompt].item() if hasattr(value[prompt], "item") else value[prompt])


def has_stops_per_prompt(stop: Any) -> bool:
    """Return whether stop strings are given per prompt; a list of strings is one set for all prompts."""
    return isinstance(stop, list | tuple) and any(isinstance(one, list | tuple | None) for one in stop)


def checked_seed(seed: Any) -> int | None:
    """Return a seed, or None for a random one."""
    if seed is None:
        return None
    expected = "an int in -2**63..2**64-1, or one per prompt"
    integer("seed", seed, expected, lambda s: -(2**63) <= s < 2**64)
    return int(seed)


def seed_of(seed: int | None, sample: int) -> int:
    """Return the seed of one sample of a prompt; the first sample uses the prompt's seed unchanged.

    Args:
        seed: The prompt's seed. None: a random seed.
        sample: Index of the sample.
    """
    if seed is None:
        return int(torch.randint(-(2**63), 2**63 - 1, ()))
    return signed((seed + sample * 0x9E3779B97F4A7C15) % 2**64)

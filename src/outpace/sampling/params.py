"""Sampling parameters: the distribution that a user asks of the next token."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outpace.checks.arguments import integer, kind, number, suggests
from outpace.checks.errors import RANGES

Processor = Callable[[Tensor, Tensor], Tensor]
"""``(input_ids [1, T], scores [1, V]) -> scores [1, V]``: any Transformers ``LogitsProcessor``."""

Rewind = Callable[[Tensor], None]

PENALTIES = "repetition_penalty", "frequency_penalty", "presence_penalty"


@dataclass(frozen=True)
class SamplingParams:
    """Parameters that tokens are sampled with.

    The defaults leave the model's distribution as it is.

    A processor that keeps state in its own attributes serves a single sequence: give each sequence its own
    ``sampling.fork()``. With speculation, the processor also sees draft tokens that are rejected later.
    After each verification its state is set back to where decoding without speculation would have left it.
    If several sequences share a processor, each sequence uses a copy of it, and no state is kept.

    Attributes:
        temperature: Divides the logits. 0 is greedy; ``top_k``, ``top_p`` and ``min_p`` then have no effect.
        top_k: Keep the k likeliest tokens. 0 keeps all.
        top_p: Keep the likeliest tokens that together reach this probability. 1 keeps all.
        min_p: Keep tokens at least this many times as likely as the likeliest. 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output. 1
            is off.
        frequency_penalty: Subtracted once per occurrence in the output. 0 is off.
        presence_penalty: Subtracted once if the token occurs in the output. 0 is off.
        logit_bias: Token ids and the numbers added to their logits. -inf forbids a token.
        allowed_token_ids: The only tokens that may be generated. None allows all.
        processors: Transformers ``LogitsProcessor`` objects, or callables of the same form, applied in this
            order.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    processors: Sequence[Processor] = ()
    allowed_token_ids: Collection[int] | None = None

    def __post_init__(self) -> None:
        integer("top_k", self.top_k, *RANGES["top_k"])
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            number(name, getattr(self, name), *RANGES[name])
        if not isinstance(self.logit_bias, Mapping | None):
            raise TypeError(f"logit_bias: got {kind(self.logit_bias)}; it must map token ids to numbers")
        for token, bias in (self.logit_bias or {}).items():
            integer("logit_bias", token, "keyed by token ids >= 0", lambda t: t >= 0)
            number(f"logit_bias[{token}]", bias, *RANGES["logit_bias"])
        allowed = None if self.allowed_token_ids is None else _token_ids(self.allowed_token_ids)
        if not isinstance(self.processors, Sequence):
            raise TypeError(f"processors: got {kind(self.processors)}; it must be a list of LogitsProcessors")
        flat: list[Processor] = []
        for processor in self.processors:
            flat.extend(processor if isinstance(processor, list) else [processor])  # a LogitsProcessorList
        for processor in flat:
            if not callable(processor):
                raise TypeError(f"processors: got {kind(processor)}; each must be a LogitsProcessor")
        # Copies, so that checked values cannot change later.
        object.__setattr__(self, "processors", tuple(flat))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias) if self.logit_bias else None)
        object.__setattr__(self, "allowed_token_ids", allowed)

    @property
    def greedy(self) -> bool:
        """True if the temperature is 0: the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def neutral(self) -> bool:
        """True if these parameters leave the logits as they are."""
        return (self.temperature, self.top_k, self.top_p, self.min_p) == (1, 0, 1, 0) and not self.edits

    @cached_property
    def shape(self) -> SamplingParams:
        """Temperature, top-k, top-p and min-p alone: the part that needs no prefix."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def edits(self) -> bool:
        """True if single logits change: there are bias, allowed tokens, penalties or processors."""
        return bool(self.logit_bias or self.allowed_token_ids is not None or self.reads_prefix)

    @cached_property
    def _largest_id(self) -> int:
        return max((*(self.logit_bias or ()), *(self.allowed_token_ids or ())), default=-1)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise if bias or allowed tokens have ids beyond a vocabulary."""
        if self._largest_id < vocab_size:
            return
        for name in ("logit_bias", "allowed_token_ids"):
            if beyond := sorted(token for token in getattr(self, name) or () if token >= vocab_size):
                more = f" and {len(beyond) - 10} more" if len(beyond) > 10 else ""
                raise ValueError(
                    f"{name}: got token ids {beyond[:10]}{more}; they must be in 0..{vocab_size - 1}"
                )

    @cached_property
    def _forbidden(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def forbidden(self, vocab_size: int, device: torch.device) -> Tensor:
        """Return which tokens ``allowed_token_ids`` forbids, bool ``[V]``. It is computed once."""
        key = vocab_size, device
        if key not in self._forbidden:
            with torch.inference_mode(False):
                forbidden = torch.ones(vocab_size, dtype=torch.bool)
                forbidden[list(self.allowed_token_ids or ())] = False
                self._forbidden[key] = forbidden.to(device)
        return self._forbidden[key]

    @property
    def reads_prefix(self) -> bool:
        """True if the adjustment depends on earlier tokens."""
        return bool(self.processors) or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        """True if there is a repetition, frequency or presence penalty."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)

    def fork(self) -> SamplingParams:
        """Return the same parameters with a copy of the processors' state.

        Models that the processors hold are shared.
        """
        if not self.processors:
            return self
        forked = copy.copy(self)  # nothing needs to be checked again
        vars(forked).update(_forbidden=self._forbidden, processors=copy_processors(self.processors))
        return forked

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone, for copies and pickles."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _token_ids(ids: Any) -> frozenset[int]:
    """Return ``allowed_token_ids`` as checked ints."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Collection) or isinstance(values, str | bytes | bytearray | Mapping):
        raise TypeError(f"allowed_token_ids: got {kind(ids)}; it must be a list of token ids")
    if not values:
        raise ValueError("allowed_token_ids: got none; give at least one token id, or None for all")
    if set(map(type, values)) != {int} or min(values) < 0:  # checked one by one, to name the wrong one
        for token in values:
            integer("allowed_token_ids", token, "token ids >= 0", lambda t: t >= 0)
    return frozenset(map(int, values))


SamplingParams.__init__ = suggests(SamplingParams.__init__)  # type: ignore[method-assign]


def per_row(
    sampling: SamplingParams | Sequence[SamplingParams], rows: int, name: str = "sampling"
) -> list[SamplingParams]:
    """Return one ``SamplingParams`` for all rows, or one per row, as a list of 1 or ``rows``."""
    samplings = list(sampling) if isinstance(sampling, Sequence) else [sampling]
    for one in samplings:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"{name}: got {kind(one)}; it must be SamplingParams, or one per sequence")
    if isinstance(sampling, Sequence) and len(samplings) != rows:
        raise ValueError(f"{name}: got {len(samplings)} for {rows} rows; give one for all, or one per row")
    return samplings


def copy_processors(processors: Sequence[Processor]) -> tuple[Processor, ...]:
    """Return copies of processors, each with state of its own.

    Models are shared: they are large, and not a processor's state.
    """
    shared: dict[int, Any] = {}

    def share(value: object, depth: int = 0) -> None:
        if isinstance(value, torch.nn.Module):
            shared[id(value)] = value
        elif isinstance(value, list | tuple) and depth < 3:
            for one in value:
                share(one, depth + 1)
        elif isinstance(value, dict) and depth < 3:
            share(list(value.values()), depth)

    for processor in processors:
        share(getattr(processor, "__dict__", {}))
    try:
        return copy.deepcopy(tuple(processors), shared)
    except Exception as error:
        names = ", ".join(type(processor).__name__ for processor in processors)
        raise TypeError(
            f"processors: {names} cannot be copied ({error}); speculation sets a processor's state back "
            "after a rejected draft, so it needs a working copy.deepcopy"
        ) from error


_APPLIED = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_SHAPING = {  # with the values at which they have no effect
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    **dict.fromkeys(("top_h", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "min_new_tokens", "guidance_scale")),
}


def from_generation_config(config: Any) -> SamplingParams:
    """Return the ``SamplingParams`` that Transformers' ``generate`` uses with this configuration.

    A warning names settings that are not applied.
    """
    if config is None:
        return SamplingParams(temperature=0)
    ignored = [
        name for name, off in _SHAPING.items() if getattr(config, name, None) not in (None, off, [], {})
    ]
    if ignored:
        warnings.warn(
            f"generation_config: {', '.join(ignored)} not applied; pass them as processors of SamplingParams",
            stacklevel=4,
        )
    if not getattr(config, "do_sample", False):
        return SamplingParams(
            temperature=0, repetition_penalty=getattr(config, "repetition_penalty", None) or 1.0
        )
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    values = {name: getattr(config, name, None) for name in _APPLIED}
    values = {name: defaults.get(name) if value is None else value for name, value in values.items()}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})

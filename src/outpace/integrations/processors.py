"""Transformers' logits processors of a batch, as one ``SamplingParams`` per sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from outpace.sampling import Processor, SamplingParams

_WARPERS: list[tuple[Any, str]] = [  # in the order in which SamplingParams applies them
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
]


def samplings(
    processors: Sequence[Processor],
    do_sample: bool,
    input_ids: Tensor,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
) -> list[SamplingParams]:
    """Return what ``processors`` do to each sequence, as ``SamplingParams``.

    The results are equal by construction. Processors are called in their order, with the very ids that
    generation without speculation would show them, padding included. Two kinds are left to the batched code
    of ``SamplingParams``, and only where its order is theirs. The first is a repetition penalty that comes
    first, on sequences without padding. (Before Transformers 5.23 the penalty counts padding as text.) The
    second is what remains of temperature, top-k, top-p and min-p at the end, with their usual settings.
    tests/sampling/test_params.py shows that arithmetic and ties are Transformers' own.

    Args:
        processors: The processors that Transformers prepared.
        do_sample: Whether tokens are sampled. Otherwise decoding is greedy.
        input_ids: The prompts with padding, ``[R, T]``.
        prompts: The tokens of each sequence without padding.
        device: The device of the logits.
    """
    rows, width = input_ids.shape
    known = [_faster(one) for one in processors]
    shared: SamplingParams | None = None
    each = []
    for row, prompt in enumerate(prompts):
        own = [_of_row(one, row, rows) for one in known]
        if len(prompt) < width or input_ids.device != device:
            each.append(_sampling(own, do_sample, given=(input_ids[row : row + 1], len(prompt))))
        elif all(one is same for one, same in zip(own, known, strict=True)):
            shared = shared or _sampling(own, do_sample)
            each.append(shared)
        else:
            each.append(_sampling(own, do_sample))
    return each


def _sampling(
    processors: list[Processor], do_sample: bool, given: tuple[Tensor, int] | None = None
) -> SamplingParams:
    fields: dict[str, Any] = {} if do_sample else {"temperature": 0}
    last = len(_WARPERS)
    while do_sample and processors:
        place = _place(processors[-1])
        if place >= last:
            break
        name = _WARPERS[place][1]
        fields[name] = getattr(processors.pop(), name)
        last = place
    if given is not None:
        return SamplingParams(**fields, processors=[Given(*given, tuple(processors))] if processors else ())
    if processors and _is_plain_penalty(processors[0]):
        fields["repetition_penalty"] = processors.pop(0).penalty  # type: ignore[attr-defined]
    return SamplingParams(**fields, processors=processors)


def _place(processor: Any) -> int:
    """Return a processor's index among the warpers of ``SamplingParams``, or their number for any other."""
    usual = getattr(processor, "filter_value", -torch.inf) == -torch.inf
    usual = usual and getattr(processor, "min_tokens_to_keep", 1) == 1
    places = [i for i, (kind, _) in enumerate(_WARPERS) if type(processor) is kind and usual]
    return places[0] if places else len(_WARPERS)


def _is_plain_penalty(processor: Any) -> bool:
    return type(processor) is RepetitionPenaltyLogitsProcessor and not processor.prompt_ignore_length


def _faster(processor: Any) -> Any:
    """Return a processor that does the same faster, if there is one."""
    if _ignores_padding(processor) and not processor.prompt_ignore_length.any():
        return _ignoring(processor, 0)
    if type(processor) is SuppressTokensLogitsProcessor:
        return Suppressed(processor.suppress_tokens)
    if type(processor) is SuppressTokensAtBeginLogitsProcessor:
        return Suppressed(processor.begin_suppress_tokens, processor.begin_index)
    return processor


def _of_row(processor: Any, row: int, rows: int) -> Any:
    """Return a processor for one row if it depends on the rows of the batch; any other as it is."""
    if _ignores_padding(processor):
        return _ignoring(processor, int(_share(processor.prompt_ignore_length, row, rows)))
    if rows == 1:
        return processor
    own = copy.copy(processor)
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = _share(processor.encoder_input_ids, row, rows)
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        own.generated_ngrams = _share(processor.generated_ngrams, row, rows)
        own.batch_size = 1
    elif isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        own.unconditional_context = dict(processor.unconditional_context)
        for name in ("input_ids", "attention_mask"):
            if own.unconditional_context[name] is not None:
                own.unconditional_context[name] = _share(own.unconditional_context[name], row, rows)
    else:
        return processor
    return own


def _ignores_padding(processor: Any) -> bool:
    """Return whether a processor is a penalty that knows the padding of each row."""
    return isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
        getattr(processor, "prompt_ignore_length", None), Tensor
    )


def _ignoring(processor: Any, padding: int) -> Any:
    own = copy.copy(processor)
    own.prompt_ignore_length = padding or None
    return own


def _share(batch: Any, row: int, rows: int) -> Any:
    """Return a row's part of a batch with one entry per prompt, if all prompts have as many rows."""
    prompt = row * len(batch) // rows
    return batch[prompt : prompt + 1]


class Suppressed:
    """A processor that makes some tokens impossible, everywhere or at one length of the sequence.

    Transformers' own processor looks up each token of the vocabulary at every call. That takes longer than a
    forward pass of a small model.
    """

    def __init__(self, tokens: Tensor, length: int | None = None) -> None:
        self.tokens, self.length = tokens, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores with -inf for the suppressed tokens."""
        if self.length is not None and input_ids.shape[1] != self.length:
            return scores
        tokens = self.tokens.to(scores.device)
        known = tokens[(tokens >= 0) & (tokens < scores.shape[-1])]
        return scores.index_fill(-1, known, -torch.inf)


class Given:
    """A processor that shows others the prompt as it was passed: with padding, and on its device."""

    def __init__(self, prompt: Tensor, kept: int, processors: tuple[Processor, ...]) -> None:
        self.prompt, self.kept, self.processors = prompt, kept, processors  # [1, T], its unpadded length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply the processors to the prompt with padding and the new tokens."""
        ids = torch.cat((self.prompt, input_ids[:, self.kept :].to(self.prompt.device)), dim=1)
        processed = scores.to(ids.device)
        for processor in self.processors:
            processed = processor(ids, processed)
        return processed.to(scores.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Given:
        own = SamplingParams(processors=self.processors).fork().processors
        return Given(self.prompt, self.kept, tuple(own))

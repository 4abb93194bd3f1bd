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
    """Return the ``SamplingParams`` of each sequence that are equivalent to ``processors``.

    Processors are called in their order, with the ids that generation without speculation would pass, padding
    included.

    The batched code of ``SamplingParams`` replaces two kinds of processors, where the order allows it:

    - a repetition penalty that comes first, on sequences without padding (before Transformers 5.23, the
      penalty counts padding as text);
    - temperature, top-k, top-p and min-p at the end, with their default settings.

    tests/sampling/test_params.py shows that arithmetic and ties are Transformers' own.

    Args:
        processors: The processors that Transformers prepared.
        do_sample: Whether tokens are sampled. Otherwise decoding is greedy.
        input_ids: The prompts with padding, ``[R, T]``.
        prompts: The tokens of each sequence without padding.
        device: The device of the logits.
    """
    rows, width = input_ids.shape
    shared_processors = [_fast_equivalent(one) for one in processors]
    shared: SamplingParams | None = None
    per_row = []
    for row, prompt in enumerate(prompts):
        row_processors = [_for_row(one, row, rows) for one in shared_processors]
        if len(prompt) < width or input_ids.device != device:
            original_prompt = input_ids[row : row + 1], len(prompt)
            per_row.append(_sampling(row_processors, do_sample, original_prompt))
        elif all(one is same for one, same in zip(row_processors, shared_processors, strict=True)):
            shared = shared or _sampling(row_processors, do_sample)
            per_row.append(shared)
        else:
            per_row.append(_sampling(row_processors, do_sample))
    return per_row


def _sampling(
    processors: list[Processor], do_sample: bool, original_prompt: tuple[Tensor, int] | None = None
) -> SamplingParams:
    fields: dict[str, Any] = {} if do_sample else {"temperature": 0}
    last = len(_WARPERS)
    while do_sample and processors:
        index = _warper_index(processors[-1])
        if index >= last:
            break
        name = _WARPERS[index][1]
        fields[name] = getattr(processors.pop(), name)
        last = index
    if original_prompt is not None:
        wrapped = [OriginalPromptProcessor(*original_prompt, tuple(processors))] if processors else ()
        return SamplingParams(**fields, processors=wrapped)
    if processors and _counts_whole_prompt(processors[0]):
        fields["repetition_penalty"] = processors.pop(0).penalty  # type: ignore[attr-defined]
    return SamplingParams(**fields, processors=processors)


def _warper_index(processor: Any) -> int:
    """Return a processor's index among the warpers of ``SamplingParams``, or their number for any other."""
    default = getattr(processor, "filter_value", -torch.inf) == -torch.inf
    default = default and getattr(processor, "min_tokens_to_keep", 1) == 1
    indices = [i for i, (kind, _) in enumerate(_WARPERS) if type(processor) is kind and default]
    return indices[0] if indices else len(_WARPERS)


def _counts_whole_prompt(processor: Any) -> bool:
    """Return whether a processor is a repetition penalty for all tokens of the prompt."""
    return type(processor) is RepetitionPenaltyLogitsProcessor and not processor.prompt_ignore_length


def _fast_equivalent(processor: Any) -> Any:
    """Return a faster processor with the same effect if there is one, otherwise the processor itself."""
    if _knows_padding(processor) and not processor.prompt_ignore_length.any():
        return _ignoring_padding(processor, 0)
    if type(processor) is SuppressTokensLogitsProcessor:
        return Suppressed(processor.suppress_tokens)
    if type(processor) is SuppressTokensAtBeginLogitsProcessor:
        return Suppressed(processor.begin_suppress_tokens, processor.begin_index)
    return processor


def _for_row(processor: Any, row: int, rows: int) -> Any:
    """Return the processor for one row of the batch; unchanged if it does not depend on the row."""
    if _knows_padding(processor):
        return _ignoring_padding(processor, int(_part_of_row(processor.prompt_ignore_length, row, rows)))
    if rows == 1:
        return processor
    row_processor = copy.copy(processor)
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        row_processor._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        row_processor.encoder_input_ids = _part_of_row(processor.encoder_input_ids, row, rows)
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        row_processor.generated_ngrams = _part_of_row(processor.generated_ngrams, row, rows)
        row_processor.batch_size = 1
    elif isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        row_processor.unconditional_context = dict(processor.unconditional_context)
        for name in ("input_ids", "attention_mask"):
            if row_processor.unconditional_context[name] is not None:
                row_processor.unconditional_context[name] = _part_of_row(
                    row_processor.unconditional_context[name], row, rows
                )
    else:
        return processor
    return row_processor


def _knows_padding(processor: Any) -> bool:
    """Return whether a processor is a repetition penalty with the padding length of each row."""
    return isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
        getattr(processor, "prompt_ignore_length", None), Tensor
    )


def _ignoring_padding(processor: Any, padding: int) -> Any:
    copied = copy.copy(processor)
    copied.prompt_ignore_length = padding or None
    return copied


def _part_of_row(batch: Any, row: int, rows: int) -> Any:
    """Return a row's entry of a batch with one entry per prompt; all prompts have the same number of rows."""
    prompt = row * len(batch) // rows
    return batch[prompt : prompt + 1]


class Suppressed:
    """A processor that makes some tokens impossible, everywhere or at one length of the sequence.

    Transformers' own processor looks up each token of the vocabulary at every call. That is slower than a
    forward pass of a small model.
    """

    def __init__(self, tokens: Tensor, length: int | None = None) -> None:
        self.tokens, self.length = tokens, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores with -inf for the suppressed tokens."""
        if self.length is not None and input_ids.shape[1] != self.length:
            return scores
        tokens = self.tokens.to(scores.device)
        in_vocabulary = tokens[(tokens >= 0) & (tokens < scores.shape[-1])]
        return scores.index_fill(-1, in_vocabulary, -torch.inf)


class OriginalPromptProcessor:
    """A processor that calls other processors with the caller's prompt: with padding, on its device.

    Args:
        prompt: The prompt with padding, ``[1, T]``.
        prompt_length: Number of its tokens without padding.
        processors: The processors to call.
    """

    def __init__(self, prompt: Tensor, prompt_length: int, processors: tuple[Processor, ...]) -> None:
        self.prompt, self.prompt_length, self.processors = prompt, prompt_length, processors

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply the processors to the prompt with padding and the new tokens."""
        ids = torch.cat((self.prompt, input_ids[:, self.prompt_length :].to(self.prompt.device)), dim=1)
        processed = scores.to(ids.device)
        for processor in self.processors:
            processed = processor(ids, processed)
        return processed.to(scores.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> OriginalPromptProcessor:
        copies = SamplingParams(processors=self.processors).fork().processors
        return OriginalPromptProcessor(self.prompt, self.prompt_length, tuple(copies))

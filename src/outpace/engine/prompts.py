"""Prompts in all forms that users pass: text, messages, token ids, a tokenizer's encoding."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from outpace.checks.arguments import kind
from outpace.checks.text import check_text
from outpace.engine.text import chat_ids
from outpace.models.source import Source

EXPECTED = (
    "a string, messages, token ids [n] (or [B, n], a batch), a tokenizer's encoding, or a list of prompts"
)
IGNORED_KEYS = {"token_type_ids", "special_tokens_mask", "offset_mapping", "length"}
"""Keys that tokenizers return beside ``input_ids``, and that a causal model does not need."""


def split(prompt: Any) -> tuple[list[Any], bool]:
    """Return the prompts of a call, and whether the call passed a single prompt.

    A list of prompts is a batch, even with one prompt. A tensor, an array or an encoding with one row is a
    single prompt, because tokenizers return a single prompt in this form.
    """
    if isinstance(prompt, Mapping):
        return _split_encoding(prompt)
    if isinstance(prompt, str | bytes | Source):
        return [prompt], True
    if isinstance(prompt, Tensor) or hasattr(prompt, "tolist"):
        return _split_array(prompt)
    if isinstance(prompt, Sequence | Iterator):
        items = list(prompt)
        single = not items or _is_scalar(items[0]) or _is_message(items[0])
        return ([items], True) if single else (items, False)
    return [prompt], True


def token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """Return the token ids of one of the prompts that ``split`` returned."""
    messages = isinstance(prompt, list) and prompt and _is_message(prompt[0])
    if tokenizer is None and (messages or isinstance(prompt, str)):
        got = "messages" if messages else "a string"
        raise ValueError(
            f"prompt: got {got}, and the Decoder has no tokenizer; pass tokenizer= to Decoder, or token ids"
        )
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        return list(tokenizer(prompt).input_ids)
    if messages:
        return chat_ids(tokenizer, prompt)
    if isinstance(prompt, Mapping):
        ids = token_ids(prompt["input_ids"], tokenizer)
        return ids if prompt.get("attention_mask") is None else _unpadded(ids, prompt["attention_mask"])
    if not isinstance(prompt, list) and not hasattr(prompt, "tolist"):
        raise TypeError(f"prompt: got {kind(prompt)[:80]}; it must be {EXPECTED}")
    return _integers(prompt)


def is_features(prompt: Any) -> TypeGuard[Tensor]:
    """Return whether a prompt that ``split`` returned is features of speech, ``[bins, frames]``."""
    return isinstance(prompt, Tensor) and prompt.is_floating_point() and prompt.dim() == 2


def single_prompt(prompt: Any) -> Any:
    """Return one item of a list of prompts, in the form that ``split`` gives a single prompt.

    Raises:
        ValueError: The item is itself a batch.
    """
    prompts, single = split(prompt)
    if not single:
        raise ValueError(
            f"prompt: got a batch of {len(prompts)} inside a list of prompts; the list must be flat"
        )
    return prompts[0]


def _split_array(array: Any) -> tuple[list[Any], bool]:
    if not isinstance(array, Tensor):
        array = np.asarray(array)
        if array.dtype.kind not in "biuf":  # strings, or objects such as lists of ids
            return split(array.tolist())
    shape = tuple(array.shape)
    features = array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"
    num_axes = 2 if features and len(shape) > 1 else 1  # of one prompt
    if not num_axes <= len(shape) <= num_axes + 1 or 0 in shape[:-1]:
        expected = (
            "features [bins, frames], or [B, bins, frames]" if num_axes == 2 else "token ids [n], or [B, n]"
        )
        raise ValueError(f"prompt: got shape {shape}; it must be that of {expected} for a batch")
    array = torch.as_tensor(array) if num_axes == 2 else array
    return ([array], True) if len(shape) == num_axes else (list(array), shape[0] == 1)


def _split_encoding(encoding: Mapping[str, Any]) -> tuple[list[Any], bool]:
    fields = {name: value for name, value in encoding.items() if value is not None}
    if "role" in fields:
        raise TypeError("prompt: got a single message; it must be a list of messages")
    name = "input_features" if "input_features" in fields else "input_ids"
    if name not in fields:
        got = f"keys {', '.join(map(str, fields))}" if fields else "no keys"
        raise ValueError(
            f"prompt: got {type(encoding).__name__} with {got}; it must have input_ids or input_features"
        )
    unknown = [field for field in fields if field not in {name, "attention_mask", *IGNORED_KEYS}]
    if unknown:
        raise ValueError(
            f"prompt: got the key {unknown[0]}, which is not used; leave it out, as only {name} and "
            "attention_mask have an effect"
        )
    prompts, single = split(fields[name])
    mask = fields.get("attention_mask")
    if name == "input_features" or mask is None:  # a speech encoder takes padding as input, too
        return prompts, single
    masks = _as_list(mask)
    masks = [masks] if not masks or _is_scalar(masks[0]) else masks
    if len(masks) != len(prompts):
        raise ValueError(
            f"attention_mask: got {len(masks)} rows; it must have {len(prompts)}, as many as input_ids"
        )
    pairs = zip(prompts, masks, strict=True)
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in pairs], single


def _unpadded(ids: list[int], mask: Any) -> list[int]:
    """Return the ids where the mask is 1. The others are padding, on the left or on the right."""
    visible = [value == 1 for value in _as_list(mask)]
    if len(visible) != len(ids):
        raise ValueError(
            f"attention_mask: got {len(visible)} values; it must have {len(ids)}, as many as input_ids"
        )
    if not all(value in (0, 1) for value in _as_list(mask)):
        raise ValueError(
            "attention_mask: got a value other than 0 and 1; it must be 1 for tokens, and 0 for padding"
        )
    if True not in visible:
        return []
    first, last = visible.index(True), len(visible) - visible[::-1].index(True)
    if not all(visible[first:last]):
        raise ValueError(
            "attention_mask: got 0 between two values of 1; it must be 0 for padding only, left or right"
        )
    return ids[first:last]


def _as_list(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _integers(values: Any) -> list[int]:
    is_array = hasattr(values, "tolist")
    ids: list[Any] = values.tolist() if is_array else values
    if set(map(type, ids)) <= {int}:
        return list(ids)
    ids = [value.item() if hasattr(value, "item") else value for value in ids]  # scalars of NumPy and PyTorch
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int):
            got = f"{values.dtype} values" if is_array else f"{kind(value)[:80]} at {index}"
            raise TypeError(f"prompt: got {got}; token ids must be ints")
    return ids


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return False
    return isinstance(value, numbers.Number | np.generic) or (isinstance(value, Tensor) and not value.dim())


def _is_message(value: Any) -> bool:
    """Return whether a value is a message of a conversation: a mapping that is not an encoding."""
    return isinstance(value, Mapping) and not {"input_ids", "input_features"} & set(value)

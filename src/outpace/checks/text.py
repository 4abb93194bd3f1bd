"""Text of tokens, and incomplete text: strings that UTF-8 cannot encode, and bytes that are no character."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes incomplete bytes to it


def check_text(name: str, text: str) -> None:
    """Raise if a string cannot be encoded in UTF-8, instead of an error that depends on the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at {error.start}, which is no character"
        raise ValueError(f"{name}: got {got}; it must be text in UTF-8") from None


def decoding(tokenizer: Any, **options: bool) -> Callable[[list[int]], str]:
    """Return a function that decodes tokens as ``tokenizer.decode`` does.

    Where Transformers only calls the ``tokenizers`` library, the function calls it in a third of the time.

    Args:
        tokenizer: A Transformers tokenizer.
        options: ``skip_special_tokens`` and ``clean_up_tokenization_spaces`` of ``tokenizer.decode``.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    own: Any = type(tokenizer)
    calls_backend = (
        isinstance(tokenizer, Fast)
        and own.decode is Fast.decode
        and own._decode is Fast._decode
        and not {"decode", "_decode"} & vars(tokenizer).keys()
        and not options.get("clean_up_tokenization_spaces", tokenizer.clean_up_tokenization_spaces)
    )
    if calls_backend:
        return partial(_decode_in_backend, tokenizer, options.get("skip_special_tokens", False))
    return partial(_decode, tokenizer, options)


def _decode_in_backend(tokenizer: Any, skip_special_tokens: bool, tokens: list[int]) -> str:
    return str(tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def _decode(tokenizer: Any, options: dict[str, bool], tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, **options))

"""Text of tokens, and incomplete text: strings that UTF-8 cannot encode, and bytes that are no character."""

from __future__ import annotations

from collections.abc import Callable
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
    if (
        isinstance(tokenizer, Fast)
        and own.decode is Fast.decode
        and own._decode is Fast._decode
        and not {"decode", "_decode"} & vars(tokenizer).keys()
        and not options.get("clean_up_tokenization_spaces", tokenizer.clean_up_tokenization_spaces)
    ):
        decode, skip = tokenizer.backend_tokenizer.decode, options.get("skip_special_tokens", False)
        return lambda tokens: str(decode(tokens, skip_special_tokens=skip))
    return lambda tokens: str(tokenizer.decode(tokens, **options))

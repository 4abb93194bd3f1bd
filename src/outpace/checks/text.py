"""Incomplete text: strings that UTF-8 cannot encode, and bytes that are not yet a character."""

from __future__ import annotations

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes incomplete bytes to it


def check_text(name: str, text: str) -> None:
    """Raise if a string cannot be encoded in UTF-8, instead of an error that depends on the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at {error.start}, which is no character"
        raise ValueError(f"{name}: got {got}; it must be text in UTF-8") from None
